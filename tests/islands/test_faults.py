"""Islands whose processes are killed, slow, stopped or resumed."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import numbers
from tests.fork_server import ForkServer
from tests.islands.rig import (
    KILLED,
    Rig,
    digests,
    ended,
    tables,
    text_so_far,
    until,
)
from tests.local.helpers import weights

pytest.importorskip("torchft")
OpenRig = Callable[..., Rig]


@pytest.fixture
def rig(engine_forks: ForkServer, tmp_path: Path) -> Iterator[OpenRig]:
    """Return what opens a rig for ``section__key=value`` changes."""
    rigs: list[Rig] = []

    def open_rig(**changes: Any) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Rig(engine_forks, folder, tables(**changes)))
        return rigs[-1]

    yield open_rig
    for one in rigs:
        one.close()


def test_islands_resumed_after_kills_are_bit_equal(rig: OpenRig) -> None:
    """Both are killed at different places, and begin again with the newest step that both have."""
    whole, cut = rig(checkpoint__keep=9), rig(checkpoint__keep=9)
    whole.light()
    texts = [ended(island) for island in whole.islands(2)]
    assert digests(texts[0]) == digests(texts[1]) and [*digests(texts[0])] == [2, 4, 6, 8]
    cut.light()
    for island in (cut.island(0, kill_after=7), cut.island(1, kill_after=6)):
        ended(island, KILLED)
    shutil.rmtree(cut.run_dir(1) / "checkpoints" / "step_000006")
    again = [cut.island(index, "--resume") for index in (0, 1)]
    assert all("resuming after step 4" in ended(island) for island in again)
    for index in (0, 1):
        assert numbers(whole.run_dir(index)) == numbers(cut.run_dir(index))
        mine, theirs = weights(whole.run_dir(index)), weights(cut.run_dir(index))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_island_killed_between_outer_steps_comes_back(rig: OpenRig) -> None:
    """The majority goes on. No proxy is asked for the state; island 0 measures what it takes over.

    Its run is that of the last step, which nobody else measures.
    """
    one, proxy = rig(diloco__replicas=3, trainer__steps=12), "http://127.0.0.1:9"
    one.light()
    go = one.folder / "go"
    stay = [one.island(index, gate={"step": 8, "file": str(go)}) for index in (1, 2)]
    ended(one.island(0, kill_after=3, proxy=proxy), KILLED)
    until(lambda: len(one.records(1)) > 6, *stay)  # steps 1 to 7
    back = one.island(0, "--resume", proxy=proxy)
    until(lambda: "update 4" in text_so_far(back), back, *stay)
    go.touch()
    ours, theirs = digests(ended(stay[0])), ended(back)
    assert "took over step" in theirs and digests(theirs)[12] == ours[12]
    one.assert_equal_weights(0, 1, 2)
    assert [one.together(1)[step] for step in (2, 6, 12)] == [3, 2, 3]
    first, *_, last = one.records(0)
    assert last["step"] == 12 and last["eval/reverse_kl"] != first["eval/reverse_kl"]
    assert f"{last['eval/reverse_kl']:.3f}" in theirs


@pytest.mark.slow
def test_island_killed_in_an_outer_step_costs_its_steps(rig: OpenRig) -> None:
    """The others' weights are those of before; they take the steps again, and save nothing."""
    one = rig(diloco__replicas=3, checkpoint__keep=9, trainer__steps=4)
    one.light()
    stay = one.islands(2)
    ended(one.island(2, kill_in=0), KILLED)
    texts = [ended(island) for island in stay]
    assert all("the outer step failed" in text for text in texts)
    assert all("the steps 1 to 2 are taken again" in text for text in texts)
    assert "after 2: step 0" in texts[0] and "after 2: step 2" in texts[0]
    one.assert_equal_weights(0, 1)
    assert [row["step"] for row in one.records(0)] == [*range(5)]
    assert one.saved(0) == ["step_000002", "step_000004"]


@pytest.mark.slow
def test_island_with_exploded_weights_is_never_averaged(rig: OpenRig) -> None:
    """In the update before an outer step; the others go on. They have waited, as it is slow."""
    one = rig(diloco__replicas=3)
    one.light()
    stay, explodes = one.islands(2), one.island(2, explode=4, slow=0.9)
    text = ended(explodes, 1)
    assert "step 4" in text and "weights" in text and "Traceback" not in text
    for island in stay:
        ended(island)
    assert one.together(0) == {2: 3, 4: 2, 6: 2, 8: 2}
    assert max(float(tensor.abs().max()) for tensor in weights(one.run_dir(0)).values()) < 1e3
    assert one.saved(2) == ["step_000002"]


@pytest.mark.slow
def test_lighthouse_restarted_ends_nothing(rig: OpenRig) -> None:
    one = rig(trainer__steps=12)
    first = one.light()
    both = one.islands(2, slow=0.2)
    until(lambda: len(one.records(0)) > 4, *both)
    first.kill()
    ended(first, KILLED)
    one.light()
    for island in both:
        ended(island)
    one.assert_equal_weights(0, 1)
    assert len(one.records(0)) == 13


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_island_waiting_for_another_ends_by_a_signal(rig: OpenRig, signum: int) -> None:
    """Within seconds, with the last outer step saved, although a quorum may take a minute."""
    one = rig()
    one.light()
    waits, stuck = one.island(0), one.island(1, gate={"step": 3, "file": "/nonexistent"})
    until(lambda: len(one.records(0)) > 3, waits, stuck)
    assert waits.poll(1.0) is None  # it waits for the other one
    waits.send_signal(signum)
    assert waits.poll(10.0) == 128 + signum
    text = "".join(waits.communicate())
    assert "step 2 is saved; continue with" in text and "--island 0 --lighthouse" in text
    assert one.saved(0) == ["step_000002"]
