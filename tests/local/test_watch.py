"""Teachers and samplers that change during a run, and the question that shows it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.contract import Scores
from prime_composer.local import watch as watch_module
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.outcome import RunStopped
from prime_composer.local.preflight import Preflight, preflight
from prime_composer.local.tracker import read_metrics
from prime_composer.local.watch import CROWD, Watch, WatchFailed
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.transformers import TransformersScorer
from tests.command import numbers
from tests.conftest import TINY_RECIPE
from tests.faults.server import SpoilingServer
from tests.local.helpers import (
    Silent,
    failing,
    open_run,
    run,
    stop_taking_weights,
    tiny_models,
    weights,
)

Raw = Callable[..., dict[str, Any]]
THE = TeacherId()


def open_watch(engine: Engine, recipe: Recipe, found: Preflight | None = None) -> Watch:
    """Return the watch of a run, over what a preflight has found."""
    if found is not None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(watch_module, "preflight", lambda *_: found)
            return open_watch(engine, recipe)
    return watch_module.open_watch(engine, recipe, lambda _: None)


@pytest.fixture
def opened(tiny_recipe: Raw) -> Iterator[tuple[Engine, Watch]]:
    """The tiny recipe's open engine, and its watch."""
    recipe, engine = open_run(tiny_recipe(checks__every=5))
    with engine:
        yield engine, open_watch(engine, recipe)


class Counted:
    """Counts the calls of a scorer, and answers like another one."""

    gives_any_ids = True

    def __init__(self, scorer: Any):
        self.scorer = scorer
        self.calls = 0
        self.starts: int | None = 0
        self.limits = scorer.limits
        self.sampler = None

    def score(self, *args: Any, **kwargs: Any) -> list[Scores]:
        self.calls += 1
        return self.scorer.score(*args, **kwargs)

    def close(self) -> None: ...


def test_watch_asks_when_due_or_after_another_start(opened: tuple[Engine, Watch]) -> None:
    """It asks once per due step, at once after another start, and always where none is named."""
    engine, watch = opened
    scorer = engine.teachers.scorers[THE] = Counted(engine.teachers.scorers[THE])
    for step in range(4):
        watch.check(step)
    watch.check(0)  # the preflight has just asked
    assert scorer.calls == 0 and watch.safe_step == 0
    watch.check(5)
    watch.check(5)
    assert scorer.calls == 1 and watch.safe_step == 5
    scorer.starts = 1
    watch.check(6)
    watch.check(6)
    assert scorer.calls == 2 and watch.safe_step == 6
    scorer.starts = None
    watch.check(7)
    watch.check(7)
    assert scorer.calls == 4 and watch.safe_step == 7


def test_watch_asks_only_the_teacher_that_was_restarted(opened: tuple[Engine, Watch]) -> None:
    """Of two teachers one is asked, which verifies no step; at a due step both are."""
    engine, watch = opened
    other = TeacherId("other")
    one = engine.teachers.scorers[THE] = Counted(engine.teachers.scorers[THE])
    two = engine.teachers.scorers[other] = Counted(one.scorer)
    watch.probes[other] = replace(watch.probes[THE])
    two.starts = 1
    watch.check(3)
    assert (one.calls, two.calls, watch.safe_step) == (0, 1, 0)
    watch.check(5)
    assert (one.calls, two.calls, watch.safe_step) == (1, 2, 5)


def test_watch_tolerance_is_a_key_that_the_message_names(tiny_recipe: Raw) -> None:
    """checks.tolerance accepts a known difference; beyond the limit the message names the key."""
    recipe, engine = open_run(tiny_recipe())
    with engine:
        found = preflight(engine, recipe, lambda _: None)
        watch = open_watch(engine, recipe, found)
        engine.teachers.scorers[THE] = TransformersScorer(tiny_models(TINY_RECIPE)["student"])
        with pytest.raises(WatchFailed, match="set checks.tolerance above") as got:
            watch.check(1, before_use=True)
        assert "dtype" not in str(got.value)  # of a model in this process it is known
        tolerant = parse_recipe(tiny_recipe(checks__tolerance=1e3))
        open_watch(engine, tolerant, found).check(1, before_use=True)


@pytest.mark.parametrize(
    "rollout",
    [{"top_p": 0.9}, {"student_fraction": 0}],
    ids=["nucleus", "solutions"],
)
def test_watch_sees_a_sampler_with_other_weights(rollout: dict[str, Any], tiny_recipe: Raw) -> None:
    """Where no step compares its own tokens the sampler is asked, at temperature 1 and top-p 1."""
    raw = tiny_recipe(loss={"type": "generalized_jsd", "k": 8})
    raw["rollout"] |= rollout
    recipe, engine = open_run(raw)
    with engine:
        watch = open_watch(engine, recipe)
        watch.check(10)
        with torch.no_grad():
            next(engine.model.parameters()).mul_(1.5)
        with pytest.raises(WatchFailed, match=r"\[rollout\] the sampler's log-probs are not"):
            watch.check(20)


class Noisy:
    """A served teacher whose numbers depend on the number of sequences in a request."""

    gives_any_ids = False

    def __init__(self, scorer: Any, noise: float):
        self.scorer, self.noise, self.asked = scorer, noise, []
        self.limits, self.sampler = scorer.limits, None

    def score(self, rollouts: Any, *args: Any) -> list[Scores]:
        self.asked.append(len(rollouts))
        shift = self.noise if len(rollouts) > 1 else 0.0
        return [
            Scores(one.ref_logprobs - shift, one.token_ids, one.teacher_logprobs - shift)
            for one in self.scorer.score(rollouts, *args)
        ]

    def close(self) -> None: ...


def test_tolerance_of_a_server_is_that_of_its_noise(tiny_recipe: Raw) -> None:
    """A server's dtype shows in how its numbers depend on the batch; several models are refused."""
    recipe, engine = open_run(tiny_recipe())
    with engine:
        result = preflight(engine, recipe, lambda _: None)
        spec, own = engine.teacher_specs[THE], engine.teachers.scorers[THE]
        served = spec.table.model_copy(update={"url": "http://me:secret@127.0.0.1:9"})
        engine.teacher_specs = {THE: replace(spec, backend="server", table=served)}
        for noise, limit in ((1e-7, 1e-4), (0.03, 0.5)):
            scorer = engine.teachers.scorers[THE] = Noisy(own, noise)
            assert open_watch(engine, recipe, result).probes[THE].limit == limit
            assert scorer.asked == [CROWD]
        engine.teachers.scorers[THE] = Noisy(own, 2.0)
        message = r"at http://\*\*\*@127.0.0.1:9 gives answers .* 2 nat apart; let one model"
        with pytest.raises(PreflightError, match=message):
            open_watch(engine, recipe, result)


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_train_numbers_do_not_depend_on_the_watch(
    backend: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Teacher and sampler asked before every step or never, an undisturbed run is bit-equal."""
    for every in (1, 0):
        raw = tiny_recipe(checks__every=every, rollout__top_p=0.9, rollout__backend=backend)
        run(raw, tmp_path / str(every))
    assert numbers(tmp_path / "1") == numbers(tmp_path / "0")
    ours, others = weights(tmp_path / "1"), weights(tmp_path / "0")
    assert all(torch.equal(others[name], value) for name, value in ours.items())
    states = [
        torch.load(list_checkpoints(tmp_path / every)[-1].path / "trainer.pt") for every in "10"
    ]
    assert states[0].get("rng") is None or torch.equal(states[0]["rng"], states[1]["rng"])


class Swapping(Silent):
    """A display that does something after a step."""

    def __init__(self, at: int, action: Callable[[], None]):
        super().__init__()
        self.at, self.action = at, action

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        if step == self.at:
            self.action()


def served(raw: dict[str, Any], server: SpoilingServer) -> dict[str, Any]:
    """Return the recipe with its teacher from a server."""
    return raw | {"teacher": {"model": server.model, "url": server.url}}


def short(tiny_recipe: Raw, **changes: Any) -> dict[str, Any]:
    """Return a recipe of few rollouts that is evaluated and saved at its end alone."""
    evaluation = {"every": 0, "size": 1, "kl_size": 1}
    return tiny_recipe(trainer__batch_size=3, checkpoint__every=0, eval=evaluation, **changes)


def test_train_teacher_with_a_kept_fingerprint_is_seen_when_due(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Other numbers under the fingerprint of the run's start are those of ``checks.every``."""
    models = tiny_models(TINY_RECIPE)
    with SpoilingServer(models["teacher"], other=models["student"], plugin=True) as server:
        raw = served(short(tiny_recipe, trainer__steps=6, checks__every=2), server)
        display = Swapping(3, lambda: server.spoil("other_model", road="binary"))
        with pytest.raises(ValueError, match=rf"\[teacher\] at {server.url} .* right at step 2"):
            run(raw, tmp_path / "run", display)
    assert display.steps == [1, 2, 3, 4]


@pytest.mark.parametrize("interrupt_at", [4, None], ids=["signal", "last step"])
def test_train_stopped_by_a_signal_asks_before_it_saves(
    interrupt_at: int | None, tiny_recipe: Raw, tmp_path: Path
) -> None:
    """A step that another teacher may have scored is not saved at the end, or for a signal."""
    models = tiny_models(TINY_RECIPE)
    with SpoilingServer(models["teacher"], other=models["student"], plugin=True) as server:
        raw = served(short(tiny_recipe, trainer__steps=9 if interrupt_at else 3), server)
        display = Swapping(2, lambda: server.spoil("other_model", road="binary"))
        display.interrupt_at = interrupt_at
        with pytest.raises(ValueError, match="right at step 0, .*no earlier step is saved"):
            run(raw, tmp_path / "run", display)
    assert list_checkpoints(tmp_path / "run") == []


def test_train_unverified_steps_are_said_at_the_end_and_resume(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, and an error before the teacher was asked: saved, and not called safe."""
    models = tiny_models(TINY_RECIPE)
    with SpoilingServer(models["teacher"], plugin=True) as server:
        raw = served(short(tiny_recipe, trainer__steps=4, checks__every=3), server)
        failing(monkeypatch, Collector, "sample", 3, ValueError("the teacher is away"))
        with pytest.raises(RunStopped) as got:
            run(raw, tmp_path / "run")
        assert "step 2 is saved in" in str(got.value) and got.value.verified is None
        assert "steps 1 to 2 are not verified" in str(got.value)
        monkeypatch.undo()
        display = Silent()
        run(raw, tmp_path / "run", display, resume=True)
    assert [text for text in display.texts if "warning: steps 1 to 2 are not verified" in text]


def test_train_evaluation_of_old_weights_is_never_logged(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step nothing is sampled to train on, so the sampler is asked before it."""
    stop_taking_weights(monkeypatch, after=3)
    with pytest.raises(ValueError, match=r"\[rollout\] the sampler's log-probs are not"):
        run(tiny_recipe(trainer__steps=2), tmp_path / "run")
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0, 1]


def test_train_resumed_with_another_teacher_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """The probe and its scores are in the checkpoint."""
    models = tiny_models(TINY_RECIPE)
    shutil.copytree(models["teacher"], tmp_path / "teacher")
    raw = tiny_recipe(teacher={"model": str(tmp_path / "teacher")})
    run(raw, tmp_path / "run", Silent(interrupt_at=3))
    assert list_checkpoints(tmp_path / "run")[-1].step == 2
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(models["student"], tmp_path / "teacher")
    with pytest.raises(WatchFailed, match="of the run's start .* right at step 2"):
        run(raw, tmp_path / "run", resume=True)
