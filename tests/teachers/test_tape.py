"""A teacher's tape: what is read, what is asked, and what is refused."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Limits, Rollout, SamplingParams
from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.tape.opening import tape_alone, with_tape
from prime_composer.teachers.tape.scorer import NotOnTape, TapedScorer
from prime_composer.teachers.tape.store import FILES, TapeError
from tests.teachers.own import STUDENT, rollout_of, scorer_of

VOCAB, WIDTH = 12, 4
HEAD = TeacherHead(
    torch.arange(VOCAB * WIDTH).reshape(VOCAB, WIDTH).to(torch.bfloat16), scale=0.5, tolerance=0.25
)


class Drawn:
    """A teacher whose rows are drawn by what it reads, and which counts what it is asked."""

    gives_any_ids = True

    def __init__(self, seed: int = 0) -> None:
        self.limits = Limits(64, VOCAB, VOCAB)
        self.seed, self.asked, self.prompts = seed, 0, 0
        self.sampler = self

    def row(self, read: Sequence[int]) -> torch.Tensor:
        """Return log q of the token after these."""
        seed = hash((self.seed, *read)) % 2**31
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(0)

    def score(
        self, rollouts: Any, support_size: Any, prompts: Any = None, *, candidate_ids: Any = None,
        hidden: bool = False,
    ) -> list[Scores]:  # fmt: skip
        self.asked += len(rollouts)
        found = []
        for index, rollout in enumerate(rollouts):
            own = rollout.token_ids[rollout.start :].tolist()
            read = rollout.token_ids[: rollout.start].tolist()
            if prompts is not None:
                read = [*prompts[index]]
            rows = torch.stack([self.row(read + own[:t]) for t in range(len(own))])
            k = VOCAB if support_size == "full" else support_size
            ids = rows.topk(k).indices if candidate_ids is None else candidate_ids[index]
            states = rows[:, :WIDTH].to(torch.bfloat16)
            ref = rows.gather(1, torch.tensor(own)[:, None])[:, 0]
            shares = (HiddenStates(states, HEAD, ref_logprobs=ref),) if hidden else ()
            found.append(Scores(ref, ids, rows.gather(1, ids), shares, start=len(read)))
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Answer with ids that the prompt, the seed and the place in the call choose."""
        self.prompts += len(prompts)
        rollouts = []
        for place, prompt in enumerate(prompts):
            for one in range(params.n):
                draw = 0 if params.temperature == 0 else seed + place + one
                ids = torch.tensor([*prompt, (sum(prompt) + draw) % VOCAB, 1])
                mask = torch.arange(len(ids)) >= len(prompt)
                mu = torch.where(mask, -0.5, torch.nan)
                rollouts.append(Rollout(ids, mask, mu, "stop" if one else "length", place))
        return rollouts

    def update_weights(self, model: Any) -> None: ...

    def close(self) -> None: ...


OPEN: list[TapedScorer] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the tapes of a test."""
    yield
    while OPEN:
        OPEN.pop().close()


def config(folder: Path, **changes: Any) -> TeacherConfig:
    return TeacherConfig(**{"model": "a/model", "tape": folder, **changes})


def opened(
    folder: Path,
    scorer: Any,
    table: Any = MappingProxyType({}),
    tokenizers: tuple[str, str | None] = ("hash", None),
    **spec: Any,
) -> TapedScorer:
    """Open a teacher with a tape; ``table`` and ``spec`` change how it is opened."""
    usual = BackendSpec(
        config(folder, **table), "[teacher]", "transformers", "a/model", "float32", 64, 4
    )
    OPEN.append(with_tape(scorer, replace(usual, **spec), tokenizers, 1e-4, True, print))
    return OPEN[-1]


SERVED = {"url": "http://host:1"}


def alone(folder: Path, **changes: Any) -> TapedScorer:
    own = config(folder, tape_only=True, **changes)
    return tape_alone(own, "teacher", ("hash", None), 48, lambda text: None)


def rollout(*ids: int, start: int = 2) -> Rollout:
    return Rollout.not_sampled(torch.tensor(ids), start, "stop")


ONE, TWO = rollout(3, 4, 5, 6, 7), rollout(3, 4, 8, 9)


def equal(one: Scores, other: Scores) -> bool:
    """Whether two scores are the same, bit for bit and in dtype."""
    pairs = [
        (one.ref_logprobs, other.ref_logprobs), (one.token_ids, other.token_ids),
        (one.teacher_logprobs, other.teacher_logprobs),
        *((a.states, b.states) for a, b in zip(one.hidden, other.hidden, strict=True)),
    ]  # fmt: skip
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return same and (one.start, one.k) == (other.start, other.k)


def test_tape_second_run_asks_for_nothing(tmp_path: Path) -> None:
    """Not even where the rollouts come in another order, twice, or in other calls."""
    plain, first, second = Drawn(), Drawn(), Drawn()
    taped = opened(tmp_path, first)
    assert all(map(equal, taped.score([ONE, TWO, ONE], 5), plain.score([ONE, TWO, ONE], 5)))
    assert first.asked == 2 + 1  # each once, and the known request
    assert taped.take_metrics() == {"tape/read": 0.0}
    taped.close()
    again = opened(tmp_path, second)
    assert second.asked == 1  # the known request alone
    assert all(map(equal, again.score([TWO, ONE], 5), plain.score([TWO, ONE], 5)))
    assert second.asked == 1 and again.take_metrics() == {"tape/read": 1.0}
    assert all(map(equal, alone(tmp_path).score([TWO, ONE], 5), plain.score([TWO, ONE], 5)))


@pytest.mark.parametrize(("stored", "asked"), [(5, 3), (5, 0), ("full", 4)])
def test_tape_smaller_k_is_read_from_a_larger_one(tmp_path: Path, stored: Any, asked: int) -> None:
    """The sampled token's log-prob stays, also where the K ids do not have it."""
    opened(tmp_path, Drawn()).score([ONE], stored)
    (read,) = alone(tmp_path).score([ONE], asked)
    (expected,) = Drawn().score([ONE], asked)
    assert equal(read, expected)


def test_tape_larger_k_or_hidden_states_are_asked(tmp_path: Path) -> None:
    """What is kept then has the smaller answers in it too, and no second copy is read."""
    taped = opened(tmp_path, Drawn())
    taped.score([ONE], 3)
    for size, hidden in ((4, False), (3, True)):
        with pytest.raises(NotOnTape):
            alone(tmp_path).score([ONE], size, hidden=hidden)
        (scores,) = taped.score([ONE], size, hidden=hidden)
        (expected,) = Drawn().score([ONE], size, hidden=hidden)
        assert equal(scores, expected)
        assert equal(alone(tmp_path).score([ONE], size, hidden=hidden)[0], expected)


def test_tape_hidden_states_come_with_their_head(tmp_path: Path) -> None:
    """In the teacher's dtype, with all that the head has; one head object for all answers."""
    opened(tmp_path, Drawn()).score([ONE], 0, hidden=True)
    both = alone(tmp_path).score([ONE, ONE], 0, hidden=True)
    (first,), (second,) = (scores.hidden for scores in both)
    assert first.head is second.head and torch.equal(first.head.weight, HEAD.weight)
    assert (first.head.scale, first.head.tolerance, first.head.softcap) == (0.5, 0.25, None)
    assert first.states.dtype == torch.bfloat16 and "tape" in first.head.origin
    assert torch.equal(first.ref_logprobs, both[0].ref_logprobs)


def test_tape_tells_what_is_asked_apart(tmp_path: Path) -> None:
    """Other tokens, another prompt or first token, other trained rows or chosen ids."""
    chosen = torch.tensor([[1, 2], [3, 4], [5, 6]])
    asked: list[tuple[Rollout, dict[str, Any]]] = [
        (ONE, {}),
        (rollout(3, 4, 5, 6, 8), {}),
        (rollout(9, 4, 5, 6, 7), {}),
        (rollout(3, 4, 5, 6, 7, start=3), {}),
        (replace(ONE, loss_mask=torch.tensor([False, False, True, False, True])), {}),
        (ONE, {"prompts": [[3, 5]]}),
        (ONE, {"candidate_ids": [chosen]}),
        (ONE, {"candidate_ids": [chosen.flip(1)]}),
        (ONE, {"candidate_ids": [chosen[:, :1]]}),
    ]
    sizes = [3, 3, 3, 3, 3, 3, 2, 2, 1]
    taped, plain = opened(tmp_path, Drawn()), Drawn()
    for (one, more), size in zip(asked, sizes, strict=True):
        taped.score([one], size, **more)
        assert taped.take_metrics() == {"tape/read": 0.0}
    for (one, more), size in zip(asked, sizes, strict=True):
        assert equal(taped.score([one], size, **more)[0], plain.score([one], size, **more)[0])
        assert taped.take_metrics() == {"tape/read": 1.0}


def test_tape_keeps_what_is_not_known_or_scored(tmp_path: Path) -> None:
    """As a smaller vocabulary, or a teacher with a tokenizer of its own, gives it."""
    known, scored = torch.tensor([[True, False]] * 3), torch.tensor([True, False, True])
    scorer = Drawn()
    (whole,) = scorer.score([ONE], 2)
    partial = Scores(
        whole.ref_logprobs, whole.token_ids, whole.teacher_logprobs, (), known, 2, scored
    )
    scorer.score = lambda rollouts, size, **_: [partial] * len(rollouts)  # type: ignore[method-assign]
    opened(tmp_path, scorer).score([ONE], 2)
    (read,) = alone(tmp_path).score([ONE], 2)
    assert torch.equal(read.known, known) and torch.equal(read.scored, scored)
    assert equal(read, whole)


def test_tape_alone_names_the_first_missing_rollout(tmp_path: Path) -> None:
    """And opens nothing."""
    opened(tmp_path, Drawn()).score([ONE], 4)
    with pytest.raises(NotOnTape, match=r"lacks 1 of 2 .* rollout 1, of 2 tokens .* 8 9") as error:
        alone(tmp_path).score([ONE, TWO], 4)
    assert error.value.index == 1
    assert error.value.remedy in str(error.value) and "tape make" in error.value.remedy
    assert alone(tmp_path).limits == Limits(48, VOCAB)


@pytest.mark.parametrize(
    ("changes", "hash_now", "named"),
    [
        ({"tokenizer": "own"}, "hash", "tokenizer was 'shared' and is 'own'"),
        ({}, "other", "student_tokenizer was 'hash' and is 'other'"),
        ({"model": "b/model"}, "hash", "model was 'a/model' and is 'b/model'"),
    ],
)
def test_tape_of_another_recipe_is_refused(
    tmp_path: Path, changes: Any, hash_now: str, named: str
) -> None:
    """With a teacher and without one. A recipe that names no model is not refused for it."""
    opened(tmp_path, Drawn())
    with pytest.raises(TapeError, match=named):
        opened(tmp_path, Drawn(), changes, (hash_now, None))
    with pytest.raises(TapeError, match=named):
        tape_alone(config(tmp_path, **changes), "teacher", (hash_now, None), 48, print)
    assert alone(tmp_path, model=None).live is None


@pytest.mark.parametrize(
    ("changes", "dtype", "named"),
    [
        ({"limits": Limits(32, VOCAB, 20)}, "float32", "server_max_model_len was 64 and is 32"),
        ({"gives_any_ids": False}, "float32", "any_ids was True and is False"),
        ({}, "bfloat16", "dtype was 'float32' and is 'bfloat16'"),
        ({"limits": Limits(64, VOCAB, 7)}, "float32", None),
    ],
)
def test_tape_of_another_server_is_refused(
    changes: dict[str, Any], dtype: str, named: str | None, tmp_path: Path
) -> None:
    """A second writer that is cut elsewhere, rounds otherwise, or can give another kind of scores.

    The largest K of a request is none of this: a K that is too large is not on the tape.
    """
    first, second = Drawn(), Drawn()
    for name, value in changes.items():
        setattr(second, name, value)
    opened(tmp_path, first, SERVED, backend="server")
    if named is None:
        opened(tmp_path, second, SERVED, backend="server")
        return
    with pytest.raises(TapeError, match=f"{named}.*its server's settings"):
        opened(tmp_path, second, SERVED, backend="server", dtype=dtype)


def test_tape_of_another_teacher_is_seen_by_its_scores(tmp_path: Path) -> None:
    """The header may be the same, as of a server that serves another model by one name."""
    opened(tmp_path, Drawn()).score([ONE], 4)
    with pytest.raises(TapeError, match=r"another teacher.* nat apart.*checks\.tolerance"):
        opened(tmp_path, Drawn(seed=1))


def test_tape_of_a_served_teacher_waits_for_its_proof(tmp_path: Path) -> None:
    """Others read its answers once it has answered a known request rightly after them."""
    scorer = Drawn()
    taped = opened(tmp_path, scorer, SERVED, backend="server")
    taped.score([ONE], 4)
    with pytest.raises(NotOnTape):
        alone(tmp_path).score([ONE], 4)
    taped.verify()
    assert equal(alone(tmp_path).score([ONE], 4)[0], Drawn().score([ONE], 4)[0])
    taped.score([TWO], 4)
    scorer.seed = 1  # it is another one now, or was when it scored the last rollout
    with pytest.raises(TapeError, match="another teacher"):
        taped.verify()
    with pytest.raises(NotOnTape):
        alone(tmp_path).score([TWO], 4)


def test_tape_folders_are_joined_by_copying(tmp_path: Path) -> None:
    """The files of two writers have names of their own."""
    for name, one in (("a", ONE), ("b", TWO)):
        opened(tmp_path / name, Drawn()).score([one], 4)
    for file in (tmp_path / "b").glob(FILES):
        shutil.copy(file, tmp_path / "a")
    read = alone(tmp_path / "a").score([ONE, TWO], 4)
    assert all(map(equal, read, Drawn().score([ONE, TWO], 4)))


def test_tape_greedy_answers_are_kept_by_prompt(tmp_path: Path) -> None:
    """Draws are kept by call: an answer alone would be another draw."""
    prompts, scorer = [[1, 2], [3], [4, 5]], Drawn()
    sampler = opened(tmp_path, scorer).sampler
    assert sampler is not None
    greedy, draws = SamplingParams(temperature=0.0), SamplingParams(n=2)
    for params, seed in ((greedy, 0), (draws, 7)):
        first = sampler.generate(prompts, params, seed)
        asked = scorer.prompts
        for one, other in zip(first, Drawn().generate(prompts, params, seed), strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.loss_mask, other.loss_mask)
            torch.testing.assert_close(
                one.inference_logprobs, other.inference_logprobs, rtol=0, atol=0, equal_nan=True
            )
            assert one.finish_reason == other.finish_reason
            assert one.prompt_index == other.prompt_index
        sampler.generate(prompts, params, seed)
        assert scorer.prompts == asked
    sampler.generate([[9], [3], [1, 2]], greedy, 3)
    assert scorer.prompts == 3 + 3 + 1
    sampler.generate(prompts[:2], draws, 7)
    sampler.generate(prompts, draws, 8)
    assert scorer.prompts == 7 + 2 + 3
    silent = alone(tmp_path).sampler
    assert silent is not None and len(silent.generate([[4, 5]], greedy, 0)) == 1
    other = opened(tmp_path, scorer, ends=(7,))
    assert other.sampler is not None
    for params, seed in ((greedy, 0), (draws, 7)):  # which went on behind another end
        asked = scorer.prompts
        other.sampler.generate(prompts, params, seed)
        assert scorer.prompts == asked + len(prompts)
    lacks = r"lacks the teacher's own answers to 1 of 2 prompts.*tape_only = false"
    with pytest.raises(NotOnTape, match=lacks):
        silent.generate([[4, 5], [6]], greedy, 0)


def test_tape_below_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """The teacher's rows are kept, and what is made of them is the same, metrics included."""
    plain, student = scorer_of(STUDENT)
    one = rollout_of(student, "abc ", "abc bca")
    (expected,) = plain.score([one], 4)
    measured = plain.take_metrics()
    taped, _ = scorer_of(STUDENT)
    taped.scorer = opened(tmp_path, taped.scorer)
    read = [taped.score([one], 4)[0]]
    taped.take_metrics()
    taped.scorer = alone(tmp_path)
    read.append(taped.score([one], 4)[0])
    for scores in read:
        assert equal(scores, expected)
        assert torch.equal(scores.all_known, expected.all_known)
    assert taped.take_metrics() == measured


def test_teachers_known_requests_go_past_their_tapes(tmp_path: Path) -> None:
    """A tape would answer for a server that is another one now."""
    scorer = Drawn()
    taped, silent = opened(tmp_path, scorer), alone(tmp_path)
    first, second = TeacherId("a"), TeacherId("b")
    teachers = Teachers({first: taped, second: silent}, Routing({}, {}))
    assert dict(teachers.watched) == {first: scorer}


def test_tape_of_a_tokenizer_alone_is_read_by_its_hash(tmp_path: Path) -> None:
    """A folder without weights has no content of the teacher's to compare."""
    folder, named = tmp_path / "tape", {"tokenizer": "own", "model": str(tmp_path)}
    opened(folder, Drawn(), {"tokenizer": "own"}, ("hash", "own"))
    (tmp_path / "tokenizer.json").write_text("{}")
    own = config(folder, tape_only=True, **named)
    assert tape_alone(own, "teacher", ("hash", "own"), 48, print).live is None
    with pytest.raises(TapeError, match="teacher_tokenizer was 'own' and is 'other'"):
        tape_alone(own, "teacher", ("hash", "other"), 48, print)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(TapeError, match="model was 'a/model' and is"):
        tape_alone(own, "teacher", ("hash", "own"), 48, print)
