"""Checks of a step by its own numbers: weights, the sampler's log-probs, collapse."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prime_composer.contract import LossInputs
from prime_composer.local import collect
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.outcome import RunStopped
from prime_composer.local.run import kept_steps
from prime_composer.local.student import ExplodedWeights, Student, WeightCheck
from prime_composer.local.tracker import read_metrics
from prime_composer.local.watch import Watch
from prime_composer.local.watch_metrics import (
    CollapseCheck,
    teachers_without_success,
    tokens_of_no_use,
)
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.recipe.watchers import CollapseConfig
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.step.mismatch import METRIC, Mismatch, SamplerCheck, SamplerMismatch
from prime_composer.teachers.mixture import Teachers
from tests.local.helpers import (
    Silent,
    opened,
    random_samples,
    run,
    stop_taking_weights,
)

Raw = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (99.0, None),
        (101.0, "weight have norm 2e.02, from 2 at the run's start"),
        (math.nan, "weight are not finite numbers"),
    ],
)
def test_weight_check_allows_a_hundredfold_norm(value: float, message: str | None) -> None:
    """The message names step and tensor."""
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    check = WeightCheck.of_model(layer)
    nn.init.constant_(layer.weight, value)
    if message is None:
        check.check(layer, 3)
        return
    with pytest.raises(ExplodedWeights, match=f"step 3: .* weights of {message}"):
        check.check(layer, 3)


@pytest.mark.parametrize(
    ("entries", "largest"), [(1, 9.9), (999, 9.9), (1000, 0.99)], ids=["gate", "bias", "matrix"]
)
def test_weight_check_of_zeros_depends_on_their_number(entries: int, largest: float) -> None:
    """A gate that begins at 0 may become 9.9; the entries of a matrix of zeros stay below 1."""
    layer = nn.Module()
    layer.register_parameter("zeros", nn.Parameter(torch.zeros(entries)))
    check = WeightCheck.of_model(layer)
    with torch.no_grad():
        layer.zeros.fill_(largest)
    check.check(layer, 1)
    with torch.no_grad():
        layer.zeros.fill_(1.1 * largest)
    with pytest.raises(ExplodedWeights):
        check.check(layer, 1)


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_train_exploded_weights_are_never_saved(
    backend: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    """A run of one step ends with an error, without a checkpoint and without a row for it."""
    fatal = {"steps": 1, "warmup_steps": 0, "batch_size": 6, "lr": 1e6}
    raw = tiny_recipe(rollout__backend=backend, trainer=fatal)
    with pytest.raises(ExplodedWeights, match="step 1: after the optimizer's step"):
        run(raw, tmp_path / "run")
    assert list_checkpoints(tmp_path / "run") == []
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0]


def test_train_norms_of_a_resumed_run_are_those_of_its_start(whole: Path, tiny_recipe: Raw) -> None:
    """A resumed run compares with the norms that its checkpoint brings, not with its own start."""
    checkpoint, raw = list_checkpoints(whole)[-1], tiny_recipe()
    before = torch.load(checkpoint.path / "trainer.pt")["norms"]
    with opened(raw, student_dir=checkpoint.path) as engine:
        student = Student(parse_recipe(raw), engine)
        of_the_checkpoint = student.weight_check.norms
        student.load_state_dict(checkpoint.load(), checkpoint.step)
    assert torch.equal(student.weight_check.norms, before)
    assert not torch.equal(of_the_checkpoint, before)


def packed(mu: list[float], p: list[float], mask: list[bool]) -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor(p, requires_grad=True),
        inference_logprobs=torch.tensor(mu),
        ref_logprobs=None,
        advantages=None,
        loss_mask=torch.tensor(mask),
    )


def test_mismatch_is_the_k3_estimate_over_all_tokens() -> None:
    """exp(r) - 1 - r is averaged over the tokens of all micro-batches; masked ones never matter."""
    mismatch = Mismatch(SamplerCheck(1.0, "float32"))
    mismatch.add(packed([-1.0, math.nan], [-1.5, -1.0], [True, False]))
    mismatch.add(packed([-2.0, -1.0], [-1.0, -1.0], [True, True]))
    # r = -0.5, 1, 0
    expected = ((math.exp(-0.5) - 0.5) + (math.e - 2) + 0) / 3
    assert mismatch.result(1) == {METRIC: pytest.approx(expected, rel=1e-6)}


def measured(check: SamplerCheck, mu: list[float], p: list[float]) -> dict[str, float]:
    """Return what a step of these log-probs has measured."""
    mismatch = Mismatch(check)
    mismatch.add(packed(mu, p, [True] * len(mu)))
    return mismatch.result(7)


NARROW, WIDE = SamplerCheck(1e-6, "float32"), SamplerCheck(0.05, "bfloat16")


@pytest.mark.parametrize(
    ("check", "mu", "p", "words"),
    [
        (NARROW, [-1.0], [-1.1], r"step 7: .* KL 0.0048 .* 1 sampled .* 1e-06"),
        # A NaN is above every limit, also one of many, which the cap would let pass.
        (WIDE, [math.nan, *[-1.0] * 1999], [-1.0] * 2000, "step 7"),
        (WIDE, [-9.0] * 8, [-8.0] * 8, "step 7"),
    ],
)
def test_mismatch_above_the_limit_stops(
    check: SamplerCheck, mu: list[float], p: list[float], words: str
) -> None:
    """The message names step, KL, tokens and limit."""
    with pytest.raises(SamplerMismatch, match=words):
        measured(check, mu, p)


def test_mismatch_of_one_token_is_no_alarm() -> None:
    """Of two tokens one that bfloat16 rounds by a nat is logged, and not an error.

    One of 2,000 at r = 5 makes the plain mean 0.076; the step is right, and goes on.
    """
    rounded = measured(WIDE, [-9.0, -1.0], [-8.0, -1.0])
    assert rounded == {METRIC: pytest.approx((math.e - 2) / 2, rel=1e-6)}
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 0.1
    ratios = [5.0, *noise.tolist()[1:]]
    (kl,) = measured(WIDE, [-9.0] * 2000, [-9.0 + r for r in ratios]).values()
    expected = sum(math.exp(r) - 1 - r for r in ratios) / 2000
    assert kl == pytest.approx(expected, rel=1e-4) and kl > 0.05


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [("transformers", "Continue in a new process"), ("server", "Restart its server")],
)
def test_mismatch_limit_is_a_key_that_the_message_names(
    backend: str, remedy: str, tiny_recipe: Raw
) -> None:
    """checks.mismatch replaces the dtype's limit, and what to do fits the backend."""
    raw = tiny_recipe(checks__mismatch=0.25, rollout__backend=backend)
    if backend == "server":
        raw["rollout"]["url"] = "http://127.0.0.1:9"
        raw["teacher"]["backend"] = "transformers"
    check = SamplerCheck.of_recipe(parse_recipe(raw))
    assert check is not None and check.limit == 0.25
    with pytest.raises(SamplerMismatch, match=rf"{remedy} .* raise checks\.mismatch"):
        measured(check, [-2.0] * 99, [-1.0] * 99)


def test_accumulate_gradients_measures_every_micro_batch(
    student: tuple[nn.Module, Any],
) -> None:
    """Whatever the micro-batches, the estimate is that of a plain forward of each rollout."""
    model = copy.deepcopy(student[0])
    samples: list[Sample] = random_samples([(3, 5), (7, 2), (2, 9)], k=4)
    ratios = []
    with torch.no_grad():
        for one in samples:
            ids, start = one.rollout.token_ids, one.rollout.start
            table = model(ids[None]).logits[0].double().log_softmax(-1)
            for t in range(start, len(ids)):
                log_p = float(table[t - 1, ids[t]])
                ratios.append(log_p - float(one.rollout.inference_logprobs[t]))
    expected = sum(math.exp(r) - 1 - r for r in ratios) / len(ratios)
    for budget in (1, 24, 1000):
        mismatch = Mismatch(SamplerCheck(math.inf, "float32"))
        loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=4))
        config = TrainerConfig(steps=1, micro_batch_tokens=budget)
        model.zero_grad()
        accumulate_gradients(model, loss, Batch(samples), config, 1, mismatch=mismatch)
        assert mismatch.result(1)[METRIC] == pytest.approx(expected, rel=1e-4)


def test_train_sampler_that_stops_taking_weights_is_seen_next_step(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step that samples with old weights on, nothing is trained."""
    stop_taking_weights(monkeypatch, after=4)
    display = Silent()
    with pytest.raises(ValueError, match="step 4: the sampler's probabilities"):
        run(tiny_recipe(trainer__steps=6), tmp_path / "run", display)
    assert display.steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        ({"teacher/accuracy": 0.005, "eval/accuracy": 0.0}, []),
        ({"teacher/math/accuracy": 0.0, "teacher/code/accuracy": 1.0}, ["the teacher math has 0"]),
    ],
)
def test_teacher_without_a_right_answer_is_a_warning(
    measured: dict[str, float], named: list[str]
) -> None:
    warnings = teachers_without_success(measured)
    assert len(warnings) == len(named)
    assert all(text.startswith(start) for text, start in zip(warnings, named, strict=True))


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"xtok/noncanonical": 0.05, "xtok/unscored": 0.05, "xtok/aligned": 0.9}, {}),
        ({"xtok/noncanonical": 0.126}, {"xtok/noncanonical": ["12.6%", "rollout.temperature"]}),
        ({"a/xtok/unscored": 0.06, "loss": 1.0}, {"a/xtok/unscored": ["6.0%", "both prompts"]}),
    ],
)
def test_tokens_that_a_teacher_cannot_judge_are_a_warning(
    metrics: dict[str, float], named: dict[str, list[str]]
) -> None:
    warnings = tokens_of_no_use(metrics)
    assert warnings.keys() == named.keys()
    assert all(word in warnings[name] for name, words in named.items() for word in words)


def test_run_warns_once_of_a_teacher_that_is_of_no_use(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is untrained knows nothing; one of its own tokenizer may score too few tokens."""
    display = Silent()
    monkeypatch.setattr(
        Teachers, "take_metrics", lambda _: {"xtok/unscored": 0.3 if display.steps else 0.01}
    )
    raw = tiny_recipe(trainer__steps=3)
    raw["teacher"]["prepare"]["sft_steps"] = 1
    run(raw, tmp_path / "run", display)
    assert [text for text in display.texts if text.startswith("warning: the teacher has 0.0%")]
    warnings = [text for text in display.texts if text.startswith("warning: step")]
    assert len(warnings) == 1 and "step 2: 30.0%" in warnings[0]


def record(step: int, **values: float) -> dict[str, float]:
    return {"step": step} | {f"rollout/{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("limit", "metric", "right", "wrong"),
    [
        ({"repeated": 0.5}, "repeated", 0.5, 0.51),
        ({"truncated": 0.2}, "student_truncated", 0.2, 0.3),
        ({"entropy": 0.1}, "entropy", 0.1, 0.09),
        ({"end": 0.01}, "end_teacher", 0.01, 0.009),
        ({"longer": 2.0}, "student_tokens", 20.0, 21.0),
        ({"shorter": 0.5}, "student_tokens", 5.0, 4.0),
    ],
)
def test_collapse_is_a_limit_that_is_passed_in_a_row(
    limit: dict[str, float], metric: str, right: float, wrong: float
) -> None:
    """One step within the limit begins the count anew, and as many as the limit's patience end it.

    A step without the number is none of either, as where the student sampled nothing.
    """
    check = CollapseCheck(CollapseConfig(**limit, steps=2))
    values = [10.0 if metric == "student_tokens" else right, wrong, right, wrong, None, wrong]
    values += [wrong, right, None, right, right]
    warned, healthy = [], []
    for step, value in enumerate(values, 1):
        metrics = {} if value is None else {f"rollout/{metric}": value}
        metrics |= check.add(step, metrics)
        warned += [(step, text) for text in check.warnings(metrics)]
        healthy.append(check.healthy)
    ((step, text),) = warned
    assert step == 6 and "(steps in a row: 2; first in step 2)" in text
    assert healthy == [None, *[1] * 8, None, None]
    assert f"checks.collapse.{next(iter(limit))} = " in text


def test_collapse_of_a_resumed_run_goes_on_counting() -> None:
    config = CollapseConfig(longer=2.0, steps=3, action="stop")
    lengths = {1: 10, 2: 25, 3: 30}
    logged = [record(0), *(record(step, student_tokens=n) for step, n in lengths.items())]
    check = CollapseCheck.of_records(config, logged)
    assert check.since == {"longer": 2} and check.healthy == 1
    assert check.add(4, record(4, student_tokens=40)) == {"rollout/growth": 4.0}
    assert check.warnings({"rollout/growth": 4.0})[0].startswith("the rollouts are 4 times as long")
    # The first step may have answers of the data alone.
    check = CollapseCheck(CollapseConfig())
    grown = [check.add(1, {}), *(check.add(n, record(n, student_tokens=5.0 * n)) for n in (2, 3))]
    assert grown == [{}, {"rollout/growth": 1.0}, {"rollout/growth": 1.5}]
    # Without the first step's record there is nothing to compare with.
    assert CollapseCheck.of_records(config, logged[2:]).add(4, record(4, student_tokens=40)) == {}


ENTROPY = {"entropy": 100.0, "steps": 3, "action": "stop"}
"""A limit that every model is beyond."""


def test_collapse_stops_a_run_and_keeps_what_was_before(tiny_recipe: Raw, tmp_path: Path) -> None:
    """It stops at the third step, and so does the run that goes on from there."""
    raw = tiny_recipe(trainer__steps=9)
    raw |= {"checkpoint": {"every": 1, "keep": 1}, "checks": {"collapse": ENTROPY}}
    with pytest.raises(RunStopped, match=r"step 3: .* in a row: 3; first in step 1\)") as stopped:
        run(raw, tmp_path / "run")
    assert "nats per token" in str(stopped.value) and "step 3 is saved" in str(stopped.value)
    assert [one.step for one in list_checkpoints(tmp_path / "run")] == [3]
    # Continued, it has still collapsed.
    with pytest.raises(RunStopped, match=r"step 4: .* in a row: 4; first in step 1\)"):
        run(raw, tmp_path / "run", resume=True)


def test_kept_steps_are_the_verified_and_the_healthy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, whichever is older."""
    check, watch = CollapseCheck(CollapseConfig(repeated=0.5)), Watch.__new__(Watch)
    monkeypatch.setattr(Watch, "verified", lambda self, step: 2)
    assert kept_steps(watch, check, 9) == [2]
    check.add(8, {"rollout/repeated": 0.6})
    assert kept_steps(watch, check, 9) == [2, 7]


def test_collapse_keeps_a_checkpoint_from_before(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keep = 1 the saves of collapsed steps would push out the last healthy one."""
    step = iter(range(1, 9))
    monkeypatch.setattr(
        collect, "collapse_metrics", lambda *_: {"rollout/repeated": 0.9 * (next(step) > 2)}
    )
    raw = tiny_recipe(trainer__steps=5)
    raw |= {"checkpoint": {"every": 1, "keep": 1}, "checks": {"collapse": {"steps": 2}}}
    display = Silent()
    run(raw, tmp_path / "run", display)
    assert [one.step for one in list_checkpoints(tmp_path / "run")] == [2, 5]
    warnings = [text for text in display.texts if text.startswith("warning: step")]
    assert len(warnings) == 1 and "step 4: 90.0% of the rollouts end in a repetition" in warnings[0]
