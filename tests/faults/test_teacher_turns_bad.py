"""Whole runs with a url teacher or rollout server that turns bad after the preflight.

The server's answers are right up to the end of step 2. What ends a run leaves the checkpoint of
step 2, which is the one of an undisturbed run, bit for bit. What passes changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_composer.backends.http import ServerError
from prime_composer.local.outcome import RunStopped
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
    """A teacher's and a student's server, recipes of runs, and each one's undisturbed run."""

    teacher: SpoilingServer
    student: SpoilingServer
    recipes: dict[str, dict[str, Any]]
    folder: Path

    def whole(self, of: str) -> Path:
        """Return the undisturbed run of a recipe, made once; the plugin's numbers are JSON's."""
        whole = self.folder / ("json" if of == "binary" else of)
        if not whole.exists():
            self.teacher.plugin = of == "states"
            run(self.recipes[of], whole)
            self.heal()
        return whole

    def spoiled(self, of: str) -> SpoilingServer:
        """Return the server that turns bad in a run of a recipe."""
        return self.student if of == "rollouts" else self.teacher

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
    paths = tiny_models(TINY_RECIPE)
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
        recipes = dict.fromkeys(("json", "binary"), recipe)
        recipes["rollouts"] = recipe | {"rollout": rollout}
        recipes["states"] = recipe | {"loss": {"type": "topk_reverse_kl", "k": "full"}}
        yield Rig(teacher, student, recipes, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """Return the rig with right servers, and leave it so."""
    yield shared
    shared.heal()


def expect_stop(
    rig: Rig,
    spoil: Callable[[], object],
    run_dir: Path,
    of: str = "json",
    goes_on: bool = True,
    **teacher: Any,
) -> str:
    """Run with a server that turns bad, and return the message that ends the run.

    The message names the checkpoint of step ``SAFE``, which is that of the undisturbed run. With
    ``goes_on`` the run is continued from it, with a right server, and ends as the undisturbed one.
    """
    whole = rig.whole(of)
    raw = rig.recipes[of] | {"teacher": rig.recipes[of]["teacher"] | teacher}
    rig.teacher.plugin = of in ("binary", "states")
    with pytest.raises(RunStopped) as stopped:
        run(raw, run_dir, Then(spoil))
    message, checkpoint = str(stopped.value), stopped.value.checkpoint
    assert checkpoint is not None and checkpoint.step == SAFE
    assert differences(run_dir, whole, SAFE) == []
    assert f"step {SAFE} is saved" in message and "Traceback" not in message and len(message) < 1000
    if goes_on:
        rig.heal()
        run(raw, run_dir, resume=True)
        assert steps_of(run_dir)[-1] == LAST and differences(run_dir, whole) == []
    return message


def expect_wait(rig: Rig, spoil: Callable[[], object], run_dir: Path, of: str = "json") -> Then:
    """Run with a server that fails for a moment: nothing is lost and nothing differs."""
    display, whole = Then(spoil), rig.whole(of)
    rig.teacher.plugin = of == "binary"
    run(rig.recipes[of], run_dir, display)
    assert display.steps == [1, 2, 3, 4]
    assert differences(run_dir, whole) == []
    return display


# Of a run, by a mode of ``modes``: requests after which it begins, how many it spoils, and its row.
# What ``tests/backends/test_answers.py`` refuses value by value is here once or twice. The run is
# continued after the first of each kind.
QUICK = [
    ("json", "positive_0.3", {}),
    ("json", "other_model", {}),
    ("binary", "packed_nan", {}),
    ("states", "states_rows_swapped", {}),
    ("rollouts", "mu_one_for_all", {}),
]
SLOW = [
    ("json", "rows_swapped", {}),
    ("json", "nan", {"after": 1, "times": 1, "row": -1}),
    *(("json", name, {"road": "scoring"}) for name in ("html", "deep", "two_choices")),
    ("json", "tempered", {}),
    *(("binary", name, {}) for name in (*modes.PACKED, *modes.PACKED_BODIES)),
    ("binary", "packed_nan", {"after": 1, "times": 1}),
    *(("states", name, {}) for name in modes.PACKED_STATES),
    *(("rollouts", name, {}) for name in ("mu_shifted", "too_many_tokens", "reload_ignored")),
]
GO_ON = {
    "positive_0.3",
    "other_model",
    "tempered",
    "packed_nan",
    "mu_one_for_all",
    "reload_ignored",
}
WITHOUT_SEQUENCE = {"packed_vocab_size", "packed_model", "packed_rows_swapped"}
"""Another model is the server's fault alone; the probe finds rows of another order."""


@pytest.mark.parametrize(
    ("of", "mode", "how"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW if row not in QUICK)],
)
def test_server_that_turns_bad_ends_the_run_untrained(
    of: str, mode: str, how: dict[str, Any], rig: Rig, tmp_path: Path
) -> None:
    """The run ends before it trains on what is wrong, and names the server."""
    server, goes_on = rig.spoiled(of), mode in GO_ON and not how
    message = expect_stop(rig, lambda: server.spoil(mode, **how), tmp_path / "run", of, goes_on)
    if of != "rollouts":
        assert server.url in message
    if of in ("binary", "states") and mode not in WITHOUT_SEQUENCE:
        assert "sequence " in message or "rollout 0" in message


def test_teacher_without_the_plugin_is_refused_for_states(rig: Rig, tmp_path: Path) -> None:
    """JSON has no hidden states: nothing is trained, and the remedy is named."""
    with pytest.raises(ServerError, match="no scoring plugin, which hidden") as refused:
        run(rig.recipes["states"], tmp_path / "run")
    assert rig.teacher.url in str(refused.value) and "prime-composer teacher" in str(refused.value)


ROADS = {"json": "scoring", "binary": "binary", "rollouts": "sampling"}


@pytest.mark.parametrize(
    ("of", "mode"),
    [
        ("json", "status_503"),
        pytest.param("json", "status_429_after", marks=pytest.mark.slow),
        pytest.param("binary", "drop", marks=pytest.mark.slow),
        pytest.param("rollouts", "cut", marks=pytest.mark.slow),
    ],
)
def test_server_away_for_two_requests_is_waited_for(
    of: str, mode: str, rig: Rig, tmp_path: Path
) -> None:
    """Two failures of the transient kind change nothing but time."""
    server = rig.spoiled(of)
    before = server.spoiled[mode]
    expect_wait(rig, lambda: server.spoil(mode, 2, 2, road=ROADS[of]), tmp_path / "run", of)
    assert server.spoiled[mode] == before + 2


def test_teacher_restarted_without_the_plugin_goes_on_in_json(rig: Rig, tmp_path: Path) -> None:
    """Within a step: its JSON has the same numbers. The run says what that costs, once."""
    asked = []

    def restart_at_second(road: str) -> None:
        asked.append(road)
        if asked.count("binary") == 2 and road == "binary":
            rig.teacher.before = lambda road: None
            rig.teacher.stop()
            rig.teacher.plugin = False
            rig.teacher.start()

    def turn() -> None:
        rig.teacher.before = restart_at_second

    display = expect_wait(rig, turn, tmp_path / "run", "binary")
    lines = [text for text in display.texts if "scoring plugin" in text]
    assert len(lines) == 1 and "lost its scoring plugin and answers in JSON" in lines[0]
    assert rig.teacher.url in lines[0]


def test_teacher_restarted_as_another_model_is_named(rig: Rig, tmp_path: Path) -> None:
    """The plugin says which model it has, also where the numbers would look alike."""

    def restart() -> None:
        rig.teacher.stop()
        rig.teacher._right.facts = lambda: right | {"model": "/another"}  # type: ignore[method-assign]
        rig.teacher.start()

    right = rig.teacher._right.facts()
    message = expect_stop(rig, restart, tmp_path / "run", "binary")
    assert rig.teacher.url in message and "serves another model since the run began" in message
    assert "and is /another" in message


@pytest.mark.slow
def test_teacher_plausible_for_new_prompts_is_not_seen(rig: Rig, tmp_path: Path) -> None:
    """A server that is right for the probe and plausible for the rest is trained on.

    The table of faults says so.
    """
    whole = rig.whole("json")
    rig.heal()
    spoil = rig.teacher.spoil
    run(rig.recipes["json"], tmp_path / "run", Then(lambda: spoil("other_model_for_new")))
    assert differences(tmp_path / "run", whole, step=SAFE) == []
    assert differences(tmp_path / "run", whole) != []


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


@pytest.mark.parametrize("mode", [pytest.param("status_503", marks=pytest.mark.slow), "drop"])
def test_teacher_away_for_good_ends_the_run(mode: str, rig: Rig, tmp_path: Path) -> None:
    """When ``wait`` is over, the run ends with the server's name and how to go on."""
    spoil = rig.teacher.spoil
    message = expect_stop(rig, lambda: spoil(mode, road="scoring"), tmp_path / "run", wait=1.5)
    assert rig.teacher.url in message
