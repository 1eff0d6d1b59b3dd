"""Whole runs with a url teacher or rollout server that turns bad after the preflight.

The server's answers are right up to the end of step 2. What ends a run leaves the checkpoint of
step 2, which is the one of an undisturbed run, bit for bit. What passes changes nothing.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_composer.backends.http import ServerError
from prime_composer.local.checkpoint import Checkpoint
from prime_composer.local.outcome import RunStopped
from prime_composer.local.train import train
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from tests.conftest import TINY_RECIPE
from tests.faults import modes
from tests.faults.compare import differences, steps_of
from tests.faults.server import SpoilingServer
from tests.local.helpers import Silent, run, tiny_models

LAST = 4
SAFE = 2
"""The step after which the server turns bad."""


@dataclass
class Rig:
    """A teacher's and a student's server, recipes for them, and an undisturbed run."""

    teacher: SpoilingServer
    student: SpoilingServer
    recipe: dict[str, Any]
    with_student_server: dict[str, Any]
    whole: Path

    def heal(self) -> None:
        """Let both servers answer right, with their own weights."""
        paths = tiny_models(TINY_RECIPE)
        for server, name in ((self.teacher, "teacher"), (self.student, "student")):
            server.heal()
            server.before = lambda road: None
            server.swap(paths[name])
            server.plugin = False
            server.stop()
            server.start()


class Then(Silent):
    """A display that does something after step ``SAFE``."""

    def __init__(self, do: Callable[[], object]):
        super().__init__()
        self.do = do

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        if step == SAFE:
            self.do()


@pytest.fixture(scope="module")
def shared(tiny_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Start both servers, and run four steps that nothing disturbs."""
    paths = tiny_models(TINY_RECIPE)
    folder = tmp_path_factory.mktemp("runs")
    with (
        SpoilingServer(paths["teacher"], other=paths["student"]) as teacher,
        SpoilingServer(paths["student"]) as student,
    ):
        recipe = tiny_recipe(
            teacher__url=teacher.url,
            teacher__dtype="float32",
            trainer__steps=LAST,
            trainer__batch_size=3,
            # The same KL with the plugin and without it.
            eval={"every": 0, "size": 2, "kl_size": 2, "kl_support": 8},
            checkpoint={"every": 1, "keep": LAST},
            checks={"every": 1},
        )
        rollout = recipe["rollout"] | {"backend": "server", "url": student.url}
        with_student_server = recipe | {"rollout": rollout}
        run(recipe, folder / "whole")
        yield Rig(teacher, student, recipe, with_student_server, folder / "whole")


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """Return the rig with right servers, and leave it so."""
    yield shared
    shared.heal()


@pytest.fixture(scope="module")
def whole_with_student_server(shared: Rig) -> Path:
    """Run four steps whose rollouts come from the student's server."""
    folder = shared.whole.parent / "whole_with_student_server"
    run(shared.with_student_server, folder)
    shared.heal()
    return folder


def resume(raw: dict[str, Any], run_dir: Path, checkpoint: Checkpoint | None) -> None:
    """Continue a run from a checkpoint; None starts it over."""
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    train(recipe, problems, tiny_models(raw), run_dir, Silent(), resume=checkpoint)


def expect_stop(
    rig: Rig,
    spoil: Callable[[], object],
    run_dir: Path,
    raw: dict[str, Any] | None = None,
    whole: Path | None = None,
    goes_on: bool = True,
) -> str:
    """Run with a server that turns bad, and return the message that ends the run.

    The message names the checkpoint of step ``SAFE``, which is that of the undisturbed run. With
    ``goes_on`` the run is continued from it, with a right server, and ends as the undisturbed one.
    """
    raw = rig.recipe if raw is None else raw
    whole = rig.whole if whole is None else whole
    with pytest.raises(RunStopped) as stopped:
        run(raw, run_dir, Then(spoil))
    message, checkpoint = str(stopped.value), stopped.value.checkpoint
    assert checkpoint is not None and checkpoint.step == SAFE
    assert differences(run_dir, whole, SAFE) == []
    assert "--resume" in message and "Traceback" not in message and len(message) < 1000
    if goes_on:
        rig.heal()
        resume(raw, run_dir, checkpoint)
        assert steps_of(run_dir)[-1] == LAST and differences(run_dir, whole) == []
    return message


def expect_wait(
    rig: Rig,
    spoil: Callable[[], object],
    run_dir: Path,
    raw: dict[str, Any] | None = None,
    whole: Path | None = None,
) -> Then:
    """Run with a server that fails for a moment: nothing is lost and nothing differs."""
    display = Then(spoil)
    run(rig.recipe if raw is None else raw, run_dir, display)
    assert display.steps == [1, 2, 3, 4]
    assert differences(run_dir, rig.whole if whole is None else whole) == []
    return display


def some(few: Any, every: Any) -> list[Any]:
    """Mark all but a few parameters as slow."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in every]


WRONG_SCORES = ("positive_0.3", "bool", "overflow", "alien_id", "rows_swapped", "rows_missing")
"""Some of what ``tests/backends/test_answers.py`` refuses value by value."""


@pytest.mark.parametrize("mode", some(("positive_0.3", "bool"), WRONG_SCORES))
def test_teacher_wrong_scores_end_the_run_untrained(mode: str, rig: Rig, tmp_path: Path) -> None:
    """Every impossible score ends the run before it is trained on, and names the server."""
    message = expect_stop(
        rig, lambda: rig.teacher.spoil(mode), tmp_path / "run", goes_on=mode == "positive_0.3"
    )
    assert rig.teacher.url in message


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_teacher_one_wrong_row_ends_the_run_untrained(after: int, rig: Rig, tmp_path: Path) -> None:
    """One wrong row in one answer of a step is enough; the others were right."""
    spoil = rig.teacher.spoil
    message = expect_stop(
        rig, lambda: spoil("nan", after, 1, row=-1), tmp_path / "run", goes_on=False
    )
    assert rig.teacher.url in message


@pytest.mark.parametrize("mode", some((), ("html", "deep", "half_json", "two_choices")))
def test_teacher_malformed_answers_end_the_run(mode: str, rig: Rig, tmp_path: Path) -> None:
    """An answer that is none ends the run with the server's name and what was expected."""
    message = expect_stop(
        rig, lambda: rig.teacher.spoil(mode, road="scoring"), tmp_path / "run", goes_on=False
    )
    assert rig.teacher.url in message


BINARY = [*modes.PACKED, *modes.PACKED_BODIES]


@pytest.mark.parametrize("mode", some(("packed_nan", "packed_row_short"), BINARY))
def test_teacher_wrong_binary_answers_end_the_run(mode: str, rig: Rig, tmp_path: Path) -> None:
    """Every wrong answer of the scoring plugin ends the run untrained: server and sequence."""
    rig.teacher.plugin = True
    message = expect_stop(
        rig, lambda: rig.teacher.spoil(mode), tmp_path / "run", goes_on=mode == "packed_nan"
    )
    assert rig.teacher.url in message
    # Another model is the server's fault alone, and rows of another order are found by the probe.
    others = ("packed_vocab_size", "packed_model", "packed_rows_swapped")
    assert "sequence " in message or mode in others


@pytest.fixture(scope="module")
def by_hidden_states(shared: Rig) -> tuple[dict[str, Any], Path]:
    """A recipe that compares whole vocabularies, and its undisturbed run."""
    raw = shared.recipe | {"loss": {"type": "topk_reverse_kl", "k": "full"}}
    folder = shared.whole.parent / "whole_by_hidden_states"
    shared.teacher.plugin = True
    run(raw, folder)
    shared.heal()
    return raw, folder


@pytest.mark.parametrize("mode", some(("states_rows_swapped",), modes.PACKED_STATES))
def test_teacher_wrong_hidden_states_end_the_run_untrained(
    mode: str, rig: Rig, by_hidden_states: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """States that do not belong to the server's own log-probs are refused, as others are."""
    raw, whole = by_hidden_states
    rig.teacher.plugin = True
    message = expect_stop(
        rig, lambda: rig.teacher.spoil(mode), tmp_path / "run", raw, whole, goes_on=False
    )
    assert rig.teacher.url in message and ("rollout 0" in message or "sequence " in message)


def test_teacher_without_the_plugin_is_refused_for_states(
    rig: Rig, by_hidden_states: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """JSON has no hidden states: nothing is trained, and the remedy is named."""
    with pytest.raises(ServerError, match="no scoring plugin, which hidden") as refused:
        run(by_hidden_states[0], tmp_path / "run")
    assert rig.teacher.url in str(refused.value) and "prime-composer teacher" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_teacher_one_wrong_binary_answer_ends_the_run(after: int, rig: Rig, tmp_path: Path) -> None:
    """One wrong row in one of a step's answers is enough."""
    rig.teacher.plugin = True
    spoil = rig.teacher.spoil
    expect_stop(rig, lambda: spoil("packed_nan", after, 1), tmp_path / "run", goes_on=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["status_503", "status_429_after", "drop", "cut"])
def test_teacher_with_the_plugin_away_is_waited_for(mode: str, rig: Rig, tmp_path: Path) -> None:
    """Two failures of the transient kind change nothing but time."""
    rig.teacher.plugin = True
    spoil = rig.teacher.spoil
    expect_wait(rig, lambda: spoil(mode, 2, 2, road="binary"), tmp_path / "run")


@pytest.mark.parametrize("when", ["between", "within"])
def test_teacher_restarted_without_the_plugin_goes_on_in_json(
    when: str, rig: Rig, tmp_path: Path
) -> None:
    """Its JSON has the same numbers. The run says what that costs, once."""
    rig.teacher.plugin = True
    asked = []

    def restart() -> None:
        rig.teacher.stop()
        rig.teacher.plugin = False
        rig.teacher.start()

    def restart_at_second(road: str) -> None:
        asked.append(road)
        if asked.count("binary") == 2 and road == "binary":
            rig.teacher.before = lambda road: None
            restart()

    def turn() -> None:
        if when == "between":
            restart()
        else:
            rig.teacher.before = restart_at_second

    display = expect_wait(rig, turn, tmp_path / "run")
    lines = [text for text in display.texts if "scoring plugin" in text]
    assert len(lines) == 1 and "lost its scoring plugin and answers in JSON" in lines[0]
    assert rig.teacher.url in lines[0]


def test_teacher_restarted_as_another_model_is_named(rig: Rig, tmp_path: Path) -> None:
    """The plugin says which model it has, also where the numbers would look alike."""
    rig.teacher.plugin = True

    def restart() -> None:
        rig.teacher.stop()
        rig.teacher._right.facts = lambda: right | {"model": "/another"}  # type: ignore[method-assign]
        rig.teacher.start()

    right = rig.teacher._right.facts()
    message = expect_stop(rig, restart, tmp_path / "run")
    assert rig.teacher.url in message and "serves another model since the run began" in message
    assert "and is /another" in message


@pytest.mark.parametrize("mode", some(("other_model",), ["other_model", "tempered"]))
def test_teacher_other_numbers_are_seen_by_the_probe(mode: str, rig: Rig, tmp_path: Path) -> None:
    """Plausible numbers of another model are seen before the next checkpoint.

    What was trained since the last probe is in doubt, and not saved.
    """
    message = expect_stop(rig, lambda: rig.teacher.spoil(mode), tmp_path / "run")
    assert rig.teacher.url in message


@pytest.mark.slow
def test_teacher_plausible_for_new_prompts_is_not_seen(rig: Rig, tmp_path: Path) -> None:
    """A server that is right for the probe and plausible for the rest is trained on.

    The table of faults says so.
    """
    rig.heal()
    run(rig.recipe, tmp_path / "run", Then(lambda: rig.teacher.spoil("other_model_for_new")))
    assert differences(tmp_path / "run", rig.whole, step=SAFE) == []
    assert differences(tmp_path / "run", rig.whole) != []


def test_teacher_restarted_with_another_model_ends_the_run(rig: Rig, tmp_path: Path) -> None:
    """A server that comes back in the middle of a step with another model is seen in that step."""
    asked = []

    def restart(road: str) -> None:
        asked.append(road)
        # The first question of step 3 is the probe.
        if asked.count("scoring") == 3 and road == "scoring":
            rig.teacher.stop()
            rig.teacher.swap(tiny_models(TINY_RECIPE)["student"])
            rig.teacher.start()

    expect_stop(rig, lambda: setattr(rig.teacher, "before", restart), tmp_path / "run")


TRANSIENT = ("status_503", "status_429_after", "drop", "drop_after_headers", "cut")


@pytest.mark.parametrize("mode", some(("status_503",), TRANSIENT))
def test_teacher_away_for_two_requests_is_waited_for(mode: str, rig: Rig, tmp_path: Path) -> None:
    """Two failures of the transient kind change nothing but time."""
    before = rig.teacher.spoiled[mode]
    spoil = rig.teacher.spoil
    expect_wait(rig, lambda: spoil(mode, 2, 2, road="scoring"), tmp_path / "run")
    assert rig.teacher.spoiled[mode] == before + 2


@pytest.mark.slow
def test_teacher_restarted_in_the_middle_is_waited_for(rig: Rig, tmp_path: Path) -> None:
    """A teacher that is killed and started again is waited for, and the run says so."""

    def restart() -> None:
        rig.teacher.stop()
        threading.Timer(4.0, rig.teacher.start).start()

    display = expect_wait(rig, restart, tmp_path / "run")
    assert any("waiting" in text and rig.teacher.url in text for text in display.texts)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["status_400", "status_401"])
def test_teacher_refusal_ends_the_run_at_once(mode: str, rig: Rig, tmp_path: Path) -> None:
    """A refusal is not asked again."""
    before = rig.teacher.spoiled[mode]
    message = expect_stop(
        rig, lambda: rig.teacher.spoil(mode, road="scoring"), tmp_path / "run", goes_on=False
    )
    assert rig.teacher.url in message
    # The questions about the three rollouts of a step, which are asked at once.
    assert rig.teacher.spoiled[mode] - before <= 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["status_503", "drop"])
def test_teacher_away_for_good_ends_the_run(mode: str, rig: Rig, tmp_path: Path) -> None:
    """When ``wait`` is over, the run ends with the server's name and how to go on."""
    raw = rig.recipe | {"teacher": rig.recipe["teacher"] | {"wait": 1.5}}
    spoil = rig.teacher.spoil
    message = expect_stop(rig, lambda: spoil(mode, road="scoring"), tmp_path / "run", raw)
    assert rig.teacher.url in message


WRONG_ROLLOUTS = ("mu_one_for_all", "mu_shifted", "sampled_id_float", "too_many_tokens")


@pytest.mark.parametrize("mode", some(("mu_one_for_all",), WRONG_ROLLOUTS))
def test_rollouts_wrong_answers_end_the_run_untrained(
    mode: str, rig: Rig, whole_with_student_server: Path, tmp_path: Path
) -> None:
    """Every impossible rollout ends the run; mu that is not the policy's is a mismatch."""
    recipe, whole = rig.with_student_server, whole_with_student_server
    spoil, goes_on = rig.student.spoil, mode == "mu_one_for_all"
    expect_stop(rig, lambda: spoil(mode), tmp_path / "run", recipe, whole, goes_on)


@pytest.mark.slow
def test_rollouts_of_old_weights_end_the_run(
    rig: Rig, whole_with_student_server: Path, tmp_path: Path
) -> None:
    """A server that silently stops taking weights is seen by the trainer's own log-probs."""
    # A step's weights are sent before it is shown: those of step 3 are the first to be lost.
    recipe, whole = rig.with_student_server, whole_with_student_server
    spoil = rig.student.spoil
    expect_stop(rig, lambda: spoil("reload_ignored"), tmp_path / "run", recipe, whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["status_503", "status_429_after", "drop", "cut"])
def test_rollouts_away_for_two_requests_are_waited_for(
    mode: str, rig: Rig, whole_with_student_server: Path, tmp_path: Path
) -> None:
    """A rollout server's transient failures change nothing but time."""
    recipe, whole = rig.with_student_server, whole_with_student_server
    expect_wait(rig, lambda: rig.student.spoil(mode, 2, 2), tmp_path / "run", recipe, whole)
