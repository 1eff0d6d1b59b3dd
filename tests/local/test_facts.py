"""The recipe of a real chat model, run on a tiny one: a task that trains and two that do not."""

from pathlib import Path

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers, load_student
from prime_composer.cli.commands import main
from prime_composer.local.answers import read_answers
from prime_composer.local.tracker import read_metrics
from tests.command import sets
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.toml"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with random weights, and a tokenizer that has a chat template."""
    transformers = import_transformers()
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = load_student(tiny_models(TINY_RECIPE)["student"])[1]
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def overrides(model: Path) -> list[str]:
    small = ["trainer.steps=2", "trainer.batch_size=4", "eval.size=9", "eval.kl_size=6"]
    return [
        f"teacher.model={model}",
        f"student.model={model}",
        "rollout.backend=transformers",
        "rollout.max_tokens=6",
        "rollout.max_model_len=256",
        "logging.tensorboard=false",
        *(f"environments.{name}.size=40" for name in ("ages", "towns", "capitals")),
        *small,
    ]


def test_recipe_trains_on_one_task_and_measures_three(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps ask for ages alone. Each evaluation has three answers to each task, and the report
    says which tasks train nothing."""
    run_dir = tmp_path / "run"
    words = sets(*overrides(chat_model))
    assert main(["rl", "--config", str(RECIPE), *words, "--output-dir", str(run_dir)]) == 0
    capsys.readouterr()
    start, *steps = read_metrics(run_dir)
    for record in (start, steps[-1]):
        for name in ("ages", "towns", "capitals"):
            assert 0 <= record[f"eval/accuracy/{name}"] <= 1
            assert record[f"eval/reverse_kl/{name}"] > 0
    assert "teacher/accuracy/towns" in start
    trained = {key.rpartition("/")[2] for key in steps[0] if key.startswith("rollout/reward/")}
    assert trained == {"ages"}
    asked = [row.question for row in read_answers(run_dir)[0]]
    assert [("How old", "In which town", "What is the capital")[i % 3] in question
            for i, question in enumerate(asked)] == [True] * 9  # fmt: skip
    assert main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.count("towns (not trained on)") == 2 and out.count("capitals (not trained on)") == 2
    assert "ages (not trained on)" not in out
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
