"""``[loss.stops]`` against vocabularies in which the ids are one token, made by plain sums."""

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from prime_composer.contract import Logits, LossInputs, StopLogprobs, Support, TwoHeads
from prime_composer.losses import LOSS_TYPES, LossConfig, setup_loss_fn
from prime_composer.losses.shared.modifiers import with_token_ids
from prime_composer.losses.shared.stops import Stops
from tests.builders import identity_heads

V, N = 12, 9
STOPS = (7, 2, 10)
KEPT = [v for v in range(V) if v not in STOPS]


def examples(k: Any) -> list[LossConfig]:
    """Return the examples that take stops, with another K: those that differ by words, once."""
    found = {}
    for cls in LOSS_TYPES.values():
        for knobs in cls.examples:
            if "k" not in cls.model_fields or {"chosen_by", "temperature"} & knobs.keys():
                continue
            own = {x: y for x, y in knobs.items() if x not in ("stops", "special_tokens", "rl_mix")}
            if own.get("normalization") == "full" and k != "full":
                continue
            # Whole heads are normalized over all ids.
            other = ("k", "normalization") if k == "full" else ("k",)
            words = {x: y for x, y in own.items() if isinstance(y, str) and x not in other}
            with contextlib.suppress(ValidationError):
                config = cls(**{**own, "k": k}, stops={"ids": STOPS})
                found.setdefault(str((cls.__name__, words)), config)
    return list(found.values())


def merged(logprobs: Tensor) -> Tensor:
    """Return log-probs over the other ids, and the sum of the stops as the last one."""
    mass = sum(logprobs[:, v].exp() for v in STOPS)
    return torch.cat([logprobs[:, KEPT], mass.log().unsqueeze(-1)], -1)


@dataclasses.dataclass
class Case:
    """Student and teacher over a vocabulary, with what was sampled."""

    logits: Tensor  # the student's, a leaf
    teacher: Tensor
    tokens: Tensor
    mu: Tensor

    @classmethod
    def random(cls, seed: int = 0) -> "Case":
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(N, V, generator=g, dtype=torch.float64).requires_grad_()
        teacher = 2 * torch.randn(N, V, generator=g, dtype=torch.float64)
        tokens = torch.randint(0, V, (N,), generator=g)
        tokens[:4] = torch.tensor([*STOPS, STOPS[0]])
        mu = logits.detach().log_softmax(-1) + 0.2 * torch.randn(N, V, generator=g).double()
        return cls(logits, teacher, tokens, mu.log_softmax(-1))

    def inputs(self, k: int | None = None, one: bool = False) -> LossInputs:
        """Return the inputs of a loss.

        Args:
            k: ids of the support; None for heads.
            one: over the vocabulary in which the stops are one token already.
        """
        log_p, log_q, tokens = (
            self.logits.log_softmax(-1),
            self.teacher.log_softmax(-1),
            self.tokens,
        )
        is_stop = torch.isin(tokens, torch.tensor(STOPS))
        at = tokens.unsqueeze(-1)
        sampler, stops = self.mu.gather(-1, at)[:, 0], None
        if one:
            # The sampler's mass of the stops is to that of the student as of the sampled id.
            scale = merged(log_p)[:, -1] - log_p.gather(-1, at)[:, 0]
            sampler = torch.where(is_stop, sampler + scale.detach(), sampler)
            index = torch.tensor([KEPT.index(v) if v in KEPT else len(KEPT) for v in range(V)])
            log_p, log_q, tokens = merged(log_p), merged(log_q), index[tokens]
            at = tokens.unsqueeze(-1)
        else:
            stops = StopLogprobs(tuple(sorted(STOPS)), log_p[:, sorted(STOPS)])
        support = heads = None
        if k is None:
            heads = identity_heads(log_p, log_q)
        else:
            ids = log_q.topk(k).indices
            support = Support(ids, log_q.gather(-1, ids), log_p.gather(-1, ids))
        return LossInputs(
            trainer_logprobs=log_p.gather(-1, at)[:, 0],
            inference_logprobs=sampler,
            ref_logprobs=log_q.gather(-1, at)[:, 0],
            advantages=torch.ones(N, dtype=torch.float64),
            loss_mask=torch.arange(N) != 5,
            support=support,
            hidden_states=heads,
            token_ids=tokens,
            stops=stops,
        )


def value_and_gradient(
    case: Case, config: LossConfig, inputs: LossInputs
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    out = setup_loss_fn(config)(inputs)
    (gradient,) = torch.autograd.grad(out.loss, case.logits)
    return out.loss, gradient, out.metrics


def name_of(config: LossConfig) -> str:
    return f"{config.type}-{getattr(config, 'normalization', '')}"


@pytest.mark.parametrize("config", examples(V), ids=name_of)
def test_stops_on_a_support_are_one_token(config: LossConfig) -> None:
    """Value and gradient for the logits are those of a vocabulary in which they are one."""
    case = Case.random()
    plain = config.model_copy(update={"stops": None, "k": len(KEPT) + 1})
    loss, gradient, _ = value_and_gradient(case, config, case.inputs(V))
    wanted, expected, _ = value_and_gradient(case, plain, case.inputs(len(KEPT) + 1, one=True))
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)  # the tail of nothing is 1e-7
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
    assert gradient[3, STOPS].all() and not gradient[5].any()  # some skip the first tokens


@pytest.mark.parametrize("config", examples("full"), ids=name_of)
def test_stops_of_whole_heads_are_one_token(config: LossConfig) -> None:
    """The same of whole vocabularies, by kernels and blocks of tokens."""
    case = Case.random(1)
    plain = config.model_copy(update={"stops": None})
    loss, gradient, _ = value_and_gradient(case, config, case.inputs())
    wanted, expected, _ = value_and_gradient(case, plain, case.inputs(one=True))
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_stops_of_padded_heads_of_two_teachers_are_one_token(temperature: float) -> None:
    """Reverse KL by a plain formula: a mixture, ids that one head has alone, a temperature."""
    g = torch.Generator().manual_seed(3)
    case = Case.random(2)
    wide = torch.randn(2, N, V + 3, generator=g, dtype=torch.float64)
    shares = torch.rand(N, 1, generator=g, dtype=torch.float64)
    weights = torch.cat([shares, 1 - shares], 1)
    heads = TwoHeads(
        Logits(case.logits, torch.eye(V, dtype=torch.float64)),
        tuple(Logits(x, torch.eye(V + 3, dtype=torch.float64)) for x in wide),
        weights,
    )
    inputs = dataclasses.replace(case.inputs(), hidden_states=heads)
    config = LOSS_TYPES["topk_reverse_kl"](
        k="full", normalization="full", temperature=temperature, stops={"ids": STOPS}
    )
    loss, gradient, _ = value_and_gradient(case, config, inputs)
    p = (case.logits / temperature).softmax(-1)
    q = sum(weights[:, i, None] * (wide[i] / temperature).softmax(-1) for i in (0, 1))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(N):
        if row != 5:
            outcomes = [[v] for v in KEPT] + [list(STOPS)]
            for ids in outcomes:
                a, b = p[row, ids].sum(), q[row, ids].sum()
                total = total + a * (a / b).log()
            beyond = q[row, V:].sum()
            total = total + 1e-7 * (1e-7 / beyond).log()
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-6)
    (expected,) = torch.autograd.grad(total, case.logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("k", [2, 4, 6])
def test_stops_that_a_teacher_lists_are_summed(k: int) -> None:
    """Without one of them in its top K, they are in the tail of both; worked by plain sums."""
    case = Case.random(4)
    config = LOSS_TYPES["topk_reverse_kl"](k=k, stops={"ids": STOPS})
    loss, gradient, metrics = value_and_gradient(case, config, case.inputs(k))
    p, q = case.logits.softmax(-1), case.teacher.softmax(-1)
    total, kinds, of_sampled = torch.zeros((), dtype=torch.float64), set(), []
    for row in range(N):
        top = q[row].topk(k).indices.tolist()
        listed = [v for v in top if v in STOPS]
        outcomes = [(p[row, v], q[row, v]) for v in top if v not in STOPS]
        if listed:
            outcomes.append((p[row, [*STOPS]].sum(), q[row, listed].sum()))
        outcomes.append((1 - sum(a for a, _ in outcomes), 1 - sum(b for _, b in outcomes)))
        if row != 5:
            total = total + sum(a * (a / b).log() for a, b in outcomes)
            kinds.add(min(len(listed), 1))
        token = int(case.tokens[row])
        if token in STOPS and row != 5:
            known = {*listed, token}
            of_sampled.append(float(q[row, sorted(known)].sum()))
    assert kinds == {0, 1} or k == 6
    torch.testing.assert_close(loss, total, rtol=1e-9, atol=1e-10)
    (expected,) = torch.autograd.grad(total, case.logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)
    assert metrics["stops/sampled"].item() == pytest.approx(len(of_sampled) / (N - 1))
    assert metrics["stops/teacher"].item() == pytest.approx(sum(of_sampled) / len(of_sampled))


def expected_gradient(config: LossConfig, k: int | None, stale: bool) -> tuple[Tensor, Tensor]:
    """Return E_{y ~ mu} of a loss's gradient per row, and that of the KL over the outcomes."""
    case = Case.random(6)
    mu = case.mu if stale else case.logits.detach().log_softmax(-1)
    total = torch.zeros(N, V, dtype=torch.float64)
    for token in range(V):
        case.tokens, case.mu = torch.full((N,), token), mu
        inputs = dataclasses.replace(case.inputs(k), loss_weights=mu[:, token].exp())
        total += value_and_gradient(case, config, inputs)[1]
    p, q = merged(case.logits.log_softmax(-1)), merged(case.teacher.log_softmax(-1))
    kl = (p.exp() * (p - q)).sum(-1)[torch.arange(N) != 5].sum()
    return total, torch.autograd.grad(kl, case.logits)[0]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("k", [V, None])
def test_sampled_stops_have_the_gradient_of_the_kl(k: int | None, stale: bool) -> None:
    """Over all tokens that may be sampled, by their probability: each stop counts once."""
    config = LOSS_TYPES["sampled_reverse_kl"](
        mode="signed", delta_low=9, delta_high=9, kl_tau=0, k=k or "full", stops={"ids": STOPS}
    )
    total, expected = expected_gradient(config, k, stale)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-11)


def test_tempered_stops_are_weighted_as_they_are_sampled() -> None:
    """Sampled at T and compared at 1: E of the gradient is sum_c P_T A grad log P_T, A at 1."""
    case, temperature, total = Case.random(8), 1.5, torch.zeros(N, V, dtype=torch.float64)
    config = LOSS_TYPES["sampled_reverse_kl"](
        mode="signed", delta_low=9, delta_high=9, kl_tau=0, k=V, stops={"ids": STOPS}
    )
    case.mu = (case.logits.detach() / temperature).log_softmax(-1)
    for token in range(V):
        case.tokens = torch.full((N,), token)
        inputs, tempered = case.inputs(V), (case.logits / temperature).log_softmax(-1)
        inputs = dataclasses.replace(
            inputs,
            trainer_logprobs=tempered[:, token],
            untempered_logprobs=inputs.trainer_logprobs,
            stops=inputs.stops._replace(tempered=tempered[:, sorted(STOPS)]),
            loss_weights=case.mu[:, token].exp(),
        )
        total += value_and_gradient(case, config, inputs)[1]
    advantage = merged(case.teacher.log_softmax(-1)) - merged(case.logits.log_softmax(-1))
    p = merged((case.logits / temperature).log_softmax(-1)).exp()
    objective = -(p * advantage.detach()).sum(-1)[torch.arange(N) != 5].sum()
    (expected,) = torch.autograd.grad(objective, case.logits)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-11)


def test_head_and_tail_with_stops_is_unbiased() -> None:
    """Rows whose teacher lists all stops, or a single one, have the KL's gradient."""
    config = LOSS_TYPES["head_tail_reverse_kl"](k=7, stops={"ids": STOPS})
    total, expected = expected_gradient(config, 7, stale=True)
    top = Case.random(6).teacher.topk(7).indices
    whole = torch.tensor([set(STOPS) <= set(row.tolist()) for row in top])
    assert whole.any()
    torch.testing.assert_close(total[whole], expected[whole], rtol=1e-9, atol=1e-11)


def test_stops_in_any_order_are_the_same() -> None:
    """And so are they twice, with metrics, beside the mask of another special token."""
    case = Case.random(7)
    knobs = {"k": 5, "special_tokens": {"ids": [4]}, "position_weights": {}}
    results = [
        value_and_gradient(
            case, LOSS_TYPES["topk_reverse_kl"](**knobs, stops=stops), case.inputs(5)
        )
        for stops in ({"ids": STOPS}, {"ids": STOPS[::-1]}, {"ids": [*STOPS, *STOPS]})
    ]
    for loss, gradient, metrics in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(metrics, results[0][2])


def test_teacher_that_ends_otherwise_does_not_teach_not_to_end() -> None:
    """Both end with .9 by other tokens. Without stops the student's end is pushed down."""
    p = torch.tensor([[0.9, 1e-9, 0.1]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[1e-9, 0.9, 0.1]], dtype=torch.float64).log()
    pushes = {}
    for stops in (None, {"ids": [0, 1]}):
        log_p = p.log_softmax(-1)
        inputs = LossInputs(
            trainer_logprobs=log_p[:, 0],
            inference_logprobs=log_p.detach()[:, 0],
            ref_logprobs=q[:, 0],
            advantages=None,
            loss_mask=torch.ones(1, dtype=torch.bool),
            support=Support(torch.tensor([[1, 2]]), q[:, 1:], log_p[:, 1:]),
            token_ids=torch.zeros(1, dtype=torch.long),
            stops=StopLogprobs((0, 1), log_p[:, :2]),
        )
        config = LOSS_TYPES["sampled_reverse_kl"](k=2, stops=stops)
        pushes[stops is None] = float(
            torch.autograd.grad(setup_loss_fn(config)(inputs).loss, p)[0][0, 0]
        )
    assert pushes[True] == pytest.approx(math.log(0.9e9) * 0.1, rel=1e-3)
    assert pushes[False] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("name", ["sft", "default", "ipo", "icepop", "compose"])
def test_loss_without_a_teachers_top_k_refuses_stops(name: str) -> None:
    """The message names the key, and for a sum the tables of its terms."""
    with pytest.raises(ValidationError, match="stops: type = ") as error:
        LOSS_TYPES[name](stops={"ids": [1]})
    assert ("tables of its terms" in str(error.value)) == (name == "compose")


def test_tempered_stops_on_a_top_k_are_refused() -> None:
    with pytest.raises(ValidationError, match="temperature = 2.0 .* stops .* set k = 'full'"):
        LOSS_TYPES["topk_reverse_kl"](temperature=2, normalization="renorm", stops={"ids": [1]})


def test_stops_without_a_token_or_without_ids_are_refused() -> None:
    with pytest.raises(ValidationError, match="stops names no token"):
        LOSS_TYPES["topk_reverse_kl"](stops={})
    unresolved = LOSS_TYPES["topk_reverse_kl"](k=V, stops={"ids": [2], "texts": ["<end>"]})
    with pytest.raises(ValueError, match=r"stops\.texts are not resolved"):
        setup_loss_fn(unresolved)(Case.random().inputs(V))
    beyond = Case.random().inputs()
    beyond.stops = StopLogprobs((V,), beyond.stops.logprobs[:, :1])
    config = LOSS_TYPES["topk_reverse_kl"](k="full", stops={"ids": [V]})
    with pytest.raises(ValueError, match=rf"stops\.ids has {V}"):
        setup_loss_fn(config)(beyond)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return {"<end>": [7], "<im_end>": [3]}[text]


def test_texts_of_stops_become_ids_in_nested_losses() -> None:
    """Of channels and of the loss beside rewards; the ids of all are those to compute."""
    table = {"type": "topk_reverse_kl", "stops": {"ids": [3], "texts": ["<end>", "<im_end>"]}}
    nested = LOSS_TYPES["compose"](distillation={"a": {"weight": 1, "loss": table}})
    nested = with_token_ids(nested, Tokenizer())
    assert nested.distillation["a"].loss.stops == Stops(ids=(3, 7))
    assert nested.stop_ids == (3, 7) and {"stops", "token_ids"} <= nested.needs
    mixed = with_token_ids(LOSS_TYPES["topk_reverse_kl"](**table, rl_mix={"kd": 0.5}), Tokenizer())
    assert mixed.stop_ids == (3, 7)
