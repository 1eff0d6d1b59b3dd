"""Student logits beside prime-rl's head: against float64, and no second dense weight gradient."""

import types

import pytest
import torch

from prime_composer.upstream import student as beside
from prime_composer.upstream import trainer, wire

N, D, V, K = 37, 16, 151, 5


class Chunked(torch.autograd.Function):
    """Stands for prime-rl's fused head: log p(label) with a hand-written backward, logits rounded to the weight's dtype."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, inv_t, cap):
        logits = (hidden @ weight.t()).float()
        scaled = (logits if cap is None else cap * torch.tanh(logits / cap)) * inv_t.unsqueeze(1)
        ctx.save_for_backward(hidden, weight, labels, inv_t)
        ctx.cap = cap
        return scaled.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels, inv_t = ctx.saved_tensors
        logits = (hidden @ weight.t()).float()
        slope = torch.ones_like(logits)
        if ctx.cap is not None:
            slope = 1 - torch.tanh(logits / ctx.cap) ** 2
            logits = ctx.cap * torch.tanh(logits / ctx.cap)
        d = -(logits * inv_t.unsqueeze(1)).softmax(-1)
        d.scatter_add_(1, labels.unsqueeze(1), torch.ones_like(d[:, :1]))
        d = (d * grad.unsqueeze(1) * inv_t.unsqueeze(1) * slope).to(weight.dtype)
        return d @ weight, d.t() @ hidden, None, None, None


class Fused(torch.nn.Linear):
    softcap = None

    def __init__(self):
        super().__init__(D, V, bias=False)

    def forward(self, hidden_states, labels=None, temperature=None):
        cap = self.softcap
        return {
            "logprobs": Chunked.apply(
                hidden_states[0], self.weight, labels[0], 1 / temperature[0], cap
            ).unsqueeze(0)
        }


class Plain(torch.nn.Linear):
    softcap = None

    def __init__(self):
        super().__init__(D, V, bias=False)

    def forward(self, hidden_states, labels=None, temperature=None):
        logits = super().forward(hidden_states)
        return {
            "logits": logits
            if self.softcap is None
            else self.softcap * torch.tanh(logits / self.softcap)
        }


@pytest.fixture
def room(monkeypatch):
    room = trainer.Room()
    room.k = K
    monkeypatch.setattr(trainer, "ROOM", room)
    return room


@pytest.fixture(params=["fused", "vanilla"])
def head(request):
    base = {"fused": Fused, "vanilla": Plain}[request.param]
    name = {"fused": "FusedOutputLinear", "vanilla": "VanillaOutputLinear"}[request.param]
    cls = type(name, (base,), {"forward": base.forward})
    module = types.ModuleType("prime_rl.trainer.models.layers.lm_head")
    cls.__module__ = module.__name__
    setattr(module, name, cls)
    trainer.hook_head(module)
    torch.manual_seed(0)
    return cls()


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
    }, top


def student(head, room, micro_batch, hidden):
    """What prime-rl's train loop does around its head, and then ours: log p at the support ids, [N, K]."""
    ids, temperature = micro_batch["input_ids"], micro_batch["temperatures"]
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)
    room.begin(micro_batch)
    out = head(hidden, labels, temperature=temperature)
    logprobs = out.get("logprobs")
    if logprobs is None:
        scaled = out["logits"].float() / temperature.unsqueeze(-1)
        logprobs = scaled.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    logprobs = torch.cat([torch.zeros(1), logprobs[0, :-1]])
    return room.bin.student + logprobs.unsqueeze(1), logprobs


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


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_a_full_log_softmax_in_float64(head, room, softcap, temperature):
    type(head).softcap = softcap
    temperatures = torch.ones(1, N)
    temperatures[0, 10:] = temperature
    micro_batch, top = batch(temperature=temperatures)
    hidden = torch.randn(1, N, D, requires_grad=True)
    mask = micro_batch["loss_mask"][0]
    weights = torch.randn(N, K)
    ours, logprobs = student(head, room, micro_batch, hidden)
    ((ours * weights)[mask].sum() + (logprobs * weights[:, 0])[mask].sum()).backward()
    theirs, labels, h, w = in_float64(head, micro_batch, top, hidden)
    ((theirs * weights)[mask].sum() + (labels * weights[:, 0])[mask].sum()).backward()
    torch.testing.assert_close(ours[mask], theirs[mask].float(), rtol=0, atol=2e-5)
    torch.testing.assert_close(hidden.grad, h.grad.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.weight.grad, w.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("elements", [1, 3 * D, 7 * D, D * K * N])
def test_walked_in_blocks_of_any_size_it_is_the_same(head, room, monkeypatch, elements):
    type(head).softcap = None
    micro_batch, top = batch()
    micro_batch["routed_experts"][0, 1::2, 0] = top[
        1
    ].int()  # ids that many rows read, on both sides of a boundary
    hidden = torch.randn(1, N, D)
    mask = micro_batch["loss_mask"][0]
    weights = torch.randn(N, K)

    def run():
        head.weight.grad, h = None, hidden.clone().requires_grad_()
        ours, _ = student(head, room, micro_batch, h)
        (ours * weights)[mask].sum().backward()
        return ours, h.grad, head.weight.grad

    at_once = run()
    monkeypatch.setattr(beside, "gathered", lambda device: elements)
    in_blocks = run()
    for one, other in zip(at_once, in_blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_in_bfloat16_the_identity_holds_to_the_rounding_of_the_logits(head, room):
    type(head).softcap = None
    head.bfloat16()
    with torch.no_grad():
        head.weight.normal_(0, 1)
    micro_batch, top = batch()
    hidden = torch.randn(1, N, D).bfloat16().requires_grad_()
    mask = micro_batch["loss_mask"][0]
    ours, _ = student(head, room, micro_batch, hidden)
    theirs, _, h, w = in_float64(head, micro_batch, top, hidden)
    # Two logits are involved, z_id and the ones in log Z, each off by at most half a unit in its last place.
    largest = (h[0] @ w.t()).abs().amax()
    unit = 2.0 ** (torch.floor(torch.log2(largest)) - 7)
    assert (ours[mask] - theirs[mask]).abs().max() <= unit
    assert (ours[mask] - theirs[mask]).abs().mean() <= unit / 4


def test_a_label_inside_the_support_has_exactly_prime_rls_own_log_prob(head, room):
    type(head).softcap = None
    head.bfloat16()
    micro_batch, top = batch()
    top = top.clone()
    top[:, 2] = micro_batch["input_ids"][0]
    micro_batch["routed_experts"][0, :, 0] = top.int()
    ours, logprobs = student(head, room, micro_batch, torch.randn(1, N, D).bfloat16())
    mask = micro_batch["loss_mask"][0]
    assert torch.equal(ours[mask, 2], logprobs[mask])


def test_in_bfloat16_the_support_is_of_the_same_rounded_policy_as_prime_rls_own_log_probs(
    head, room
):
    type(head).softcap = None
    head.bfloat16()
    with torch.no_grad():
        head.weight.normal_(0, 1)
    micro_batch, top = batch()
    hidden = torch.randn(1, N, D).bfloat16()
    ours, _ = student(head, room, micro_batch, hidden)
    rounded = (hidden[0] @ head.weight.t()).float().log_softmax(-1)
    rounded = torch.cat([torch.zeros(1, V), rounded[:-1]]).gather(1, top)
    mask = micro_batch["loss_mask"][0]
    # A dot product on the edge between two bfloat16 numbers may fall to either side: allow that for one entry in fifty.
    assert ((ours - rounded)[mask].abs() < 1e-5).float().mean() > 0.98


def test_the_weight_gets_one_dense_gradient(head, room):
    """Counts [V, D] allocations in the backward: prime-rl's head makes one; a gather under autograd would add another."""
    type(head).softcap = None
    micro_batch, _ = batch()
    ours, logprobs = student(head, room, micro_batch, torch.randn(1, N, D, requires_grad=True))

    class Dense(torch.utils._python_dispatch.TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            fresh = (
                isinstance(out, torch.Tensor)
                and tuple(out.shape) in ((V, D), (D, V))
                and not func.is_view
            )
            views = (
                "aten.view",
                "aten.t.",
                "aten.detach",
                "aten.transpose",
                "aten.index_add_",
                "aten.alias",
            )
            if fresh and not str(func).startswith(views):
                Dense.made += 1
            return out

    with Dense():
        (ours.sum() + logprobs.sum()).backward()
    assert Dense.made == 1
    assert head.weight.grad.abs().sum() > 0


def test_activation_offloading_never_sees_the_heads_weight_as_an_activation(head, room):
    """prime-rl's default offloading copies every saved tensor that is no nn.Parameter to the host."""
    type(head).softcap = None
    micro_batch, _ = batch()
    seen = []

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours, logprobs = student(head, room, micro_batch, torch.randn(1, N, D, requires_grad=True))
    assert (
        seen and (V, D) not in seen
    )  # a plain linear layer saves the transposed view with or without us
    (ours.sum() + logprobs.sum()).backward()
    assert head.weight.grad.abs().sum() > 0


def test_nothing_is_left_on_the_head_after_its_forward(head, room):
    type(head).softcap = None
    micro_batch, _ = batch()
    student(head, room, micro_batch, torch.randn(1, N, D))
    assert "weight" not in head.__dict__ and isinstance(head.weight, torch.nn.Parameter)


def test_a_fully_masked_micro_batch_costs_and_changes_nothing(head, room):
    type(head).softcap = None
    micro_batch, _ = batch()
    micro_batch["loss_mask"][:] = False
    ours, logprobs = student(head, room, micro_batch, torch.randn(1, N, D, requires_grad=True))
    assert torch.equal(ours, logprobs.unsqueeze(1).expand(-1, K))


def test_a_frozen_head_still_sends_gradients_to_the_hidden_states(head, room):
    type(head).softcap = None
    head.weight.requires_grad_(False)
    micro_batch, _ = batch()
    hidden = torch.randn(1, N, D, requires_grad=True)
    ours, _ = student(head, room, micro_batch, hidden)
    ours.sum().backward()
    assert hidden.grad.abs().sum() > 0 and head.weight.grad is None


def test_a_token_without_a_score_stops_the_run_and_one_that_the_teacher_rules_out_does_not(
    head, room
):
    type(head).softcap = None
    micro_batch, _ = batch(masked=0)
    for value in (float("-inf"), float("nan")):
        micro_batch["routed_experts"][0, 3, 1, -1] = torch.tensor(value).view(torch.int32)
        _, logprobs = student(head, room, micro_batch, torch.randn(1, N, D))
        room.bin.slices[id(logprobs)] = slice(0, N)
        inputs = types.SimpleNamespace(
            trainer_logprobs=logprobs, loss_mask=micro_batch["loss_mask"][0]
        )
        if value == float("-inf"):
            _, support = room.aligned(inputs)
            assert support.teacher_logprobs[3, -1] == value
        else:
            with pytest.raises(ValueError, match="came without a teacher score"):
                room.aligned(inputs)


def test_the_temperature_of_a_plain_head_is_the_batchs_own_not_the_one_rounded_on_its_way(
    head, room
):
    type(head).softcap = None
    micro_batch, top = batch(masked=0, temperature=torch.full((1, N), 0.7))
    hidden = torch.randn(1, N, D)
    given = head.forward

    def rounded(
        h, labels, temperature
    ):  # what FSDP's mixed precision does to the arguments of a module
        return given(h, labels, temperature=temperature.bfloat16().float())

    head.forward = rounded
    ours, _ = student(head, room, micro_batch, hidden)
    fused = "Fused" in type(head).__name__
    divided_by = torch.tensor(0.7).bfloat16().float() if fused else torch.tensor(0.7)
    z = (hidden[0] @ head.weight.t()).detach() / divided_by
    expected = z[:-1].log_softmax(-1).gather(1, top[1:])
    assert (ours[1:] - expected).abs().max() < 2e-6


def test_an_id_outside_the_vocabulary_names_both_sizes(head, room):
    micro_batch, _ = batch()
    micro_batch["routed_experts"][0, :, 0, 0] = V + 3
    with pytest.raises(
        ValueError, match=f"token id {V + 3} and the student's head has a vocabulary of {V}"
    ):
        student(head, room, micro_batch, torch.randn(1, N, D))


def test_without_a_support_the_head_is_prime_rls_own(head, room):
    micro_batch, _ = batch()
    micro_batch["routed_experts"] = None
    room.begin(micro_batch)
    labels = torch.zeros(1, N, dtype=torch.long)
    out = head(torch.randn(1, N, D), labels, temperature=torch.ones(1, N))
    assert trainer.KEY not in out


def test_a_loss_without_a_support_costs_no_tensor_work_per_micro_batch(room):
    micro_batch, _ = batch()
    room.k = 0

    class Refuse(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.is_view, func
            return func(*args, **(kwargs or {}))

    with Refuse():
        room.begin(micro_batch)
    assert room.bin.payload is None


def test_what_is_on_the_wire_comes_back_bit_by_bit():
    numpy = pytest.importorskip("numpy")
    ids = numpy.arange(12, dtype=numpy.int32).reshape(4, 3)
    logprobs = numpy.array([[-0.1, -2.5, float("nan")]] * 4, dtype=numpy.float32)
    packed = wire.pack(ids, logprobs)
    back = wire.unpack(torch.from_numpy(packed), 3)
    assert torch.equal(back.token_ids, torch.from_numpy(ids).long())
    assert torch.equal(
        back.teacher_logprobs.view(torch.int32), torch.from_numpy(logprobs.view(numpy.int32))
    )


def test_router_replay_on_the_wire_is_named():
    with pytest.raises(ValueError, match="enable_router_replay = false"):
        wire.unpack(torch.zeros(4, 12, 8, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="top-8"):
        wire.unpack(torch.zeros(4, 2, 4, dtype=torch.int32), 8)
