"""One island: its share of the problems, its outer steps, and how it meets the others."""

import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from prime_composer.backends.errors import ServerError
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.islands import board as board_module
from prime_composer.local.islands import island as island_module
from prime_composer.local.islands.board import Board, Seat
from prime_composer.local.islands.island import (
    Island,
    IslandRefused,
    distance,
    plain,
    sign_of,
    tensors,
)
from prime_composer.local.islands.lighthouse import open_lighthouse
from prime_composer.local.islands.outer import OuterSteps, interface_of, own_address
from prime_composer.local.student import Student
from prime_composer.local.watch import Watch
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.loading import parse_recipe
from prime_composer.samplers.server import ServerSampler
from tests.islands.rig import free_ports, tables, together

pytest.importorskip("torchft")
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # torchft's


@pytest.mark.parametrize("several", [False, True], ids=["data", "environments"])
def test_islands_ask_the_parts_of_one_undivided_order(several: bool) -> None:
    """One after the other, each step's parts are the batches of a run with all steps by itself.

    With one kind of problems they are also the parts of its batches of three times the size.
    """
    raw = tables(trainer__seed=3)
    if several:
        data = {"source": "generated", "size": 40}
        del raw["data"]
        raw["environments"] = {"a": {**data, "ratio": 1}, "b": {**data, "seed": 9, "ratio": 2}}
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)

    class Engine:
        pass

    engine: Any = Engine()
    engine.problems = type("Tokenized", (), {"problem_set": problems})

    def batch(step: int, size: int, island: tuple[int, int] | None) -> list[str]:
        trainer = recipe.trainer.model_copy(update={"batch_size": size})
        made = Collector.__new__(Collector)
        made.__dict__ |= {
            "engine": engine, "trainer": trainer, "rollout": recipe.rollout, "island": island,
        }  # fmt: skip
        return [problem.question for problem in made.problems(step)]

    for step in range(1, 30):
        parts = [batch(step, 6, (index, 3)) for index in range(3)]
        assert parts == [batch(3 * step - 2 + index, 6, None) for index in range(3)]
        if not several:
            assert [one for part in parts for one in part] == batch(step, 18, None)


def test_outer_step_is_nesterov_on_the_mean_of_the_pseudo_gradients() -> None:
    """By hand: two islands go down by 1 and 2 a step, three steps each, outer lr .7, momentum .5.

    The mean of the pseudo-gradients is 4.5 each time. Outer step t moves by
    .7 (4.5 + .5 m_t), with m_t = 4.5 + .5 m_(t-1).
    """
    config = DilocoConfig(replicas=2, every=3, wait=20.0, timeout=10.0)
    place = torch.nn.Parameter

    def descend(index: int, url: str) -> tuple[list[float], int]:
        parameter = place(torch.ones(3))
        outer = OuterSteps(config, index, url, [parameter], dict, lambda state: None)
        seen = []
        for _ in range(9):
            with torch.no_grad():
                parameter -= index + 1.0
            outer.count_step()
            seen.append(parameter.detach()[0].item())
        taken = outer.taken
        outer.close()
        return seen, taken

    with open_lighthouse(config, "127.0.0.1", 0) as url:
        one, other = together(lambda: descend(0, url), lambda: descend(1, url))
    for island in (one, other):
        assert not isinstance(island, Exception), (one, other)
    assert one[1] == other[1] == 3
    value, buffer = 1.0, 0.0
    for outer in range(3):
        buffer = 4.5 + 0.5 * buffer
        inner = [value - 2.0, value - 4.0]
        value -= 0.7 * (4.5 + 0.5 * buffer)
        assert other[0][3 * outer : 3 * outer + 3] == pytest.approx([*inner, value], rel=1e-6)
        assert one[0][3 * outer + 2] == other[0][3 * outer + 2]


def join(url: str, *asked: tuple[dict[str, Any], list[int]]) -> list[Any]:
    """Let islands join with recipes and steps to start from."""
    config = DilocoConfig(replicas=len(asked), wait=3.0)

    def one(index: int) -> int | None:
        with Island(config, index, url, lambda text: None) as island:
            return island.join(*asked[index])

    return together(*(lambda index=index: one(index) for index in range(len(asked))))


def test_islands_start_from_the_newest_step_that_all_have(at_board: str) -> None:
    assert join(at_board, ({}, [20, 40, 60]), ({}, [20, 40]), ({}, [20, 40, 60])) == [40, 40, 40]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            [({}, [20, 40]), ({}, [0])],
            ["island 0 step 20, 40; island 1 a new run", "--resume on all"],
        ),
        (
            [({"trainer": {"lr": lr, "seed": 1}}, [0]) for lr in (1.0, 2.0)],
            ["differ in trainer.lr:", "island 0", "island 1"],
        ),
    ],
)  # fmt: skip
def test_islands_of_two_runs_are_refused(
    asked: list[tuple[dict[str, Any], list[int]]], words: list[str], at_board: str
) -> None:
    errors = join(at_board, *asked)
    assert all(isinstance(error, IslandRefused) for error in errors), errors
    assert any(all(word in str(error) for word in words) for error in errors), errors


def test_address_that_one_island_alone_reaches_is_refused(
    at_board: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = iter(["127.0.0.1", "10.0.0.2"])
    monkeypatch.setattr(island_module, "own_address", lambda lighthouse: next(addresses))
    errors = join(at_board, ({}, [0]), ({}, [0]))
    assert all(isinstance(error, IslandRefused) for error in errors), errors
    assert any("127.0.0.1" in str(e) and "10.0.0.2" in str(e) for e in errors), errors


def test_places_may_differ(at_board: str) -> None:
    """Where models, servers and files are; ``teacher.dtype`` is none of these."""
    own = [
        {"student": {"model": path}, "rollout": {"url": path, "weights_dir": path},
         "teachers": {"a": {"model": path, "url": path}}, "data": {"path": path},
         "output_dir": path, "logging": {"wandb": {"name": path}}}
        for path in ("here", "there")
    ]  # fmt: skip
    assert join(at_board, (own[0], [0]), (own[1], [0])) == [0, 0]


def test_island_that_does_not_come_is_named(at_board: str) -> None:
    texts: list[str] = []
    config = DilocoConfig(replicas=3, wait=0.5)
    with Island(config, 1, at_board, texts.append) as island:
        with pytest.raises(IslandRefused, match="island 0, 2 did not come within diloco.wait"):
            island.join({}, [0])
    assert texts == ["waiting for island 0, 2"]


def test_two_processes_are_no_island_together(
    at_board: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first one is gone for long enough."""
    monkeypatch.setattr(board_module, "ALIVE_SECONDS", 0.5)
    first = Seat(at_board, 1)
    with pytest.raises(ServerError, match="another process is island 1 already"):
        Seat(at_board, 1)
    first.close()
    threading.Event().wait(0.6)
    Seat(at_board, 1).close()


def test_lighthouse_listens_by_ipv4() -> None:
    opened = open_lighthouse(DilocoConfig(replicas=2), "::1", 0)
    with pytest.raises(ValueError, match="--host ::1: islands connect .* by IPv4"), opened:
        pass


def test_lighthouse_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "FIRST_SECONDS", 0.0)
    url = f"http://user:word@127.0.0.1:{free_ports()}"
    with pytest.raises(ServerError, match=r"http://\*\*\*@127.0.0.1:.*prime-rl lighthouse --conf"):
        Seat(url, 0)


def test_board_refuses_what_is_no_card() -> None:
    board = Board("127.0.0.1", 0, {})
    texts = (b"", b"[]", b"{}", b"\xff", b"1", b'{"process": "a"}')
    assert [board.put("0", "", text)[0] for text in texts] == [400] * 6
    board.close()


def test_card_travels_when_it_changes() -> None:
    """And again to a board that was restarted, or by one that the island has not seen."""
    board = Board("127.0.0.1", 0, {})

    def put(island: str, version: str, **card: Any) -> dict[str, Any]:
        status, answer = board.put(island, version, json.dumps({"process": "a", **card}).encode())
        assert status == 200
        return json.loads(answer)

    first = put("0", "", fact=1)
    assert first["cards"] == {"0": {"process": "a", "fact": 1}} and first["alive"] == ["0"]
    assert put("0", first["version"]) == {**first, "cards": None}
    second = put("1", "", fact=2)
    assert put("0", first["version"])["cards"] == second["cards"]
    assert set(second["cards"]) == {"0", "1"}
    board.close()


def test_seat_tells_a_board_that_was_restarted_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_ports()
    board = Board("127.0.0.1", port + 1, {})
    seats = [Seat(f"http://127.0.0.1:{port}", index) for index in (0, 1)]
    seats[0].say(fact=1)
    board.close()
    board = Board("127.0.0.1", port + 1, {})
    seats.append(Seat(f"http://127.0.0.1:{port}", 2))
    assert seats[2].wait_for(lambda: {0, 1} == {*seats[2].others}, 20.0)
    assert seats[2].others[0].card["fact"] == 1 and seats[2].others[0].alive
    for seat in seats:
        seat.close()
    board.close()


@pytest.mark.parametrize(
    ("change", "key"),
    [({"wait": 60.0}, "wait = 60, and island 0 has 3600"),
     ({"min_replicas": 1}, "min_replicas = 1, and island 0 has 2")],
)  # fmt: skip
def test_lighthouse_of_another_recipe_is_refused(change: dict[str, Any], key: str) -> None:
    """It would let islands train on alone, or end them too early."""
    config = DilocoConfig(replicas=2)
    with open_lighthouse(DilocoConfig(replicas=2, **change), "127.0.0.1", 0) as url:
        with Island(config, 0, url, print) as island:
            with pytest.raises(IslandRefused, match=f"the lighthouse was started with .*{key}"):
                island.join({}, [0])


def test_sampler_that_two_islands_share_is_refused(at_board: str) -> None:
    """The second one has sent its weights to the server that the first one asks then."""
    with Island(DilocoConfig(replicas=2), 0, at_board, print) as island:
        facts = {"sampler": "mine", "problems": "p", "tokenizers": {}, "weights": "w"}
        island._compare_facts(facts, "mine", 1, {**facts, "sampler": "theirs"})
        with pytest.raises(IslandRefused, match="island 0 and island 1 have one sampler.*url"):
            island._compare_facts(facts, "theirs", 1, {**facts, "sampler": "theirs"})
        with pytest.raises(IslandRefused, match="tokenizers of island 0 and island 1"):
            island._compare_facts(facts, None, 1, {**facts, "tokenizers": {"teacher": "x"}})


def test_late_island_leaves_the_sampler_of_another_one_alone(
    at_board: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights would take the place of those that train. The server has the same start."""
    cards = {1: {"facts": {"server": "1760000000.25"}}}
    monkeypatch.setattr(Island, "_gather", lambda self, key: cards)
    sampler = Mock(spec=ServerSampler)
    sampler.started.return_value = "1760000000.25"
    with Island(DilocoConfig(replicas=2), 0, at_board, print) as island:
        island.is_late = True
        with pytest.raises(IslandRefused, match="island 0 and island 1 have one sampler.*url"):
            student, engine = Mock(spec=Student, steps=4), Mock(spec=Engine, sampler=sampler)
            island.meet(student, engine, Mock(spec=Watch))
    sampler.update_weights.assert_not_called()


def test_sign_tells_a_fork_from_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(400, 300, generator=generator) * 0.02 for _ in range(4)]
    rounded = [
        weight * (1 + 1e-7 * torch.randn(weight.shape, generator=generator)) for weight in weights
    ]
    forked = [weight + 1e-5 * torch.randn(weight.shape, generator=generator) for weight in weights]
    assert sign_of([torch.tensor([3.0, 0.0]), torch.tensor([-4.0])]) == [5.0, 3.0, -4.0]
    own = sign_of(weights)
    assert distance(own, sign_of(rounded)) < island_module.SAME_WEIGHTS / 10
    assert distance(own, sign_of(forked)) > 10 * island_module.SAME_WEIGHTS


def test_numbers_travel_as_they_are() -> None:
    state = {"t": {"ids": torch.tensor([[1, 2]]), "p": torch.tensor([0.1, -torch.inf]), "n": 3,
                   "none": torch.zeros(0, 4)}}  # fmt: skip
    back = tensors(plain(state))
    for name, value in state["t"].items():
        again = back["t"][name]
        assert again == value if name == "n" else torch.equal(again, value)
        assert name == "n" or again.dtype == value.dtype


def test_address_and_interface_are_those_that_reach_the_lighthouse() -> None:
    assert own_address("http://127.0.0.1:29510") == "127.0.0.1"
    with pytest.raises(ValueError, match="by IPv4, and ::1 has no such address; name one"):
        own_address("http://[::1]:29510")
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match="no network interface.*203.0.113.9"):
        interface_of("203.0.113.9")


def test_parameters_that_do_not_train_are_not_averaged() -> None:
    """DiLoCo gets what the optimizer trains, in its order."""
    model = nn.Linear(2, 2)
    config = DilocoConfig(replicas=1, every=1, outer_lr=1.0, outer_momentum=0.0, wait=20.0)
    with open_lighthouse(config, "127.0.0.1", 0) as url:
        outer = OuterSteps(config, 0, url, [model.weight], dict, lambda state: None)
        with torch.no_grad():
            model.bias += 5.0
        before = model.bias.detach().clone()
        outer.count_step()
        outer.close()
    assert torch.equal(model.bias, before) and outer.sgd.param_groups[0]["params"] == [model.weight]
