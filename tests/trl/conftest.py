"""A tiny student, a tiny teacher, and a trainer over both."""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.cpu_guard import hide_cuda_packages
from tests.tiny_qwen import VOCAB, make_model
from tests.vllm_process import save_tokenizer

ROWS = 8


@pytest.fixture(scope="session")
def trl() -> Iterator[Any]:
    """Return trl, imported without all of vLLM, which takes seconds and warns of its version.

    The libraries' objects are kept out of the garbage collections of trl's loop.
    """
    hide_cuda_packages()
    with pytest.MonkeyPatch.context() as patch:
        if "vllm" not in sys.modules:
            patch.setitem(sys.modules, "vllm", None)
        trl = pytest.importorskip("trl", reason="trl is not installed (it is in the test extra)")
        assert trl.DistillationTrainer and trl.DistillationConfig  # imported at first use
    gc.freeze()
    yield trl
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(trl: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a student and a teacher in memory, their folders, and the tokenizer of both."""
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("trl")
    folders = {}
    for name, tied, seed in (("student", True, 0), ("teacher", False, 1)):
        folders[name] = root / name
        make_model(tied, seed).save_pretrained(folders[name])
        save_tokenizer(folders[name], VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(folders["student"], padding_side="left")
    return SimpleNamespace(
        student=make_model(True, 0),
        teacher=make_model(False, 1),
        folder=folders["student"],
        teacher_folder=folders["teacher"],
        tokenizer=tokenizer,
    )


@pytest.fixture
def make_trainer(trl: Any, models: SimpleNamespace, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a trainer of copies of the two models."""
    from datasets import Dataset

    from prime_composer.trl import OnPolicyDistillationTrainer

    # No word has w0 or w1 in it: the tokenizer splits at special tokens.
    prompts = [
        {"prompt": " ".join(f"w{20 + 9 * row + j}" for j in range(1 + row % 4))}
        for row in range(ROWS)
    ]

    def make(
        loss: Any,
        teacher: Any = None,
        student: Any = None,
        *,
        double: bool = False,
        peft_config: Any = None,
        prompt: Any = None,
        **settings: Any,
    ) -> Any:
        arguments = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": ROWS,
            "per_device_eval_batch_size": 3,
            "max_steps": 1,
            "max_completion_length": 6,
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }
        dtype = torch.float64 if double else torch.float32
        student = copy.deepcopy(models.student if student is None else student).to(dtype)
        teacher = models.teacher if teacher is None else teacher
        if isinstance(teacher, torch.nn.Module):
            teacher = copy.deepcopy(teacher).to(dtype)
        dataset = Dataset.from_list(prompts)
        return OnPolicyDistillationTrainer(
            student,
            teacher,
            trl.DistillationConfig(**arguments | settings),
            train_dataset=dataset,
            eval_dataset=dataset,
            processing_class=models.tokenizer,
            loss=loss,
            peft_config=peft_config,
            teacher_prompt=prompt,
            teacher_tokenizer=None if prompt is None else models.tokenizer,
        )

    return make
