"""``prime-rl probe`` as a user types it: tables, JSON, exit codes."""

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_model
from prime_composer.cli import probe as command
from prime_composer.local.probe.run import probe
from tests.command import toml
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.helpers import tiny_models

Raw = Callable[..., dict[str, Any]]
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def probes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Probe the recipe of a table within this process, with a hundredth of the time per column."""
    monkeypatch.setattr(command, "probe", partial(probe, seconds=0.02))

    def call(raw: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
        Path("tiny.toml").write_text(toml(raw))
        return cli("probe", "--config", "tiny.toml", *words)

    return call


def test_tables_have_every_fact_of_the_json(probes: Cli, tiny_recipe: Raw) -> None:
    """Titles are the names of fields but for some. Progress goes to stderr; nothing is written."""
    report = json.loads(probes(tiny_recipe(), "--json", "--set", "loss.k=5").stdout)
    check_keys(report)
    done = probes(tiny_recipe(loss__k=5))
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    metrics = report["step"].pop("metrics")
    assert "rollout/entropy" in metrics and [name for name in metrics if name not in printed] == []
    for record in (report["step"], report["student"], *report["teachers"].values()):
        names = {name for name, value in fields_of(record) if value not in (None, [], {})}
        titles = {command.TITLES.get(name, name.replace("_", " ")) for name in names - HEADINGS}
        assert [title for title in titles if title not in printed] == []
    assert "[teacher] scores passed" in printed and "recommendations - [teacher]" in printed
    assert "loading the student" in done.stderr and "loading" not in done.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.toml"]


HEADINGS = {"facts", "unmeasured"}


def fields_of(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field of a record of the JSON, and of those within it."""
    for one in record if isinstance(record, list) else [record]:
        if isinstance(one, dict):
            for name, value in one.items():
                yield name, value
                if name != "unmeasured":
                    yield from fields_of(value)


def check_keys(report: dict[str, Any]) -> None:
    """Check the keys of a report in JSON, which are stable, and that it has numbers."""
    assert list(report) == [
        "passed", "checks", "warnings", "recommendations", "step", "student", "teachers"
    ]  # fmt: skip
    assert report["passed"] is True
    assert set(report["checks"][0]) == {"name", "passed", "message"}
    assert set(report["step"]) == {
        "rollouts", "tokens", "column", "sample_seconds", "score_seconds", "train_seconds",
        "run_seconds", "metrics",
    }  # fmt: skip
    teacher = report["teachers"]["teacher"]
    assert {
        "facts", "same_prompts", "head_bfloat16", "share", "throughput", "plugin", "support",
        "wrong_answers", "unmeasured", "head_dtype", "max_logprobs", "sampled_logprob",
        "scored_logprob",
    } == set(teacher)  # fmt: skip
    speeds = [entry["tokens_per_second"] for entry in teacher["throughput"]]
    assert len(speeds) == 7 and all(isinstance(speed, float) for speed in speeds)
    numbers = [teacher["support"]["recommended_k"], teacher["support"]["by_k"][0]["reverse_kl"]]
    numbers += [report["step"]["score_seconds"], teacher["facts"]["context"]]
    assert all(isinstance(number, int | float) for number in numbers)


@pytest.mark.parametrize("plugin", [True, False])
def test_server_without_a_recipe_says_what_it_can(
    plugin: bool, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And scores by other weights than it samples: a check fails, by its name."""
    monkeypatch.setattr(command, "SECONDS_PER_COLUMN", 0.02)
    teacher = tiny_models(TINY_RECIPE)["teacher"]

    def probed(url: str) -> tuple[int, Any]:
        done = cli("probe", "--json", "--teacher", url)
        return done.returncode, json.loads(done.stdout)

    model = load_model(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(-2)
    model.save_pretrained(tmp_path / "other")
    other = tmp_path / "other"
    with SpoilingServer(teacher, plugin=plugin, max_logprobs=20, other=other) as server:
        status, report = probed(server.url)
        server.spoil("other_model", road="binary" if plugin else "scoring")
        failed, otherwise = probed(server.url)
    assert status == 0 and failed == 1
    assert {check["name"]: check["passed"] for check in otherwise["checks"]} == {
        "answers": True, "scores of what it samples": False
    }  # fmt: skip
    found = report["teachers"]["teacher"]
    assert found["facts"]["context"] == 256 and found["facts"]["vocabulary"] == 300
    assert found["max_logprobs"] == 20
    assert found["sampled_logprob"] == pytest.approx(found["scored_logprob"], abs=1e-4)
    speeds = {one["column"]: one["tokens_per_second"] for one in found["throughput"]}
    assert [name for name, speed in speeds.items() if speed] == (
        ["1", "32", "states"] if plugin else ["1"]
    )
    assert bool(report["recommendations"]) is not plugin


@pytest.mark.parametrize(
    "words", [["--teacher", "http://127.0.0.1:1", "--set", "loss.k=5"], ["--model", "m"]]
)
def test_probe_wants_a_recipe_or_a_server(words: list[str], cli: Cli) -> None:
    done = cli("probe", *words)
    assert done.returncode == 2 and "--config" in done.stderr and "--teacher" in done.stderr


def test_a_failed_check_exits_with_1_and_its_name(probes: Cli, tiny_recipe: Raw) -> None:
    """The K of the loss is too large for the vocabulary. The rest is measured all the same."""
    done = probes(tiny_recipe(loss__k=301))
    assert done.returncode == 1
    name = "[teacher] tokenizer, vocabulary, context"
    assert f"prime-rl probe: {name}: The loss asks for K = 301" in done.stderr
    assert f"{name}   FAILED" in done.stdout and "tokens per second" in done.stdout


def test_models_that_do_not_open_are_a_check_in_json(probes: Cli, tiny_recipe: Raw) -> None:
    student = {"model": str(tiny_models(TINY_RECIPE)["student"])}
    raw = tiny_recipe(student=student, teacher={"model": "./absent"})
    done = probes(raw, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["student"] is None
    assert [check["name"] for check in report["checks"]] == ["opening the models"]
    assert "Traceback" not in done.stderr
