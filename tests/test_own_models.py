"""The section "Your own models and data" of the recipes' guide, done as a user does it.

Two folders with models, a parquet file, and the section's own blocks.
"""

import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import build_parser, main
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.generated_tasks import generate_lookups
from prime_composer.recipe.loading import parse_recipe
from tests.command import prime_rl, toml
from tests.conftest import TINY_MODEL

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: parquet)")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra: parquet)")

ROOT = Path(__file__).parents[1]
TITLE = "## Your own models and data"
WINDOW = {"vocab_size": 330, "max_position_embeddings": 512}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What do {problem.question} have?"},
            {"role": "assistant", "content": problem.answer},
        ]
    }
    for problem in generate_lookups(60, 0)
]


def section() -> str:
    """Return the section, in whichever document of the recipes it is."""
    for path in sorted((ROOT / "recipes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if TITLE in text:
            return text.split(TITLE)[1].split("\n## ")[0]
    raise AssertionError(f"no document has {TITLE!r}")


def blocks() -> list[str]:
    found = re.findall(r"(?:^(?:    .*)?\n)+", section(), re.MULTILINE)
    return [text for block in found if (text := textwrap.dedent(block).strip("\n"))]


def block_with(text: str) -> str:
    (block,) = (block for block in blocks() if text in block)
    return block


COMPLETE = block_with("[student]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder: two models that the package prepares, and a parquet file."""
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), "questions.parquet")
    raw = {
        **tomllib.loads(COMPLETE),
        "teacher": {"prepare": {**TINY_MODEL, **WINDOW, "seed": 1, "sft_steps": 20}},
        "student": {"prepare": {**TINY_MODEL, **WINDOW, "seed": 2, "sft_steps": 5}},
    }
    (tmp_path / "models.toml").write_text(toml(raw))
    from prime_composer.local.sources import load_sources
    from prime_composer.tiny_models.cache import prepare_models

    recipe = parse_recipe(raw)
    for name, path in prepare_models(recipe, load_sources(recipe)).items():
        Path(f"my-{name}").symlink_to(path)
    return tmp_path


def run(name: str, text: str, *words: str) -> int:
    Path(name).write_text(text)
    return main(["rl", "--engine", "local", "--config", name, *words])


QUICK = (
    *("--set", "rollout.backend=transformers", "--set", "trainer.steps=2"),
    *("--set", "trainer.batch_size=4", "--set", "eval.size=4", "--set", "eval.kl_size=4"),
    *("--set", "rollout.max_tokens=8", "--set", "logging.tensorboard=false"),
)


def test_command_lines_of_the_section_parse() -> None:
    lines = [line for block in blocks() for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("prime-rl ")]
    assert len(commands) == 3
    for command in commands:
        build_parser().parse_args(command[1:])


def test_recipe_trains_and_its_student_loads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from prime_composer.backends.cpu_guard import hide_cuda_packages

    hide_cuda_packages()
    assert run("recipe.toml", COMPLETE, "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "54 problems to train on, 6 held out" in planned
    assert re.search(r"longest prompt: \d+ tokens.*; the context is 512\n", planned)
    assert run("recipe.toml", COMPLETE, *QUICK) == 0
    printed = capsys.readouterr().out
    student = folder / "outputs" / "recipe" / "checkpoints" / "step_000002"
    assert f"student: {student.relative_to(folder)} (a Hugging Face directory)\n" in printed
    assert "eval/accuracy" in read_metrics(folder / "outputs" / "recipe")[0]
    # The section's lines for transformers, and the paths of the others.
    asked = "outputs/recipe/checkpoints/step_000060"
    code = block_with("pipeline").replace(asked, str(student.relative_to(folder)))
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    said = names["chat"]([{"role": "user", "content": "What do Ada have?"}], max_new_tokens=4)
    assert [turn["role"] for turn in said[0]["generated_text"]] == ["user", "assistant"]
    for line in block_with("vllm serve").splitlines():
        assert asked in line.split()


def test_prompts_without_answers_report_no_accuracy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No 0 % stands for what is not known: on the screen, in the file, in the report."""
    rows = [{"messages": row["messages"][:1]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "questions.parquet")
    none = ("--set", "data.metric=none")
    assert run("recipe.toml", COMPLETE, *QUICK) == 2
    assert 'set metric = "none" for prompts without answers' in capsys.readouterr().err
    assert run("recipe.toml", COMPLETE, *QUICK, *none) == 0
    assert main(["report", "outputs/recipe", "--log-kl"]) == 0
    printed = capsys.readouterr().out
    assert "0.0%" not in printed and "reverse KL" in printed and "correct" not in printed
    records = read_metrics(folder / "outputs" / "recipe")
    names = {name for record in records for name in record}
    assert "eval/reverse_kl" in names and "eval/truncated" in names
    assert not [name for name in names if "accuracy" in name or name.startswith("rollout/rew")]


def test_python_block_trains_on_its_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tomllib.loads(COMPLETE)
    raw["rollout"] |= {"backend": "transformers", "max_tokens": 8}
    raw["trainer"] |= {"steps": 1, "batch_size": 4}
    raw["eval"] = {"size": 4, "kl_size": 4}
    Path("recipe.toml").write_text(toml(raw))
    names: dict[str, Any] = {}
    exec(compile(block_with("distill("), "README.md", "exec"), names)
    outcome = names["outcome"]
    (checkpoint,) = list_checkpoints(outcome.run_dir)
    assert outcome.student == checkpoint.path and outcome.steps == 1
    assert "eval/accuracy" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.vllm
def test_complete_recipe_trains_with_vllm(folder: Path) -> None:
    """As it is written, but for the number of steps."""
    Path("recipe.toml").write_text(COMPLETE)
    words = ("--set", "trainer.steps=2", "--set", "eval.size=8", "--set", "eval.kl_size=8")
    done = prime_rl("rl", "--engine", "local", "--config", "recipe.toml", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "student: outputs/recipe/checkpoints/step_000002" in done.stdout
