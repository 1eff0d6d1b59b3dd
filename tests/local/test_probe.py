"""The probe's numbers against independent computations, and what it says about misfits."""

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prime_composer.backends.hf_model import import_transformers, load_tokenizer
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.opening import open_engine
from prime_composer.local.preflight import CheckResult
from prime_composer.local.probe.report import (
    ProbeReport,
)
from prime_composer.local.probe.run import FirstStep, probe_engine
from prime_composer.local.probe.teacher import (
    hidden_by_k,
    support_facts,
)
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe
from prime_composer.scoring.wire import VERSION
from prime_composer.step.batch import Sample
from prime_composer.tiny_models.cache import prepare_models
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.helpers import VOCAB, probed, tiny_models
from tests.teachers.own import own_recipe


@pytest.fixture(scope="module")
def tiny_report() -> ProbeReport:
    return probed(TINY_RECIPE)


@contextlib.contextmanager
def opened(raw: dict[str, Any]) -> Iterator[tuple[Recipe, Engine, Collector]]:
    """Open a recipe's models; yield what collects the step that a probe runs, too."""
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    folders = prepare_models(recipe, problems)
    with open_engine(recipe, problems, folders, lambda text: None) as engine:
        yield recipe, engine, Collector(engine, recipe)


def rollouts_of(raw: dict[str, Any]) -> Sequence[Sample]:
    """Sample the rollouts of the step that a probe runs."""
    step = FirstStep()
    with opened(raw) as (_, _, collector):
        step.run(collector)
    return step.samples


def failures(report: ProbeReport) -> list[CheckResult]:
    return [finding for finding in report.findings if finding.state == "failed"]


@pytest.fixture
def with_models(tiny_recipe, tmp_path):
    """Recipe and directories of the tiny models: the teacher is a copy that a test may spoil."""

    def make(**changes: Any) -> tuple[dict[str, Any], Path, Path]:
        folders = tiny_models(TINY_RECIPE)
        teacher = tmp_path / "teacher"
        shutil.copytree(folders["teacher"], teacher)
        models = {"student": {"model": str(folders["student"])}, "teacher": {"model": str(teacher)}}
        return tiny_recipe(**models, **changes), folders["student"], teacher

    return make


# Numbers --------------------------------------------------------------------------------------


def tail_kl(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Reverse KL on the teacher's top k and a tail, by a loop over the positions."""
    total = 0.0
    for own, other in zip(p, q, strict=True):
        head = np.argsort(-other)[:k]
        rest = np.setdiff1d(np.arange(len(own)), head)
        total += (own[head] * np.log(own[head] / other[head])).sum()
        if len(rest):
            total += own[rest].sum() * np.log(own[rest].sum() / other[rest].sum())
    return total / len(p)


def test_recommended_k_of_equal_models_is_1():
    logs = torch.randn(40, 64).log_softmax(-1).sort(descending=True).values[:, :32]
    assert support_facts(logs, logs, (1, 8)).recommended_k == 1
    assert hidden_by_k(logs, logs, 1).hidden == 0


# A whole probe --------------------------------------------------------------------------------


def test_tiny_recipe_passes_every_check(tiny_report):
    assert tiny_report.passed and {one.state for one in tiny_report.findings} == {"ok"}
    names = [finding.name for finding in tiny_report.findings]
    assert "weight sync" in names and "[teacher] scores" in names
    assert tiny_report.teachers["teacher"].same_prompts is True
    assert tiny_report.teachers["teacher"].facts.largest_k == VOCAB
    assert tiny_report.teachers["teacher"].head_bfloat16 is False
    assert tiny_report.teachers["teacher"].plugin is None
    metrics = tiny_report.step.metrics
    assert metrics["sampler/mismatch_kl"] < 1e-8 and math.isfinite(metrics["loss"])


def test_support_facts_equal_full_softmaxes_of_both_models(tiny_report):
    """The same rollouts are sampled again, and both checkpoints are read by transformers alone."""
    folders, auto = tiny_models(TINY_RECIPE), import_transformers().AutoModelForCausalLM
    models = [auto.from_pretrained(folders[name]).eval() for name in ("student", "teacher")]
    rows: list[list[np.ndarray]] = [[], []]
    with torch.no_grad():
        for own in rollouts_of(TINY_RECIPE):
            ids = own.rollout.token_ids
            for model, found in zip(models, rows, strict=True):
                logits = model(ids[None]).logits[0, own.rollout.start - 1 : -1].double()
                found.append(logits.softmax(-1).numpy())
    p, q = (np.concatenate(found) for found in rows)
    support = tiny_report.teachers["teacher"].support
    assert support.positions == len(p) and support.largest_k == 64
    assert [row.k for row in support.by_k] == [1, 8, 20, 32, 64]
    for row in support.by_k:
        assert row.reverse_kl == pytest.approx(tail_kl(p, q, row.k), abs=1e-4)
        outside = 1 - np.sort(q)[:, -row.k :].sum(1).mean()
        assert row.mass_outside == pytest.approx(outside, abs=1e-5)
    hidden = [1 - tail_kl(p, q, k) / tail_kl(p, q, 64) for k in range(1, 65)]
    assert support.recommended_k == 1 + next(i for i, share in enumerate(hidden) if share <= 0.05)
    head = np.sort(q)[:, -64:]
    tail = 1 - head.sum(1)
    entropy = -((head * np.log(head)).sum(1) + tail * np.log(tail)).mean()
    assert support.entropy == pytest.approx(entropy, abs=1e-4)


def test_forecast_is_the_clock_of_a_step(tiny_report):
    """Each part's seconds are part of a step's; each column's are its speed times the tokens."""
    step, teacher = tiny_report.step, tiny_report.teachers["teacher"]
    assert [entry.column for entry in teacher.throughput] == ["0", "1", "8", "20", "32", "64"]
    assert step.rollouts == 6 and step.column == "8"
    assert step.tokens == pytest.approx(6 * step.metrics["rollout/tokens"])
    assert step.sample_seconds == pytest.approx(step.tokens / tiny_report.student.tokens_per_second)
    for entry in teacher.throughput:
        assert entry.seconds_per_step == pytest.approx(step.tokens / entry.tokens_per_second)
    parts = (step.sample_seconds, step.score_seconds, step.train_seconds)
    assert min(parts) > 0 and step.run_seconds >= 4 * sum(parts)


def test_seconds_are_of_the_part_that_took_them(tiny_recipe, monkeypatch):
    with opened(tiny_recipe()) as (recipe, engine, collector):
        step, score, clock, scored = FirstStep(), engine.score, time.perf_counter, []
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 100 * len(scored))
        monkeypatch.setattr(engine, "score", lambda samples: (scored.append(1), score(samples))[1])
        step.run(collector)
    forecast = step.forecast(recipe.trainer, "8")
    assert forecast.score_seconds >= 100 > forecast.sample_seconds + forecast.train_seconds
    assert 400 <= forecast.run_seconds < 800


def test_a_probe_changes_no_weight_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(TINY_RECIPE) as (recipe, engine, _):
        models = (engine.model, engine.sampler.model)
        before = [{n: w.clone() for n, w in model.state_dict().items()} for model in models]
        assert probe_engine(engine, recipe, lambda text: None, 0.01).passed
        for model, weights in zip(models, before, strict=True):
            assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())
            assert all(parameter.grad is None for parameter in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_bfloat16_teacher_is_recognized(tiny_recipe, monkeypatch):
    """One that rounds its logits, as a plain server does. A teacher in this process does not."""
    raw = tiny_recipe()
    raw["teacher"] = {**raw["teacher"], "dtype": "bfloat16"}
    assert probed(raw).teachers["teacher"].head_bfloat16 is False
    rounds = lambda logits: (logits.hidden @ logits.weight.T).float()  # noqa: E731
    monkeypatch.setattr("prime_composer.teachers.transformers.whole_logits", rounds)
    report = probed(raw)
    assert report.teachers["teacher"].head_bfloat16 is True
    assert any("rounded to bfloat16" in text for text in report.recommendations)


def test_an_end_improbable_for_the_teacher_is_advised(with_models):
    """The trained model ends its texts, the hardly trained one would not."""
    raw, student, teacher = with_models(rollout__max_tokens=60)
    raw |= {"student": {"model": str(teacher)}, "teacher": {"model": str(student)}}
    report = probed(raw)
    metrics = report.step.metrics
    assert metrics["rollout/end_teacher"] < 0.1 * metrics["rollout/end_student"]
    assert any("[loss.stops]" in text for text in report.recommendations)
    raw["loss"]["special_tokens"] = {"strings": ["<|endoftext|>"]}
    assert not any("[loss.stops]" in text for text in probed(raw).recommendations)


def test_another_token_fails_its_check_and_the_rest_is_measured(with_models):
    raw, _, teacher = with_models()
    path = teacher / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = load_tokenizer(teacher).tokenize("72")
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    report = probed(raw)
    (failed,) = failures(report)
    assert failed.name == "[teacher] tokenizer, vocabulary, context"
    assert "different vocabularies" in failed.text and not report.passed
    assert report.teachers["teacher"].throughput[-1].tokens_per_second > 0


# Recipes of every kind ------------------------------------------------------------------------


def test_several_teachers_are_measured_on_their_own_share(with_models):
    raw, _, _ = with_models(loss__k=2)
    teacher = raw.pop("teacher")
    raw["teachers"] = {"one": teacher, "two": teacher}
    raw["environments"] = {
        "sums": {"source": "generated", "size": 60, "seed": 1, "teacher": "one", "ratio": 2},
        "both": {
            "source": "generated", "size": 60, "seed": 2, "teacher": {"one": 1, "two": 1}
        },
    }  # fmt: skip
    raw["trainer"]["batch_size"] = 12
    del raw["data"]
    report = probed(raw)
    assert report.passed, report.findings
    assert list(report.teachers) == ["teachers.one", "teachers.two"]
    assert report.teachers["teachers.one"].share == 1.0
    assert report.teachers["teachers.two"].share == pytest.approx(1 / 3)
    for teacher in report.teachers.values():
        (own,) = (entry for entry in teacher.throughput if entry.column == "2")
        assert own.seconds_per_step == pytest.approx(
            teacher.share * report.step.tokens / own.tokens_per_second
        )
    assert any(text.startswith("[teachers.two]") for text in report.recommendations)


POLICY = {"policy": {"hint": "reference", "update": "live"}}


@pytest.mark.parametrize(("teacher", "k"), [("a model", "full"), ("the policy", 4)])
def test_what_a_step_asks_for_is_a_column_of_its_own(tiny_recipe, teacher, k):
    """Hidden states, or a K beside the others; of a model, or of the policy with its hint."""
    raw = tiny_recipe(loss={"type": "topk_reverse_kl", "k": k}, rollout__max_model_len=256)
    if teacher == "the policy":
        raw |= {"teacher": POLICY, "loss": {"type": "self_distillation", "k": k}}
    report = probed(raw)
    found = report.teachers["teacher"]
    assert report.passed, report.findings
    assert report.step.column == ("states" if k == "full" else "4")
    (own,) = (entry for entry in found.throughput if entry.column == report.step.column)
    assert own.tokens_per_second > 0 and report.step.score_seconds > 0
    assert found.share == 1.0
    if teacher == "the policy":
        assert found.facts.model == "the policy, hint 'reference'"


def test_a_recipe_without_a_teacher_is_a_student_alone(tiny_recipe):
    raw = tiny_recipe(loss={"type": "default"}, rollout__group_size=2)
    del raw["teacher"]
    report = probed(raw)
    assert report.passed and report.teachers == {} and report.recommendations == []
    assert report.step.column is None and report.step.score_seconds is None
    assert report.step.train_seconds > 0


def test_a_teacher_with_its_own_tokenizer_is_measured(tiny_recipe):
    """The step's metrics say how many of the student's tokens it can score."""
    report = probed(own_recipe(tiny_recipe, trainer__steps=1))
    assert report.passed, failures(report)
    teacher, metrics = report.teachers["teacher"], report.step.metrics
    assert teacher.same_prompts is None and teacher.head_bfloat16 is None
    assert teacher.throughput[-1].tokens_per_second is not None
    assert teacher.support.by_k[-1].reverse_kl > 0 and teacher.support.entropy > 0
    assert 0 < metrics["xtok/aligned"] < 1
    named = [one.text for one in report.findings if one.name == "a step's metrics"]
    assert any("noncanonical" in one for one in named) == (metrics["xtok/noncanonical"] > 0.05)


# Servers --------------------------------------------------------------------------------------


@pytest.fixture
def served(with_models):
    """A recipe whose student and teacher are servers."""
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> tuple[dict[str, Any], SpoilingServer, SpoilingServer]:
            raw, student_dir, teacher_dir = with_models()
            student = stack.enter_context(SpoilingServer(student_dir))
            teacher = stack.enter_context(SpoilingServer(teacher_dir, **settings))
            raw["rollout"] |= {"backend": "server", "url": student.url}
            raw["teacher"]["url"] = teacher.url
            return raw, student, teacher

        yield make


def test_served_models_are_measured_and_get_no_weights(served):
    raw, student, teacher = served(max_logprobs=20, processed=False)
    report = probed(raw)
    facts = report.teachers["teacher"]
    assert report.passed, report.findings
    (sync,) = (finding for finding in report.findings if finding.name == "weight sync")
    assert sync.state == "skipped" and "others may use" in sync.text
    assert student.requests["/collective_rpc"] == teacher.requests["/collective_rpc"] == 0
    assert facts.facts.largest_k == 20 and facts.facts.url == teacher.url
    refused = {one.column: one.refused for one in facts.throughput if one.refused}
    assert (
        refused.keys() == {"32", "64"} and "64" in refused["64"] and facts.support.largest_k == 20
    )
    assert any("in JSON, several times slower" in text for text in report.recommendations)


def test_a_server_with_the_plugin_shows_its_facts(served):
    """Its head is the checkpoint's, bit for bit; scores come in binary."""
    raw, _, teacher = served(plugin=True)
    report = probed(raw)
    plugin = report.teachers["teacher"].plugin
    assert report.passed and (plugin.version, plugin.vllm) == (VERSION, "0.32.0")
    assert plugin.kinds == ["sampled", "top_k", "given", "hidden"]
    weights = load_file(Path(teacher.model) / "model.safetensors")
    weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    assert (plugin.head["rows"], plugin.head["columns"]) == weight.shape
    assert plugin.head["dtype"] == plugin.head["computed_in"] == "float32"
    digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in weight.numpy())
    assert plugin.head["sha256"] == hashlib.sha256(digests).hexdigest()
    assert teacher.requests["/v1/prime_composer/score"] > 0
    assert not any("JSON" in text for text in report.recommendations)


@pytest.mark.parametrize("within", ["running a step", "measuring teacher"])
def test_a_wrong_score_after_the_preflight_is_named_by_its_part(served, within):
    """The rest is measured all the same, on the rollouts that were sampled before."""
    raw, _, teacher = served()

    def spoil(text: str) -> None:
        if text.startswith("measuring teacher"):
            teacher.heal()
        if text.startswith(within):
            teacher.spoil("positive_0.3", times=10**6)

    report = probed(raw, spoil)
    (failed,) = failures(report)
    assert not report.passed and "wrong score" in failed.text
    if within == "measuring teacher":
        assert failed.name == "[teacher] a step's scoring"
        return
    assert failed.name == "a step's training"
    assert report.step.sample_seconds > 0 and report.step.score_seconds is None
    assert report.teachers["teacher"].support is not None
