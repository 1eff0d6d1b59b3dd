"""The trainer asks the teachers: sequences of a bin, answers in time, and what is made of them."""

import dataclasses
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from prime_composer.backends.alignment import sequences_to_score
from prime_composer.backends.answers import InvalidAnswer
from prime_composer.backends.http import ServerError
from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.contract import HiddenStates, Logits, Scores, TeacherHead
from prime_composer.divergences import reverse_kl
from prime_composer.full_vocabulary import compare
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR
from prime_composer.teachers.server import ServerScorer
from prime_composer.upstream.settings import Teacher
from prime_composer.upstream.trainer import head as head_hook
from prime_composer.upstream.trainer import hooks, questions
from prime_composer.upstream.trainer.adapter import trainer_adapter
from tests.upstream import fake_prime_rl

V, D, DT, K = 31, 6, 5, 3
NARROW = 25
"""Entries of the head of a teacher that lacks some of the student's ids."""
LENGTHS = [5, 4, 3]
"""Of the sequences of a bin; the last one is padding."""
TRAINED = [2, 3, 4, 6, 7]
"""Tokens that train: the rest of the first sequence, and the middle of the second one."""
FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
ONE = [{"url": "http://one:1", "model": "m", "weight": 1.0}]
TWO = [
    {"url": "http://one:1", "model": "m", "weight": 0.25},
    {"url": "http://two:2", "model": "m", "weight": 0.75},
]


def micro_batch(seed=0, **more):
    """Return prime-rl's micro-batch: two sequences, and padding."""
    n = sum(LENGTHS)
    trained = torch.zeros(1, n, dtype=torch.bool)
    trained[0, TRAINED] = True
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, V, (1, n), generator=generator),
        "loss_mask": trained,
        "temperatures": torch.ones(1, n),
        "ref_kl_weights": trained.float(),
        "rl_weights": torch.zeros(1, n),
        "routed_experts": None,
        "sequence_lengths": LENGTHS,
        "env_names": ["sums"] * 9 + [""] * 3,
        **more,
    }


class Scorer(ServerScorer):
    """A served teacher: its logits are those of fixed states, by token, times its head.

    Attributes:
        asked: the rollouts of each request.
        gate: responses wait for it.
        starts: of the server, as its responses name them.
    """

    starts: int | None = 1
    origin = "The teacher at http://one:1"
    opened: list["Scorer"] = []

    def __init__(self, served, model, **options):
        self.options, url = options, served.url
        generator = torch.Generator().manual_seed(len(url) + ord(url[-1]))
        self.table = torch.randn(V, DT, generator=generator)
        weight = torch.randn(V, DT, generator=generator)
        self.head = TeacherHead(weight, tolerance=1e-4, origin=f"The teacher at {url}")
        self.asked = []
        self.gate = threading.Event()
        self.gate.set()
        Scorer.opened.append(self)

    limits = Limits()

    def own_logprobs(self, prompt):
        """Say that it does not sample."""
        return "it does not"

    def logprobs(self, before):
        return (self.table[before] @ self.head.weight.T).log_softmax(-1)

    def score(self, rollouts, support_size, hidden=False):
        self.asked.append(rollouts)
        assert self.gate.wait(20)
        scores = []
        for rollout in rollouts:
            before = rollout.token_ids[rollout.start - 1 : -1]
            log_q = self.logprobs(before)
            top = log_q.topk(support_size)
            own = log_q.gather(1, rollout.token_ids[rollout.start :, None])[:, 0]
            share = HiddenStates(self.table[before], self.head, ref_logprobs=own)
            scores.append(Scores(own, top.indices, top.values, (share,) if hidden else ()))
        return scores


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Put ``Scorer`` in the place of servers, and forget the adapter."""
    Scorer.opened = []
    monkeypatch.setattr(questions, "ServerScorer", Scorer)
    trainer_adapter.cache_clear()
    yield Scorer
    trainer_adapter.cache_clear()


def hook(monkeypatch, loss, entries=ONE, **settings):
    """Turn the adapter on, as prime-rl's launcher and the finder do, and return its state."""
    settings = {"loss": loss, "asked_by": "trainer", "teachers": entries, **settings}
    monkeypatch.setenv("PRIME_COMPOSER", json.dumps(settings))
    module = fake_prime_rl.loss_module("v0.7")
    fake_prime_rl.put(monkeypatch, module)
    hooks.hook_loss(module)
    return trainer_adapter()


@pytest.fixture
def head():
    """Return a hooked head of prime-rl's."""
    torch.manual_seed(0)
    return fake_prime_rl.head_module()(D, V, bias=False)


def step(state, head, hidden, tensors):
    """Do what prime-rl does with a micro-batch; return what belongs to its first two sequences."""
    ids = tensors["input_ids"]
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    state.begin(tensors)
    out = head(hidden, labels, temperature=tensors["temperatures"])
    logprobs = out["logits"].log_softmax(-1).gather(2, labels.unsqueeze(2))[0, :, 0]
    parts = torch.cat([torch.full((1,), -1.0), logprobs[:-1]]).split(LENGTHS)
    state.micro_batch.place(parts)
    return [SimpleNamespace(**state.aligned(part)) for part in parts[:2]]


def test_wanted_of_an_environment_without_a_teacher_is_refused():
    tensors = micro_batch()
    with pytest.raises(ValueError, match="names none for the environment 'sums'"):
        questions.wanted_of(tensors, tensors["loss_mask"][0], {"other": ONE})


def test_answers_of_the_next_micro_batch_are_asked_for_ahead(monkeypatch):
    """Those behind it wait until they fit into the tokens that may be in memory."""
    monkeypatch.setattr(questions, "AHEAD_TOKENS", 0)
    tensors = micro_batch()
    wanted = [questions.wanted_of(tensors, tensors["loss_mask"][0], ONE) for _ in range(4)]
    answers = questions.StepAnswers(questions.TeacherConnections(ONE, K, hidden=False), wanted)
    (scorer,) = Scorer.opened

    def asked_after(number):
        assert [a.start for a in answers.take(number)] == [2, 6]
        return len(scorer.asked)

    assert [asked_after(number) for number in range(4)] == [2, 3, 4, 4]
    monkeypatch.setattr(questions, "AHEAD_TOKENS", 1000)
    scorer.asked.clear()
    questions.StepAnswers(questions.TeacherConnections(ONE, K, hidden=False), wanted).take(0)
    assert len(Scorer.opened[1].asked) == 4


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entries", [ONE, TWO], ids=["one", "mixture"])
def test_whole_vocabulary_equals_plain_float64(monkeypatch, head, entries, softcap):
    """KL(p || sum of w q) of the trained tokens, and its gradients for states and head."""
    state, tensors = hook(monkeypatch, FULL, entries), micro_batch()
    state.batch_came([tensors])
    head.double().softcap = softcap
    hidden = torch.randn(1, 12, D, dtype=torch.float64, requires_grad=True)
    found = step(state, head, hidden, tensors)
    masks = tensors["loss_mask"][0].split(LENGTHS)
    kl = torch.cat(
        [
            compare(one.hidden_states.masked(mask), reverse_kl)
            for one, mask in zip(found, masks, strict=False)
        ]
    )
    factor = torch.arange(1.0, 10.0, dtype=torch.float64)
    (kl * factor).sum().backward()

    plain, weight = (x.detach().clone().requires_grad_() for x in (hidden, head.weight))
    z = plain[0] @ weight.T
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = z.log_softmax(-1)
    before = tensors["input_ids"][0]
    weights = {entry["url"][7:10]: entry["weight"] for entry in entries}
    q = sum(
        w * scorer.logprobs(before).double().exp()
        for scorer, w in zip(Scorer.opened, weights.values(), strict=True)
    )
    expected = (log_p.exp() * (log_p - q.log())).sum(-1)
    rows = torch.tensor(TRAINED)
    (expected[rows - 1] * factor[rows]).sum().backward()
    torch.testing.assert_close(kl[rows], expected[rows - 1].detach(), atol=1e-6, rtol=1e-6)
    assert kl.count_nonzero() == len(TRAINED)
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(head.weight.grad, weight.grad, atol=1e-6, rtol=1e-6)
    own = torch.cat([one.ref_logprobs for one in found])[rows].double()
    labels = before[rows].unsqueeze(1)
    torch.testing.assert_close(own, q.log()[rows - 1].gather(1, labels)[:, 0], atol=1e-5, rtol=0)


def test_stops_of_the_whole_vocabulary_are_those_of_the_heads(monkeypatch, head):
    """Log p of the sampled ones, with the gradient; the loss is that of plain float64."""
    tensors = micro_batch()
    ids = tensors["input_ids"][0]
    stops = sorted({int(ids[TRAINED[1]]), (int(ids[TRAINED[1]]) + 1) % V})
    loss = {**FULL, "stops": {"ids": stops}}
    state = hook(monkeypatch, loss, ONE)
    state.batch_came([tensors])
    hidden = torch.randn(1, 12, D, dtype=torch.float64, requires_grad=True)
    found = step(state, head.double(), hidden, tensors)
    sampled = torch.isin(ids, torch.tensor(stops)) & tensors["loss_mask"][0]
    own = torch.cat([one.stops.logprobs for one in found])
    kept = sampled[: len(own)]
    own[kept].sum().backward()
    plain = hidden.detach().clone().requires_grad_()
    log_p = (plain[0] @ head.weight.detach().T).log_softmax(-1)[:, stops]
    rows = kept.nonzero()[:, 0]
    assert len(rows) and found[0].stops.token_ids == tuple(stops)
    log_p[rows - 1].sum().backward()
    torch.testing.assert_close(own[rows], log_p[rows - 1].detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-9, rtol=1e-9)


def test_whole_vocabulary_of_a_batch_without_tokens_has_no_loss(monkeypatch, head):
    """prime-rl fills ranks up with such batches. Their backward is a collective too."""
    tensors = micro_batch()
    tensors["ref_kl_weights"] = torch.zeros_like(tensors["ref_kl_weights"])
    state = hook(monkeypatch, FULL, ONE)
    state.batch_came([tensors])
    hidden = torch.randn(1, 12, D, requires_grad=True)
    (heads, _) = (one.hidden_states for one in step(state, head, hidden, tensors))
    compare(heads.masked(torch.zeros(5, dtype=torch.bool)), reverse_kl).sum().backward()
    assert not Scorer.opened
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_top_k_of_the_trainer_leaves_the_wire_to_router_replay(monkeypatch, head):
    """The support is the teacher's own; prime-rl's field has the experts and is not read."""
    experts = torch.randint(0, 4, (1, 12, 2, 2), dtype=torch.int32)
    tensors = micro_batch(routed_experts=experts)
    state = hook(monkeypatch, {"type": "topk_reverse_kl", "k": K}, ONE)
    state.batch_came([tensors])
    hidden = torch.randn(1, 12, D)
    found = step(state, head, hidden, tensors)
    (scorer,) = Scorer.opened
    log_q = scorer.logprobs(tensors["input_ids"][0])
    log_p = (hidden[0] @ head.weight.T).log_softmax(-1)
    support = [one.support for one in found]
    ids = torch.cat([one.token_ids for one in support])
    for row in TRAINED:
        top = log_q[row - 1].topk(K)
        assert ids[row].tolist() == top.indices.tolist()
        values = torch.cat([one.student_logprobs for one in support])[row]
        torch.testing.assert_close(values, log_p[row - 1, ids[row]])
    assert tensors["routed_experts"] is experts


def test_sampled_loss_reads_the_trainers_answers(monkeypatch):
    """log q of the tokens that train; NaN elsewhere, where the orchestrator sent NaN too."""
    state, tensors = hook(monkeypatch, {"type": "sampled_reverse_kl"}, ONE), micro_batch()
    state.batch_came([tensors])
    state.begin(tensors)
    state.micro_batch.place(torch.full((sum(LENGTHS),), -1.0).split(LENGTHS))
    inputs = fake_prime_rl.inputs_of(tensors["loss_mask"][0][:5])
    state.micro_batch.place([inputs.trainer_logprobs])
    out = state.loss(inputs)
    assert out.loss.isfinite()
    own = state.aligned(inputs.trainer_logprobs)["ref_logprobs"]
    assert own.isnan().tolist() == [1, 1, 0, 0, 0]


def long_sequences(n, tokens=40):
    """Return sequences of n rollouts, as the trainer wants them scored."""
    rollouts = []
    for seed in range(n):
        ids = torch.randint(0, V, (tokens,), generator=torch.Generator().manual_seed(seed))
        rollouts.append(
            Rollout(ids, torch.arange(tokens) > 30, torch.full((tokens,), torch.nan), "length", 0)
        )
    teacher = [Teacher(url="http://one:1", model="m", weight=1.0)]
    return [questions.Wanted(slice(0, tokens), rollout, teacher) for rollout in rollouts]


def test_trainer_asks_a_teacher_again_what_it_knows(monkeypatch):
    """With the first sequence, and every 256: its beginning, whose answer must be the same."""
    monkeypatch.setattr("prime_composer.teachers.watch.ASKED_EVERY", 6)
    known = questions.TeacherConnections(ONE, 0, hidden=True)
    sizes = [len(known.ask(long_sequences(2))()) for _ in range(4)]
    (scorer,) = Scorer.opened
    assert sizes == [2] * 4
    # Loading a head takes a request of its own, without a sequence.
    assert [len(rollouts) for rollouts in scorer.asked if rollouts] == [2, 1, 2, 2, 2, 1]
    question = scorer.asked[-1][-1]
    assert question.token_ids.tolist() == long_sequences(1)[0].rollout.token_ids.tolist()
    assert question.start == 1
    scorer.table = scorer.table.flip(0)
    for _ in range(2):
        known.ask(long_sequences(2))()
    with pytest.raises(InvalidAnswer, match="^The teacher at http://one:1 scores the .* another"):
        known.ask(long_sequences(2))()


@pytest.mark.parametrize(
    "starts,changed,asked",
    [(2, 3, [2, 1, 1, 1, 1]), (None, None, [2, 1, 1, 1, 1, 1])],
    ids=["restarted", "without the plugin"],
)
def test_trainer_asks_a_teacher_of_another_start_at_once(starts, changed, asked):
    """Before it returns its scores. Responses without the plugin name no start: each time."""
    known = questions.TeacherConnections(ONE, K, hidden=False)
    known.ask(long_sequences(2))()
    (scorer,) = Scorer.opened
    scorer.starts = starts
    for _ in range(2):
        known.ask(long_sequences(1))()
    assert [len(rollouts) for rollouts in scorer.asked] == asked
    scorer.starts, scorer.table = changed, scorer.table.flip(0)
    with pytest.raises(InvalidAnswer, match="It serves another model now"):
        known.ask(long_sequences(1))()


@pytest.mark.parametrize("loss", [{}, {"temperature": 2.0}])
def test_whole_vocabulary_says_which_temperature_it_has(monkeypatch, head, loss, capsys):
    """The loss's own, for both sides, and not that of the rollouts."""
    tensors = micro_batch()
    tensors["temperatures"] = torch.full((1, 12), 0.5)
    state = hook(monkeypatch, {**FULL, **loss}, ONE)
    hidden = torch.randn(1, 12, D)
    for _ in range(2):
        state.batch_came([tensors])
        found, _ = step(state, head, hidden, tensors)
    lines = capsys.readouterr().err.splitlines()
    assert (
        sum("compares student and teacher at the temperature of the loss" in x for x in lines) == 1
    )
    inputs = fake_prime_rl.inputs_of(tensors["loss_mask"][0][:5])
    state.batch_came([tensors])
    step(state, head, hidden, tensors)
    state.micro_batch.place([inputs.trainer_logprobs])
    own = loss.get("temperature", 1.0)
    before = tensors["input_ids"][0][1:4]
    log_p = (hidden[0, 1:4] @ head.weight.T / own).log_softmax(-1)
    (scorer,) = Scorer.opened
    log_q = (scorer.table[before] @ scorer.head.weight.T / own).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(state.loss(inputs).loss, expected, atol=1e-4, rtol=1e-4)


def wrong_states(scorer):
    right, weight = scorer.table, scorer.head.weight
    scorer.logprobs = lambda before: (right[before] @ weight.T).log_softmax(-1)
    scorer.table = right.flip(0)


def rounded(scorer):
    """The server's head has half precision, and the answer does not say so."""
    weight = scorer.head.weight
    scorer.logprobs = lambda rows: (
        (scorer.table[rows] @ weight.T).bfloat16().float().log_softmax(-1)
    )


@pytest.mark.parametrize("spoil", [wrong_states, rounded])
def test_states_that_do_not_belong_to_the_head_are_refused(monkeypatch, head, spoil):
    """Before the first loss, by the server's own log-probs."""
    state, tensors = hook(monkeypatch, FULL, ONE), micro_batch()
    original = Scorer.__init__

    def spoiled(self, *args, **options):
        original(self, *args, **options)
        spoil(self)

    monkeypatch.setattr(Scorer, "__init__", spoiled)
    state.batch_came([tensors])
    message = (
        r"^The teacher at http://one:1 gave a hidden state at position 2 of the sequence that "
        r"begins at token 0 .*Start the server anew"
    )
    with pytest.raises(ValueError, match=message):
        step(state, head, torch.randn(1, 12, D), tensors)


def test_other_vocabulary_of_a_teacher_is_refused(monkeypatch, head):
    """Padding explains a few ids."""
    monkeypatch.setattr(questions, "MOST_PADDING", 3)
    state, tensors = hook(monkeypatch, FULL, ONE), micro_batch()
    state.batch_came([tensors])
    (scorer,) = Scorer.opened
    wider = torch.cat([scorer.head.weight, scorer.head.weight[:4]])
    scorer.head = dataclasses.replace(scorer.head, weight=wider)
    state.batch_came([tensors])
    with pytest.raises(ValueError, match="output head of 35 ids and the student one of 31"):
        step(state, head, torch.randn(1, 12, D), tensors)


class NarrowScorer(Scorer):
    """A teacher whose head lacks the last ids, and that scores as every scorer does."""

    def __init__(self, served, model, **options):
        super().__init__(served, model, **options)
        self.head = dataclasses.replace(self.head, weight=self.head.weight[:NARROW])
        self.table = self.table[:NARROW]

    def score(self, rollouts, support_size, hidden=False):
        sequences = sequences_to_score(rollouts, vocab_size=NARROW)
        read = [Rollout(torch.tensor(s.token_ids), r.loss_mask, r.inference_logprobs, "length", 0)
                for s, r in zip(sequences, rollouts, strict=True)]  # fmt: skip
        return [
            dataclasses.replace(one, ref_logprobs=one.ref_logprobs.masked_fill(s.lacks, LOG_FLOOR))
            for s, one in zip(
                sequences, super().score(read, support_size, hidden=hidden), strict=True
            )
        ]


def test_sampled_padding_of_the_student_trains_on_whole_heads(monkeypatch, head):
    """Ids that the teacher lacks are one outcome with the floor of a bucket."""
    monkeypatch.setattr(questions, "ServerScorer", NarrowScorer)
    monkeypatch.setattr(questions, "CHECKED_EVERY", 1)
    state, tensors = hook(monkeypatch, FULL, ONE), micro_batch()
    tensors["input_ids"][0, [3, 6]] = V - 1
    state.batch_came([tensors])
    head.double()
    hidden = torch.randn(1, 12, D, dtype=torch.float64)
    found = step(state, head, hidden, tensors)
    masks = tensors["loss_mask"][0].split(LENGTHS)
    pairs = zip(found, masks, strict=False)
    kl = torch.cat([compare(one.hidden_states.masked(mask), reverse_kl) for one, mask in pairs])
    p = (hidden[0] @ head.weight.T).softmax(-1)
    p = torch.cat([p[:, :NARROW], p[:, NARROW:].sum(-1, True)], dim=1)
    (scorer,) = Scorer.opened
    q = scorer.logprobs(tensors["input_ids"][0].clamp(max=NARROW - 1)).double().exp()
    q = torch.cat([q, torch.full_like(q[:, :1], 1e-7)], dim=1)
    expected = (p * (p / q).log()).sum(-1)
    rows = torch.tensor(TRAINED)
    torch.testing.assert_close(kl[rows], expected[rows - 1], atol=1e-5, rtol=1e-5)
    own = torch.cat([one.ref_logprobs for one in found])
    assert own[[3, 6]].tolist() == pytest.approx([LOG_FLOOR] * 2)


@pytest.mark.parametrize("head_on", [None, "cpu"])
def test_teachers_head_is_moved_once_or_not_at_all(monkeypatch, head_on):
    """``meta`` stands for an accelerator."""
    known = questions.TeacherConnections(ONE, 0, hidden=True, head_on=head_on or "device")
    scorer = known.frozen(Teacher(url="http://one:1", model="m", weight=1.0)).scorer
    share = HiddenStates(torch.zeros(2, DT), scorer.head)
    student = Logits(*(torch.zeros(rows, D, device="meta") for rows in (2, V)))
    first, second = (known.logits(share, share.states, student) for _ in range(2))
    assert first.weight.device.type == ("cpu" if head_on == "cpu" else "meta")
    assert first.weight is second.weight


@pytest.mark.parametrize(
    "loss,at_once", [(FULL, True), ({"type": "topk_reverse_kl", "k": K}, False)]
)
def test_error_of_a_server_stops_the_step(monkeypatch, head, loss, at_once):
    """Of a missing head when the batch comes; of scores by the step that would train on them."""
    state, tensors = hook(monkeypatch, loss, ONE), micro_batch()

    def score(self, rollouts, support_size, hidden=False):
        raise ServerError("The teacher's server at http://one:1 has no scoring plugin")

    monkeypatch.setattr(Scorer, "score", score)
    with pytest.raises(ServerError, match="no scoring plugin"):
        state.batch_came([tensors])
        assert not at_once
        step(state, head, torch.randn(1, 12, D), tensors)


class Root:
    """FSDP's root: ``unshard`` gives its parameters their memory back."""

    def __init__(self, weight, owns=True):
        self.weight, self.owns, self.values = weight, owns, weight.detach().clone()

    def unshard(self):
        if self.owns:
            self.weight.untyped_storage().resize_(self.values.untyped_storage().size())
            with torch.no_grad():
                self.weight.copy_(self.values)


@pytest.mark.parametrize("owns", [True, False])
def test_freed_weight_is_gathered_again_for_the_loss(monkeypatch, head, owns):
    """FSDP has freed a head that is tied to the embeddings, which are the root's."""
    state, tensors = hook(monkeypatch, FULL, ONE), micro_batch()
    state.batch_came([tensors])
    hidden = torch.randn(1, 12, D)
    state.model = Root(head.weight, owns)
    step(state, head, hidden, tensors)
    head.weight.untyped_storage().resize_(0)
    if owns:
        head_hook.gather_head(state)
        assert torch.equal(head.weight, state.model.values)
    else:
        with pytest.raises(RuntimeError, match="has freed the output head's weight"):
            head_hook.gather_head(state)
        head.weight.untyped_storage().resize_(state.model.values.untyped_storage().size())
