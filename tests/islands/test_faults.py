"""Islands whose processes are killed, slow, stopped or resumed."""

import shutil
import signal

import pytest
import torch

from tests.command import numbers
from tests.islands.rig import (
    KILLED,
    OpenRig,
    assert_equal_weights,
    digests,
    ended,
    kill_and_take_over,
    text_so_far,
    until,
)
from tests.local.helpers import weights

torchft = pytest.importorskip("torchft")


def test_island_that_is_killed_between_outer_steps_comes_back(rig: OpenRig) -> None:
    """The other one goes on alone. Then the killed one takes its state, and both end as one.

    No proxy is asked for the state.
    """
    one = rig(diloco__min_replicas=1, trainer__steps=12)
    kill_and_take_over(one, proxy="http://127.0.0.1:9")


@pytest.mark.slow
def test_first_island_that_comes_back_measures_what_it_takes_over(rig: OpenRig) -> None:
    """At the run's last step, which nobody else measures; its report is of that step."""
    one = rig(diloco__min_replicas=1)
    one.light()
    go = one.folder / "go"
    stays = one.island(1, gate={"step": 8, "file": str(go)})
    ended(one.island(0, kill_after=5), KILLED)
    until(lambda: len(one.records(1)) > 6, stays)  # steps 1 to 7
    back = one.island(0, "--resume")
    until(lambda: "next outer step" in text_so_far(back), back, stays)
    go.touch()
    text = ended(back)
    ended(stays)
    assert_equal_weights(one, 0, 1)
    first, *_, last = one.records(0)
    assert last["step"] == 8 and {"eval/accuracy", "eval/reverse_kl"} <= last.keys()
    assert last["eval/reverse_kl"] != first["eval/reverse_kl"]
    assert f"{last['eval/reverse_kl']:.3f}" in text and "8 steps" in text


@pytest.mark.slow
def test_island_that_cannot_take_the_state_over_ends_and_the_other_goes_on(rig: OpenRig) -> None:
    """It names what failed and the remedy, and costs the other one an outer step."""
    one = rig(diloco__min_replicas=1, diloco__timeout=5.0, trainer__steps=12)
    one.light()
    go = one.folder / "go"
    stays = one.island(0, gate={"step": 8, "file": str(go)})
    ended(one.island(1, kill_after=3), KILLED)
    until(lambda: len(one.records(0)) > 7, stays)
    back = one.island(1, "--resume", unreachable=True)
    until(lambda: "next outer step" in text_so_far(back), back, stays)
    go.touch()
    text = ended(back, 2)
    assert "island 1 could not take over the state of the others" in text
    assert "diloco.timeout = 5 s" in text
    ended(stays)
    assert [row["step"] for row in one.records(0)] == [*range(13)]


def test_island_that_is_killed_within_the_all_reduce_costs_its_steps_alone(rig: OpenRig) -> None:
    """The survivor's weights are those of the last outer step; it takes the steps again."""
    one = rig(diloco__min_replicas=1)
    one.light()
    stays = one.island(0)
    ended(one.island(1, kill_in=1), KILLED)
    text = ended(stays)
    assert "the outer step failed" in text and "the steps 3 to 4 are taken again" in text
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("after ")]
    assert [(first, third) for first, _, third, _ in lines][:3] == [
        ("2:", "2"), ("4:", "2"), ("4:", "4"),
    ]  # fmt: skip
    assert lines[0][3] == lines[1][3] != lines[2][3]
    assert [row["step"] for row in one.records(0)] == [*range(9)]


@pytest.mark.slow
def test_first_outer_step_that_fails_saves_nothing(rig: OpenRig) -> None:
    """A checkpoint of step 0 would have the optimizer of steps that are taken again."""
    one = rig(diloco__min_replicas=1, checkpoint__keep=9, trainer__steps=4)
    one.light()
    stays = one.island(0)
    ended(one.island(1, kill_in=0), KILLED)
    assert "the steps 1 to 2 are taken again" in ended(stays)
    saved = sorted(path.name for path in (one.run_dir(0) / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000004"]


@pytest.mark.slow
def test_island_whose_weights_explode_is_never_averaged(rig: OpenRig) -> None:
    """In the update before an outer step, with a second one to go; the other island goes on."""
    one = rig(diloco__min_replicas=1)
    one.light()
    stays, explodes = one.island(0), one.island(1, explode=4)
    text = ended(explodes, 1)
    assert "step 4" in text and "weights" in text and "Traceback" not in text
    ended(stays)
    together = {
        row["step"]: row["islands/together"]
        for row in one.records(0)
        if row["step"] % 2 == 0 < row["step"]
    }
    assert together == {2: 2, 4: 1, 6: 1, 8: 1}
    assert max(float(tensor.abs().max()) for tensor in weights(one.run_dir(0)).values()) < 1e3
    assert [path.name for path in (one.run_dir(1) / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.slow
def test_lighthouse_that_is_restarted_ends_nothing(rig: OpenRig) -> None:
    one = rig(trainer__steps=12)
    first = one.light()
    both = [one.island(index, slow=0.2) for index in (0, 1)]
    until(lambda: len(one.records(0)) > 4, *both)
    first.kill()
    ended(first, KILLED)
    steps = len(one.records(0))
    one.light()
    for island in both:
        ended(island)
    assert_equal_weights(one, 0, 1)
    assert steps < len(one.records(0)) == 13


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_an_island_that_waits_for_another(rig: OpenRig, signum: int) -> None:
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
    (checkpoint,) = (one.run_dir(0) / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002"


@pytest.mark.slow
def test_slow_island_is_waited_for(rig: OpenRig) -> None:
    """Three islands, one nine times slower: all end with the same weights."""
    one = rig(diloco__replicas=3, trainer__steps=6)
    one.light()
    islands = [one.island(index, slow=slow) for index, slow in enumerate((0.1, 0.1, 0.9))]
    found = [digests(ended(island)) for island in islands]
    assert found[0] == found[1] == found[2] and [*found[0]] == [2, 4, 6]
    assert_equal_weights(one, 1, 2)


@pytest.mark.slow
def test_island_that_is_left_behind_says_so(rig: OpenRig) -> None:
    """Slower than diloco.wait, and min_replicas below a majority, which would let it train on."""
    one = rig(diloco__replicas=3, diloco__min_replicas=1, diloco__wait=2.0, trainer__steps=4)
    one.light()
    slow = [one.island(index, slow=seconds) for index, seconds in enumerate((0.1, 0.1, 9.0))]
    ended(slow[0])
    ended(slow[1])
    text = ended(slow[2], 2)
    assert "has finished without island 2" in text or "are not those of island" in text


@pytest.mark.slow
def test_resume_of_all_islands_is_bit_equal(rig: OpenRig) -> None:
    """Both are killed at different places; one lacks its newest checkpoint."""
    whole = rig()
    whole.light()
    for island in [whole.island(index) for index in (0, 1)]:
        ended(island)
    cut = rig()
    cut.light()
    killed = [cut.island(0, kill_after=7), cut.island(1, kill_after=6)]
    for island in killed:
        ended(island, KILLED)
    shutil.rmtree(cut.run_dir(1) / "checkpoints" / "step_000006")
    again = [cut.island(index, "--resume") for index in (0, 1)]
    texts = [ended(island) for island in again]
    assert all("resuming after step 4" in text for text in texts)
    for index in (0, 1):
        assert numbers(whole.run_dir(index)) == numbers(cut.run_dir(index))
        mine, theirs = weights(whole.run_dir(index)), weights(cut.run_dir(index))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
