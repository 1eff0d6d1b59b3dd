"""Student logits beside prime-rl's head: against float64, with one dense weight gradient."""

import types

import pytest
import torch

from prime_composer.contract import SIGN_BIT, Scores
from prime_composer.divergences import reverse_kl
from prime_composer.scoring.shared_vocabulary import MOST_PADDING
from prime_composer.upstream import wire
from prime_composer.upstream.trainer import logits
from prime_composer.upstream.trainer.adapter import trainer_adapter
from tests.upstream import fake_prime_rl
from tests.upstream.fake_prime_rl import PlainHead

N, D, V, K = 37, 16, 151, 5


class Fused(PlainHead):
    """Stands in for prime-rl's fused head, which returns log p of the labels."""

    def forward(self, hidden_states, labels=None, temperature=None):
        z = super().forward(hidden_states)["logits"].float() / temperature.unsqueeze(-1)
        return {"logprobs": z.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)}


@pytest.fixture
def state(monkeypatch):
    """The adapter of this process, as a registered loss with a support of K leaves it."""
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    trainer_adapter.cache_clear()
    trainer_adapter().k = K
    yield trainer_adapter()
    trainer_adapter.cache_clear()


@pytest.fixture(params=[(Fused, "FusedOutputLinear"), (PlainHead, "VanillaOutputLinear")])
def head(request):
    """A head without a softcap, unless a test gives its class one."""
    cls = fake_prime_rl.head_module(*request.param)
    torch.manual_seed(0)
    return cls(D, V, bias=False)


def batch(masked=0.3, temperature=None):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (1, N), generator=generator)
    top = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(N)])
    log_q = torch.randn(N, K, generator=generator).log_softmax(-1) - 0.1
    mask = torch.rand(1, N, generator=generator) > masked
    mask[0, 0] = False
    temperatures = torch.ones(1, N) if temperature is None else temperature
    packed = torch.stack([top.int(), log_q.view(torch.int32)], dim=1)[None]
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "temperatures": temperatures,
        "routed_experts": packed,
        "env_names": ["sums"] * N,
    }, top


def student(head, state, micro_batch, hidden):
    """Do what prime-rl's train loop does around its head; return log p of the support."""
    ids, temperature = micro_batch["input_ids"], micro_batch["temperatures"]
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    state.begin(micro_batch)
    out = head(hidden, labels, temperature=temperature)
    logprobs = out.get("logprobs")
    if logprobs is None:
        scaled = out["logits"].float() / temperature.unsqueeze(-1)
        logprobs = scaled.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    logprobs = torch.cat([torch.zeros(1), logprobs[0, :-1]])
    return state.micro_batch.student + logprobs.unsqueeze(1), logprobs


def in_float64(head, micro_batch, top, hidden):
    h, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    z = h[0] @ w.t()
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    table = (z / micro_batch["temperatures"][0].unsqueeze(1).double()).log_softmax(-1)
    table = torch.cat([torch.zeros(1, V, dtype=torch.float64), table[:-1]])
    return (
        table.gather(1, top),
        table.gather(1, micro_batch["input_ids"][0].unsqueeze(1)).squeeze(1),
        h,
        w,
    )


def check(ours, theirs, *inputs):
    """Compare values with those of float64, and the gradients of each input."""
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=2e-5)
    for one, other in inputs:
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_support_logits_equal_a_full_log_softmax_in_float64(head, state, softcap, temperature):
    """Values, and gradients of hidden states and weight."""
    type(head).softcap = softcap
    temperatures = torch.ones(1, N)
    temperatures[0, 10:] = temperature
    micro_batch, top = batch(temperature=temperatures)
    hidden = torch.randn(1, N, D, requires_grad=True)
    mask = micro_batch["loss_mask"][0]
    weights = torch.randn(N, K)
    ours, logprobs = student(head, state, micro_batch, hidden)
    ((ours * weights)[mask].sum() + (logprobs * weights[:, 0])[mask].sum()).backward()
    theirs, labels, h, w = in_float64(head, micro_batch, top, hidden)
    ((theirs * weights)[mask].sum() + (labels * weights[:, 0])[mask].sum()).backward()
    check(ours[mask], theirs[mask], (hidden, h), (head.weight, w))


STOPS = (3, 9)


def stopping(state, stops=STOPS, distils=True):
    """Let the adapter have a registered loss, with stops."""
    objective = types.SimpleNamespace(config=types.SimpleNamespace(stop_ids=stops))
    state.loss = types.SimpleNamespace(objective=objective, compares=True, distils=distils)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_stops_are_beside_the_support_in_float64(head, state, softcap):
    """The student's log-probs of them, with the gradient; one may be the label or listed."""
    type(head).softcap = softcap
    stopping(state)
    micro_batch, top = batch()
    micro_batch["input_ids"][0, 5:9] = STOPS[0]
    hidden = torch.randn(1, N, D, requires_grad=True)
    mask, weights = micro_batch["loss_mask"][0], torch.randn(N, K + len(STOPS))
    _, logprobs = student(head, state, micro_batch, hidden)
    state.micro_batch.place([logprobs])
    fields = state.aligned(logprobs)
    support, stops = fields["support"], fields["stops"]
    assert stops.token_ids == STOPS and torch.equal(support.token_ids, top.long())
    ours = torch.cat([support.student_logprobs, stops.logprobs], 1)
    (ours * weights)[mask].sum().backward()
    wide = torch.cat([top.long(), torch.tensor(STOPS).expand(N, -1)], 1)
    theirs, _, h, w = in_float64(head, micro_batch, wide, hidden)
    (theirs * weights)[mask].sum().backward()
    check(ours[mask], theirs[mask], (hidden, h), (head.weight, w))


def test_stop_beyond_the_head_names_the_key(head, state):
    """The message has both numbers."""
    stopping(state, (V,))
    with pytest.raises(ValueError, match=rf"stops\.ids has {V}, .* {V} entries"):
        student(head, state, batch()[0], torch.randn(1, N, D))


@pytest.mark.parametrize("elements", [1, 7 * D])
def test_support_logits_do_not_depend_on_the_block_size(head, state, monkeypatch, elements):
    micro_batch, top = batch()
    # Ids that many rows read, on both sides of a boundary.
    micro_batch["routed_experts"][0, 1::2, 0] = top[1].int()
    hidden = torch.randn(1, N, D)
    mask = micro_batch["loss_mask"][0]
    weights = torch.randn(N, K)

    def run():
        head.weight.grad, h = None, hidden.clone().requires_grad_()
        ours, _ = student(head, state, micro_batch, h)
        (ours * weights)[mask].sum().backward()
        return ours, h.grad, head.weight.grad

    at_once = run()
    monkeypatch.setattr(logits, "gathered", lambda device: elements)
    in_blocks = run()
    for one, other in zip(at_once, in_blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_support_is_of_the_same_rounded_policy_as_the_label(head, state):
    """prime-rl's head rounds logits to bfloat16; the support's are rounded likewise.

    The label has exactly prime-rl's log-prob where it is in the support.
    """
    head.bfloat16()
    with torch.no_grad():
        head.weight.normal_(0, 1)
    micro_batch, top = batch()
    top[:, 2] = micro_batch["input_ids"][0]
    micro_batch["routed_experts"][0, :, 0] = top.int()
    hidden = torch.randn(1, N, D).bfloat16()
    ours, logprobs = student(head, state, micro_batch, hidden)
    rounded = (hidden[0] @ head.weight.t()).float().log_softmax(-1)
    rounded = torch.cat([torch.zeros(1, V), rounded[:-1]]).gather(1, top)
    mask = micro_batch["loss_mask"][0]
    assert torch.equal(ours[mask, 2], logprobs[mask])
    # A dot product on the edge between two bfloat16 numbers may fall to either side: allow that for
    # one entry in fifty, by a unit in the last place of the largest logit.
    unit = 2.0 ** (torch.floor(torch.log2((hidden[0] @ head.weight.t()).abs().amax())) - 7)
    apart = (ours - rounded)[mask].abs()
    assert (apart < 1e-5).float().mean() > 0.98 and apart.max() <= unit


def test_backward_allocates_one_dense_weight_gradient(head, state):
    """prime-rl's head makes one [V, D] tensor; a gather under autograd would add another."""
    micro_batch, _ = batch()
    ours, logprobs = student(head, state, micro_batch, torch.randn(1, N, D, requires_grad=True))

    class Dense(torch.utils._python_dispatch.TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            dense = isinstance(out, torch.Tensor) and tuple(out.shape) in ((V, D), (D, V))
            views = "view", "t.", "detach", "transpose", "index_add_", "alias"
            is_view = func.is_view or str(func).startswith(tuple(f"aten.{v}" for v in views))
            Dense.made += dense and not is_view
            return out

    with Dense():
        (ours.sum() + logprobs.sum()).backward()
    assert Dense.made == 1
    assert head.weight.grad.abs().sum() > 0


def test_head_weight_is_never_saved_as_an_activation(head, state):
    """prime-rl's offloading copies every saved tensor that is no nn.Parameter to the host."""
    micro_batch, _ = batch()
    seen = []

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours, logprobs = student(head, state, micro_batch, torch.randn(1, N, D, requires_grad=True))
    # A plain linear layer saves the transposed view with or without us.
    assert seen and (V, D) not in seen
    assert "weight" not in head.__dict__ and isinstance(head.weight, torch.nn.Parameter)
    (ours.sum() + logprobs.sum()).backward()
    assert head.weight.grad.abs().sum() > 0


def test_fully_masked_micro_batch_changes_nothing(head, state):
    micro_batch, _ = batch()
    micro_batch["loss_mask"][:] = False
    ours, logprobs = student(head, state, micro_batch, torch.randn(1, N, D, requires_grad=True))
    assert torch.equal(ours, logprobs.unsqueeze(1).expand(-1, K))


def test_frozen_head_sends_gradients_to_the_hidden_states(head, state):
    head.weight.requires_grad_(False)
    micro_batch, _ = batch()
    hidden = torch.randn(1, N, D, requires_grad=True)
    ours, _ = student(head, state, micro_batch, hidden)
    ours.sum().backward()
    assert hidden.grad.abs().sum() > 0 and head.weight.grad is None


ONES = torch.ones(1, N)
BUT_3, BUT_4 = (ONES.scatter(1, torch.tensor([[row]]), 0) for row in (3, 4))
UNSCORED = {
    "in a distillation's tokens": (True, {"ref_kl_weights": BUT_4}, True),
    "in another loss's": (True, {"ref_kl_weights": BUT_3}, False),
    "without a distillation": (True, {"ref_kl_weights": None}, False),
    "in rl tokens": (False, {"rl_weights": None}, True),
    "in others than rl's": (False, {"rl_weights": BUT_3}, False),
    "in masked tokens": (False, {"rl_weights": None, "loss_mask": BUT_3.bool()}, False),
    "in masked rl tokens": (False, {"rl_weights": ONES, "loss_mask": BUT_3.bool()}, False),
}
"""Token 3 has no score. Whether the loss has distillation tokens, the batch, whether it lacks one.

A loss of rewards and a teacher has none: rl weights say what it gets.
"""


@pytest.mark.parametrize("name", UNSCORED)
def test_unscored_token_is_an_error_in_the_losss_own_tokens(state, name):
    """A bin may hold tokens of another loss."""
    distils, fields, lacks = UNSCORED[name]
    if not distils:
        stopping(state, (), distils=False)
    micro_batch, _ = batch(masked=0)
    micro_batch["routed_experts"][0, 3, 0] |= SIGN_BIT
    micro_batch["loss_mask"][0, 0] = True
    state.begin({**micro_batch, "ref_kl_weights": None, **fields})
    assert state.micro_batch.lacks_scores is lacks


def test_unscored_token_is_refused_and_an_impossible_one_is_not(head, state):
    """A token without a score has no id that is known, -inf is an id that the teacher rules out."""
    micro_batch, _ = batch(masked=0)
    ids, bits = micro_batch["routed_experts"][0, 3]
    bits[-1] = torch.tensor(float("-inf")).view(torch.int32)
    ids[0] |= SIGN_BIT
    _, logprobs = student(head, state, micro_batch, torch.randn(1, N, D))
    state.micro_batch.place([logprobs])
    support = state.aligned(logprobs)["support"]
    assert support.teacher_logprobs[3, -1] == float("-inf")
    assert support.known[3].tolist() == [False] + [True] * (K - 1)
    ids |= SIGN_BIT
    _, logprobs = student(head, state, micro_batch, torch.randn(1, N, D))
    state.micro_batch.place([logprobs])
    with pytest.raises(ValueError, match="came without a teacher score"):
        state.aligned(logprobs)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("value", [float("nan"), 0.3, -0.05])
def test_support_that_is_no_distribution_is_not_trained(head, state, value, trained):
    """NaN, above 0, or with a mass above 1, in a trained row; other rows are not read."""
    micro_batch, _ = batch(masked=0)
    micro_batch["loss_mask"][0, 3] = trained
    micro_batch["routed_experts"][0, 3, 1, 0] = torch.tensor(-0.1).view(torch.int32)
    micro_batch["routed_experts"][0, 3, 1, -1] = torch.tensor(value).view(torch.int32)
    if not trained:
        student(head, state, micro_batch, torch.randn(1, N, D))
        return
    with pytest.raises(ValueError, match=r"top-K of this batch are no log-probs .* not trained"):
        student(head, state, micro_batch, torch.randn(1, N, D))


def test_plain_head_divides_by_the_batchs_own_temperature(head, state):
    """FSDP rounds the temperature on its way into the module; the trainer divides by its own."""
    micro_batch, top = batch(masked=0, temperature=torch.full((1, N), 0.7))
    hidden = torch.randn(1, N, D)
    given = head.forward

    def rounded(
        h, labels, temperature
    ):  # what FSDP's mixed precision does to the arguments of a module
        return given(h, labels, temperature=temperature.bfloat16().float())

    head.forward = rounded
    ours, _ = student(head, state, micro_batch, hidden)
    fused = "Fused" in type(head).__name__
    divided_by = torch.tensor(0.7).bfloat16().float() if fused else torch.tensor(0.7)
    z = (hidden[0] @ head.weight.t()).detach() / divided_by
    expected = z[:-1].log_softmax(-1).gather(1, top[1:])
    assert (ours[1:] - expected).abs().max() < 2e-6


def test_ids_beyond_the_head_are_in_the_tail(head, state):
    """A wider teacher's padding: value and gradients are those of the other ids and the tail."""
    micro_batch, top = batch(masked=0.3)
    beyond = torch.zeros(N, K, dtype=torch.bool)
    beyond[::2, 1], beyond[5, :], beyond[7, 0] = True, True, True
    ids = torch.where(beyond, V + torch.arange(K), top)
    micro_batch["routed_experts"][0, :, 0] = ids
    log_q = micro_batch["routed_experts"][0, :, 1].view(torch.float32).double()
    hidden = torch.randn(1, N, D, requires_grad=True)
    _, logprobs = student(head, state, micro_batch, hidden)
    state.micro_batch.place([logprobs])
    support = state.aligned(logprobs)["support"]
    assert torch.equal(support.token_ids, ids)
    mask = micro_batch["loss_mask"][0]
    support = support.masked(mask)
    ours = reverse_kl(support.student_logprobs, support.teacher_logprobs, normalization="tail")
    ours[mask].sum().backward()

    log_p, _, h, w = in_float64(head, micro_batch, top, hidden)
    p, q = (torch.where(beyond, 0.0, x.exp()) for x in (log_p, log_q))
    p, q = (torch.cat([x, 1 - x.sum(-1, True)], dim=1) for x in (p, q))
    terms = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - q.clamp(min=1e-30).log()), 0.0)
    theirs = terms.sum(-1)
    theirs[mask].sum().backward()
    check(ours[mask], theirs[mask], (hidden, h), (head.weight, w))


def test_id_outside_the_vocabulary_names_both_sizes(head, state):
    micro_batch, _ = batch()
    token = micro_batch["routed_experts"][0, :, 0, 0] = V + MOST_PADDING
    words = f"token id {token} and the student's head has a vocabulary of {V}"
    with pytest.raises(ValueError, match=words):
        student(head, state, micro_batch, torch.randn(1, N, D))


def test_wire_returns_every_bit():
    """Also which ids are known, and in rows that prime-rl has cut and joined."""
    pytest.importorskip("numpy")
    logprobs = torch.tensor([[-0.1, -2.5, float("nan")]] * 4)
    known = torch.tensor([True, False, True]).expand(4, -1)
    scores = Scores(torch.zeros(4), torch.arange(12).view(4, 3), logprobs, known=known)
    packed = torch.from_numpy(wire.pack(scores).copy())
    back = wire.unpack(torch.cat([packed[:1], packed[1:]]), 3)
    assert torch.equal(back.token_ids, scores.token_ids) and torch.equal(back.known, known)
    bits = back.teacher_logprobs.view(torch.int32)
    assert torch.equal(bits, logprobs.view(torch.int32))
    again = Scores.of_bytes(scores.rows(slice(2, 4)).to_bytes(), torch.zeros(2), start=2)
    assert again.token_ids.tolist() == [[6, 7, 8], [9, 10, 11]] and again.start == 2
    assert wire.unpack(packed[:, :, ::2].contiguous(), 2).known is None


def test_wire_refuses_router_replay():
    with pytest.raises(ValueError, match="enable_router_replay = false"):
        wire.unpack(torch.zeros(4, 12, 8, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="top-8"):
        wire.unpack(torch.zeros(4, 2, 4, dtype=torch.int32), 8)


@pytest.mark.parametrize("labels,temperature", [(False, True), (True, False)])
def test_head_without_labels_or_temperatures_is_left_alone(state, labels, temperature):
    """Without temperatures prime-rl's later heads return a sum of cross-entropies."""
    head, micro_batch = fake_prime_rl.head_module()(D, V, bias=False), batch()[0]
    state.begin(micro_batch)
    given = (
        micro_batch["input_ids"] if labels else None,
        torch.ones(1, N) if temperature else None,
    )
    out = head(torch.randn(1, N, D), *given)
    assert set(out) == {"logits"} and state.micro_batch.student is None


def test_batch_without_a_support_names_the_switch(head, state):
    """Of an orchestrator that keeps the scores alone, or runs without the adapter."""
    micro_batch, _ = batch()
    micro_batch["routed_experts"] = None
    state.begin(micro_batch)
    logprobs = torch.zeros(N)
    state.micro_batch.place([logprobs])
    with pytest.raises(ValueError, match=f"top-{K} was expected.*Set PRIME_COMPOSER for every"):
        state.aligned(logprobs)
