"""The recipe of a real chat model, run on a tiny one: a task that trains and two that do not."""

from pathlib import Path

import pytest

from prime_composer.cli.commands import main
from prime_composer.local.answers import read_answers
from prime_composer.local.tracker import read_metrics
from tests.chat_models import TEXT_END, TURN_END, make_tokenizer, save_model
from tests.command import sets

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.toml"


SMALL = [
    *("rollout.backend=transformers", "rollout.max_tokens=6", "rollout.max_model_len=512"),
    *(f"environments.{name}.size=40" for name in ("ages", "towns", "capitals")),
    *("trainer.steps=2", "trainer.batch_size=4", "eval.size=9", "eval.kl_size=6"),
    "logging.tensorboard=false",
]


def test_recipe_trains_on_one_task_and_measures_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps ask for ages alone. Each evaluation has three answers to each task, and the report
    says which tasks train nothing."""
    run_dir = tmp_path / "run"
    model = save_model(tmp_path / "chat", make_tokenizer(), [TEXT_END, TURN_END])
    words = sets(f"teacher.model={model}", f"student.model={model}", *SMALL)
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
