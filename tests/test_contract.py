"""Properties of every loss, on the ``examples`` of its config class.

A new loss is covered without a line here. ``pytest tests/test_contract.py --loss my_loss:huber``
runs all of this on a loss outside the package.
"""

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import Tensor
from torch.nn.functional import pad

from docs.losses import summary_of
from prime_composer.contract import LossInputs, LossOutputs, Mean, Support
from prime_composer.losses import (
    LOSS_FNS,
    LOSS_TYPES,
    AnyLoss,
    LossConfig,
    loss_type,
    require_inputs,
    setup_loss_fn,
)
from tests.builders import (
    VOCAB,
    cast,
    concatenated,
    packed_inputs,
    rows,
    student_leaves,
    with_garbage,
    with_trained_head,
)

SAME_PATH = {"normalization", "k"}
"""Knobs that select another formula of the same divergence, and no other path through the code.

Whole vocabularies are another path: a loss of which they are compared needs other inputs.
"""


ROUNDINGS = {torch.float32: 32, torch.bfloat16: 8, torch.float16: 8}
"""Error of a number, in roundings of the largest one to the dtype of the inputs.

14 and 3.6 are the most that the losses of the package have. Half precision is computed in float32,
but where a loss has prime-rl's own arithmetic.
"""

COUNTED = (0, 1, 12)
"""Tokens of the mask."""


def config_id(config: LossConfig) -> str:
    knobs = {k: getattr(config, k) for k in sorted(config.model_fields_set - {"type"})}
    values = [k if isinstance(v, (dict, BaseModel)) else f"{k}={v}" for k, v in knobs.items()]
    return ",".join([config.type, *values])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases from the examples of every loss, or of those named by ``--loss``.

    ``config`` is every example, ``differentiable`` those whose gradient is the value's derivative,
    and ``representative`` leaves out those that differ in the normalization only. ``precision`` has
    the first example of a loss with every dtype and every mask, and the others with each of both
    once.
    """
    classes = [loss_type(name) for name in metafunc.config.getoption("--loss") or LOSS_TYPES]
    configs, representatives, precisions = [], [], []
    for cls in classes:
        first, paths = cls.examples[0], set()
        for knobs in [*cls.examples, *with_stops(cls)]:
            config = cls(**knobs)
            precisions += [
                (config, dtype, counted)
                for i, dtype in enumerate(ROUNDINGS)
                for j, counted in enumerate(COUNTED)
                if knobs is first or (i + j + len(configs)) % 3 == 0
            ]
            configs.append(config)
            changed = {k for k in knobs.keys() | first.keys() if knobs.get(k) != first.get(k)}
            if config.needs not in paths or not changed <= SAME_PATH:
                representatives.append(config)
                paths.add(config.needs)
    cases = {
        "config": configs,
        "representative": representatives,
        "differentiable": [config for config in configs if not config.surrogate],
    }
    for name in cases.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, cases[name], ids=config_id)
    if "precision" in metafunc.fixturenames:
        ids = [f"{config_id(config)}-{dtype}-{counted}" for config, dtype, counted in precisions]
        metafunc.parametrize("precision", precisions, ids=ids)


def with_stops(cls: type[LossConfig]) -> Iterator[dict[str, Any]]:
    """Yield an example with stops for each kind of scores that a loss reads with them.

    The ids are one outcome before anything is compared, whatever the other knobs are. A sum has
    none of its own.
    """
    seen = set()
    for knobs in cls.examples:
        with contextlib.suppress(ValidationError):
            crossed = {**knobs, "stops": {"ids": [3, 17, 5]}}
            needs = cls(**crossed).needs & {"support", "hidden_states"}
            if needs not in seen:
                seen.add(needs)
                yield crossed


def with_weights(inputs: LossInputs, weights: Tensor | None) -> LossInputs:
    return dataclasses.replace(inputs, loss_weights=weights)


def loss_and_grads(config: LossConfig, inputs: LossInputs) -> tuple[LossOutputs, list[Tensor]]:
    for leaf in student_leaves(inputs):
        leaf.grad = None
    out = setup_loss_fn(config)(inputs)
    out.loss.backward()
    return out, [
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for leaf in student_leaves(inputs)
    ]


def test_the_loss_is_in_the_graph_and_metrics_are_detached(representative):
    """All of them are finite and 0-dim, and a metric says how it is averaged."""
    out = setup_loss_fn(representative)(packed_inputs(representative))
    assert out.loss.shape == () and out.loss.requires_grad and out.loss.isfinite()
    assert out.metrics
    for name, value in out.metrics.items():
        assert value.shape == () and not value.requires_grad and value.isfinite(), name
        assert type(value) in (Tensor, Mean), name
        assert "/" in name


def test_an_empty_mask_trains_nothing(config):
    inputs = packed_inputs(config, mask=torch.zeros(12, dtype=torch.bool))
    out, grads = loss_and_grads(config, inputs)
    assert out.loss == 0
    assert all((g == 0).all() for g in grads)
    assert all(v.isfinite() for v in out.metrics.values())


def test_metrics_have_the_same_keys_on_every_call(representative):
    loss = setup_loss_fn(representative)
    full = loss(packed_inputs(representative, mask=torch.ones(12, dtype=torch.bool)))
    empty = loss(packed_inputs(representative, mask=torch.zeros(12, dtype=torch.bool)))
    assert full.metrics.keys() == empty.metrics.keys()


def test_masked_positions_change_nothing(config):
    """Loss, gradient and metrics are the same whatever the masked positions contain."""
    inputs = packed_inputs(config, mask=torch.arange(12) % 2 == 0)
    out, grads = loss_and_grads(config, inputs)
    spoiled = with_garbage(inputs, 0.0, -math.inf, math.nan, math.inf, -1e30)
    spoiled_out, spoiled_grads = loss_and_grads(config, spoiled)
    torch.testing.assert_close(spoiled_out.loss, out.loss, rtol=1e-14, atol=0)
    for a, b in zip(spoiled_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-16)
    for name in out.metrics:
        torch.testing.assert_close(
            spoiled_out.metrics[name], out.metrics[name], rtol=1e-12, atol=1e-15
        )


def test_the_loss_of_a_pack_is_the_sum_of_its_sequences(representative):
    a = packed_inputs(representative, seed=1)
    b = packed_inputs(representative, seq=20, seed=2, first_segment=100)
    (out_a, grads_a), (out_b, grads_b) = (loss_and_grads(representative, one) for one in (a, b))
    packed, grads = loss_and_grads(representative, concatenated(a, b))
    torch.testing.assert_close(packed.loss, out_a.loss + out_b.loss, rtol=1e-12, atol=1e-12)
    for grad, first, second in zip(grads, grads_a, grads_b, strict=True):
        torch.testing.assert_close(grad, torch.cat([first, second]), rtol=1e-12, atol=1e-12)


def test_gradient_reaches_the_students_logprobs_only(representative):
    inputs = packed_inputs(representative)
    _, grads = loss_and_grads(representative, inputs)
    assert any((g != 0).any() for g in grads)
    for x in (inputs.inference_logprobs, inputs.ref_logprobs, inputs.support.teacher_logprobs):
        assert x.grad is None or (x.grad == 0).all()


def test_weights_scale_the_loss(representative):
    """No weights equal weights of one, and doubled weights double the loss and the gradient."""
    inputs = packed_inputs(representative)
    one = torch.ones(12, dtype=torch.float64)
    plain, plain_grads = loss_and_grads(representative, with_weights(inputs, None))
    ones, ones_grads = loss_and_grads(representative, with_weights(inputs, one))
    twos, twos_grads = loss_and_grads(representative, with_weights(inputs, 2 * one))
    assert torch.equal(plain.loss, ones.loss)
    assert torch.equal(2 * plain.loss, twos.loss)
    for a, b, c in zip(plain_grads, ones_grads, twos_grads, strict=True):
        assert torch.equal(a, b) and torch.equal(2 * a, c)


def test_a_token_of_weight_zero_does_not_train(representative):
    """Whole sequences have weight 0, for the losses over sequences."""
    inputs = packed_inputs(representative, mask=torch.ones(12, dtype=torch.bool))
    zero = inputs.segment_ids < 2
    weights = torch.where(zero, 0.0, 1.0).double()
    _, grads = loss_and_grads(representative, with_weights(inputs, weights))
    assert all((g[zero] == 0).all() for g in grads)


def test_a_missing_need_raises_and_names_the_section(representative):
    for need in representative.needs:
        message = rf"\[recipe\.loss[^\]]*\].*{need}"
        lacking = dataclasses.replace(packed_inputs(representative), **{need: None})
        with pytest.raises(ValueError, match=message):
            setup_loss_fn(representative, "recipe.loss")(lacking)
        with pytest.raises(ValueError, match=message):
            require_inputs(
                representative, representative.needs - {need}, "call", section="recipe.loss"
            )
    require_inputs(representative, representative.needs, "call")


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill fresh memory also where ``conftest`` does not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_precision_and_mask_change_no_number(precision):
    """All numbers are those of float64 for the counted rows alone, whatever other rows contain.

    Without a counted row they are exactly 0. The heads are identities, so that the gradient of the
    head follows from that of the hidden states.
    """
    config, dtype, counted = precision
    if isinstance(getattr(config, "k", None), int):
        # A tail without any mass is below the limit of float32.
        config = config.model_copy(update={"k": min(config.k, VOCAB // 2)})
    mask = (torch.arange(12) - 7) % 12 < counted
    inputs = packed_inputs(config, dtype=dtype, mask=mask)
    kept = mask.nonzero().squeeze(1)
    alone = rows(cast(inputs, torch.float64), kept)
    out, expected = loss_and_grads(config, alone)
    expected.insert(3, expected[2].T @ alone.hidden_states.student.hidden.detach())
    expected = [
        e if i == 3 else e.new_zeros(12, *e.shape[1:]).index_copy(0, kept, e)
        for i, e in enumerate(expected)
    ]
    allowed = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    spoiled = with_garbage(with_trained_head(inputs), 0.0, -math.inf, math.nan)
    actual, grads = loss_and_grads(config, spoiled)
    assert all(value.isfinite() for value in actual.metrics.values())
    for i, (value, wanted) in enumerate(
        zip([actual.loss, *grads], [out.loss, *expected], strict=True)
    ):
        # A stop's is a share of a column of the support, whose largest one rounds it.
        column = expected[1:2] if i > 4 and config.stop_ids else []
        atol = allowed * max(float(x.detach().abs().max()) for x in [wanted, *column])
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=atol)


def test_very_improbable_tokens_stay_finite(config):
    inputs = packed_inputs(config, dtype=torch.float32, mask=torch.ones(12, dtype=torch.bool))
    support = inputs.support
    for x in (inputs.ref_logprobs, support.teacher_logprobs, support.student_logprobs):
        x.data[::2, ...] -= 60.0
    out, grads = loss_and_grads(config, inputs)
    assert out.loss.isfinite() and all(g.isfinite().all() for g in grads)
    assert all(v.isfinite() for v in out.metrics.values())


def test_the_gradient_is_the_derivative_of_the_value(differentiable):
    """Central differences along random directions of all entries at once.

    No direction is at a right angle to the error of a wrong gradient. Surrogates contain a
    stop-gradient, and have closed forms elsewhere.
    """
    config = differentiable
    inputs = packed_inputs(config, seed=3)
    _, grads = loss_and_grads(config, inputs)
    loss, generator, eps = setup_loss_fn(config), torch.Generator().manual_seed(0), 1e-6
    leaves = student_leaves(inputs)
    sizes = [leaf.numel() for leaf in leaves]
    gradient = torch.cat([grad.flatten() for grad in grads])
    with torch.no_grad():
        start = torch.cat([leaf.flatten() for leaf in leaves])
        for direction in torch.randn(3, sum(sizes), dtype=start.dtype, generator=generator):
            direction /= direction.norm()
            values = []
            for sign in (1, -1):
                moved = (start + sign * eps * direction).split(sizes)
                for leaf, entries in zip(leaves, moved, strict=True):
                    leaf.copy_(entries.view_as(leaf))
                values.append(loss(inputs).loss.item())
            difference = (values[0] - values[1]) / (2 * eps)
            assert float(gradient @ direction) == pytest.approx(difference, rel=2e-6, abs=2e-8)


def test_the_order_of_the_support_does_not_matter(representative):
    inputs = packed_inputs(representative)
    s = inputs.support
    order = torch.randperm(s.token_ids.shape[-1], generator=torch.Generator().manual_seed(0))
    shuffled = Support(
        s.token_ids[:, order], s.teacher_logprobs[:, order], s.student_logprobs[:, order]
    )
    loss = setup_loss_fn(representative)
    torch.testing.assert_close(
        loss(dataclasses.replace(inputs, support=shuffled)).loss,
        loss(inputs).loss,
        rtol=1e-12,
        atol=1e-12,
    )


def with_unknown_ids(inputs: LossInputs) -> LossInputs:
    """Return the inputs with a column more at both ends of the support, whose ids are not known.

    The first one has the sampled tokens. Their log-probs are NaN.
    """
    support = inputs.support
    ids, teacher, student = (
        pad(own.detach(), (1, 1), value=value).requires_grad_(own.requires_grad)
        for own, value in (
            (support.token_ids, 1),
            (support.teacher_logprobs, math.nan),
            (support.student_logprobs, math.nan),
        )
    )
    ids[:, 0] = inputs.token_ids
    known = torch.ones_like(ids, dtype=torch.bool)
    known[:, [0, -1]] = False
    return dataclasses.replace(inputs, support=Support(ids, teacher, student, known))


def supported(config: LossConfig) -> list[LossConfig]:
    """Return a config with each normalization that it takes, on a support of 4."""
    knobs = config.model_dump(exclude_unset=True)
    found = []
    for normalization in (None, "tail", "renorm", "generalized"):
        more = {} if normalization is None else {"normalization": normalization}
        with contextlib.suppress(ValidationError, ValueError):
            found.append(type(config)(**{**knobs, "k": 4, **more}))
    return [one for one in found if "support" in one.needs and one.support_size == 4]


def test_ids_that_are_not_known_change_nothing(representative):
    """Value, gradients and metrics are those of the support without their entries.

    The overlap is a share of the K ids, of which there are more.
    """
    for narrow in supported(representative):
        wide = type(representative)(**{**narrow.model_dump(exclude_unset=True), "k": 6})
        inputs = packed_inputs(narrow, seed=3)
        out, grads = loss_and_grads(narrow, inputs)
        wide_out, wide_grads = loss_and_grads(wide, with_unknown_ids(inputs))
        torch.testing.assert_close(wide_out.loss, out.loss, rtol=1e-12, atol=1e-14)
        for a, b in zip(wide_grads, grads, strict=True):
            if a.shape != b.shape:
                assert not a[:, [0, -1]].any()
                a = a[:, 1:-1]
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        for name in out.metrics.keys() - {name for name in out.metrics if "overlap" in name}:
            torch.testing.assert_close(wide_out.metrics[name], out.metrics[name])


def test_a_config_survives_its_dump():
    """A run's record, an export and the adapter's variable carry it as JSON."""
    for config in LOSS_TYPES.values():
        for knobs in config.examples:
            dump = config(**knobs).model_dump(mode="json", exclude_none=True)
            assert TypeAdapter(AnyLoss).validate_python(dump) == config(**knobs)


def test_advantages_with_a_gradient_are_refused():
    """Whatever the loss is."""
    config = LOSS_TYPES["default"]()
    inputs = dataclasses.replace(
        packed_inputs(config), advantages=torch.zeros(12, dtype=torch.float64, requires_grad=True)
    )
    with pytest.raises(ValueError, match="does not depend on the sampled token"):
        setup_loss_fn(config)(inputs)


def test_an_unknown_loss_type_names_the_choices():
    with pytest.raises(ValidationError) as error:
        TypeAdapter(AnyLoss).validate_python({"type": "topk_kl"})
    assert all(name in str(error.value) for name in LOSS_TYPES)
    assert "did you mean topk_reverse_kl?" in str(error.value)
    for value in ({"k": 4}, {"type": 3}, 3, "taid"):
        with pytest.raises(ValidationError, match="a loss is a table with a `type`"):
            TypeAdapter(AnyLoss).validate_python(value)


def test_every_loss_with_k_has_examples_of_both_kinds():
    """A support and whole vocabularies are other code, and this suite runs on the examples."""
    for config in LOSS_TYPES.values():
        if "k" in config.model_fields:
            needs = frozenset().union(*(config(**knobs).needs for knobs in config.examples))
            assert {"support", "hidden_states"} <= needs, config.model_fields["type"].default


def test_every_loss_is_documented_with_every_knob():
    """By its file, or within a family by its class; it is in one file with its config."""
    for config, fn in LOSS_FNS.items():
        name = config.model_fields["type"].default
        if ":" in name:  # a loss from outside, imported by another test
            continue
        assert fn.__module__ == config.__module__ and fn.__name__.endswith("_loss_fn")
        assert summary_of(config).endswith(".") and "Knobs of" not in summary_of(config), name
        fields = {key: field for key, field in config.model_fields.items() if key != "type"}
        assert all(field.description for field in fields.values()), name


def changes_with_the_sampler(config: LossConfig) -> bool:
    """Return whether value or gradient depend on the log-probs of the policy that sampled."""
    inputs = packed_inputs(config)
    moved = dataclasses.replace(inputs, inference_logprobs=inputs.inference_logprobs - 0.1)
    (out, grads), (other, others) = (loss_and_grads(config, one) for one in (inputs, moved))
    return not all(map(torch.equal, (out.loss, *grads), (other.loss, *others)))


def test_every_loss_says_how_it_takes_stale_rollouts():
    """Its docstring has a sentence, and the code does what that says."""
    for config, fn in LOSS_FNS.items():
        if ":" in config.model_fields["type"].default:
            continue
        text = " ".join(inspect.getmodule(fn).__doc__.split())
        said = re.search(r"Stale rollouts: (.*?)( References?: |$)", text)
        assert said is not None, fn
        plain = [one for knobs in config.examples if not (one := config(**knobs)).modifiers]
        own = [one for one in plain if one.rl_mix is None]
        reads = any(map(changes_with_the_sampler, own))
        if not config.is_sum():
            assert ("without an importance ratio" in said[1]) == (not reads), fn
            assert "importance ratio" in said[1], fn


def test_the_order_of_the_sequences_does_not_matter(representative):
    """Eight sequences of three tokens. Chosen and rejected responses stay adjacent."""
    config = representative
    mask = torch.rand(24, generator=torch.Generator().manual_seed(1)) > 0.2
    segments = torch.arange(8).repeat_interleave(3)
    inputs = packed_inputs(config, seq=24, seed=5, mask=mask)
    inputs = rows(inputs, torch.arange(24), segment_ids=segments)
    out, grads = loss_and_grads(config, inputs)
    index = torch.cat([torch.arange(6) + 6 * pair for pair in (2, 0, 3, 1)])
    shuffled = rows(inputs, index, segment_ids=segments)
    shuffled_out, shuffled_grads = loss_and_grads(config, shuffled)
    torch.testing.assert_close(shuffled_out.loss, out.loss, rtol=1e-11, atol=1e-12)
    for grad, expected in zip(shuffled_grads, grads, strict=True):
        torch.testing.assert_close(grad, expected[index], rtol=1e-11, atol=1e-13)
