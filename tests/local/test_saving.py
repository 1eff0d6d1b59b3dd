"""What a checkpoint writes is tried before the first step, and files of the model stay its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    load_model,
    load_student,
    load_tokenizer,
)
from prime_composer.backends.lora.adapter import LoraAdapter
from prime_composer.backends.transformers import try_saving
from prime_composer.cli.commands import main
from prime_composer.recipe.model import LoraConfig
from tests.studies.architecture_models import write_model
from tests.studies.architectures import recipe

LOSS = 'type="topk_reverse_kl", k=8'
SAMPLES = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 0), ("teacher", 1)):
        write_model("Qwen3", root / name, seed)
    return root


@pytest.fixture
def student(folders: Path, tmp_path: Path) -> Path:
    """A copy of a student whose files a test may change."""
    import shutil

    return Path(shutil.copytree(folders / "student", tmp_path / "student"))


def run(student: Path, folders: Path, tmp_path: Path, *more: str) -> tuple[int, Path]:
    """Train one step; return the exit status and the run directory."""
    config = recipe(tmp_path, student, folders / "teacher", "student/transformers", LOSS)
    output = tmp_path / "out"
    words = ["rl", "--engine", "local", "--config", str(config), "--output-dir", str(output)]
    return main([*words, *more]), output


def test_generation_config_of_a_student_is_copied(student: Path, folders: Path, tmp_path: Path):
    """A file that transformers reads and refuses to write is in the checkpoint, byte for byte."""
    written = json.dumps(SAMPLES, indent=7)
    (student / "generation_config.json").write_text(written)
    status, output = run(student, folders, tmp_path)
    saved = output / "checkpoints" / "step_000001"
    assert status == 0 and (saved / "model.safetensors").is_file()
    assert (saved / "generation_config.json").read_text() == written
    assert run(student, folders, tmp_path, "--resume")[0] == 0
    load_student(saved)


def test_generation_config_is_not_made_up(student: Path, tmp_path: Path):
    """A student without one has none in its checkpoints."""
    (student / "generation_config.json").unlink(missing_ok=True)
    net: Any = load_model(student)
    net.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "generation_config.json").exists()


def test_merged_adapter_copies_the_generation_config(student: Path, tmp_path: Path):
    """The merged checkpoint of a LoRA student has its base's own file."""
    pytest.importorskip("peft")
    (student / "generation_config.json").write_text(json.dumps(SAMPLES))
    net, tokenizer = load_student(student)
    adapter = LoraAdapter.of_model(net, LoraConfig(rank=2, alpha=2), student, seed=0, merge=True)
    try_saving(adapter, tokenizer)
    (tmp_path / "merged").mkdir()
    adapter.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == SAMPLES


def test_run_that_could_not_save_ends_before_step_one(
    student: Path,
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """One sentence with the library's words; no step was trained."""

    def fail(*_: object, **__: object) -> None:
        raise TypeError("no such kind")

    monkeypatch.setattr(type(load_tokenizer(student)), "save_pretrained", fail)
    status, output = run(student, folders, tmp_path)
    error = capsys.readouterr().err
    assert status != 0 and "[student]" in error and "no such kind" in error
    assert not (output / "metrics.jsonl").exists()


def test_tokenizer_that_comes_back_as_another_is_refused(
    student: Path, monkeypatch: pytest.MonkeyPatch
):
    """Checkpoints whose tokens are others would be trained for nothing."""
    net, tokenizer = load_student(student)
    tokenizer.add_tokens(["<new>"])
    monkeypatch.setattr(
        type(tokenizer),
        "save_pretrained",
        lambda self, folder: load_tokenizer(student)._tokenizer.save(f"{folder}/tokenizer.json"),
    )
    with pytest.raises(ModelUnavailable, match=r"\[student\] its tokenizer"):
        try_saving(net, tokenizer)


def test_trial_writes_no_weights(student: Path, monkeypatch: pytest.MonkeyPatch):
    """A trial takes no room: a model's weights are left out of it."""
    net, tokenizer = load_student(student)
    given: list[dict[str, torch.Tensor]] = []
    save = type(net).save_pretrained
    monkeypatch.setattr(
        type(net),
        "save_pretrained",
        lambda self, folder, state_dict: (
            given.append(state_dict),
            save(self, folder, state_dict=state_dict),
        ),
    )
    try_saving(net, tokenizer)
    assert given == [{}]


@pytest.mark.parametrize(
    ("file", "content", "more", "word"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, (), "gptq"),
        ("config.json", {}, ("--set", "student.quantize={bits=3, group=7}"), "quantize.group = 7"),
        ("generation_config.json", {"eos_token_id": "</s>"}, (), "eos_token_id = '</s>'"),
        ("generation_config.json", {"eos_token_id": [1, -1]}, (), "eos_token_id = -1"),
        ("generation_config.json", [1], (), "not a mapping"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry"])
def test_student_no_run_takes_fails_the_dry_run_too(
    dry: tuple[str, ...],
    file: str,
    content: Any,
    more: tuple[str, ...],
    word: str,
    student: Path,
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """In one sentence with the same words, also where a library to load it is missing."""
    path = student / file
    if isinstance(content, dict) and path.exists():
        content = json.loads(path.read_text()) | content
    path.write_text(json.dumps(content))
    assert run(student, folders, tmp_path, *more, *dry)[0] == 2
    said = capsys.readouterr().err
    assert word in said and str(student) in said
    assert not (tmp_path / "out" / "checkpoints").exists()
