"""What every loss of the table keeps, parametrised over ``LOSS_FNS``: a new loss is covered without a line here."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_FNS, LOSS_TYPES, AnyLoss, require, setup_loss_fn

VOCAB = 40

CONFIGS = [cls(**knobs) for cls in LOSS_TYPES.values() for knobs in cls.examples]


def config_id(config) -> str:
    knobs = {k: getattr(config, k) for k in sorted(config.model_fields_set - {"type"})}
    return ",".join(
        [
            config.type,
            *(k if isinstance(v, (dict, BaseModel)) else f"{k}={v}" for k, v in knobs.items()),
        ]
    )


each_config = pytest.mark.parametrize("config", CONFIGS, ids=config_id)


def make_inputs(
    config, seq=12, seed=0, dtype=torch.float64, first_segment=0, mask=None
) -> LossInputs:
    """Four segments of a pack; every tensor is a leaf that asks for a gradient where it may."""
    g = torch.Generator().manual_seed(seed)
    k = config.support_size
    k = min(VOCAB, k or 4) if k != "full" else VOCAB
    student = torch.randn(seq, VOCAB, generator=g, dtype=torch.float64)
    teacher = 1.5 * torch.randn(seq, VOCAB, generator=g, dtype=torch.float64) + 0.5 * student
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = log_q.topk(k).indices
    tokens = torch.randint(0, VOCAB, (seq,), generator=g)
    sampled = tokens.unsqueeze(-1)
    leaf = lambda x: x.detach().to(dtype).clone().requires_grad_()  # noqa: E731
    return LossInputs(
        trainer_logprobs=leaf(log_p.gather(-1, sampled).squeeze(-1)),
        inference_logprobs=leaf(
            (
                log_p.gather(-1, sampled).squeeze(-1)
                + 0.3 * torch.randn(seq, generator=g, dtype=torch.float64)
            ).clamp(max=0)
        ),
        ref_logprobs=leaf(log_q.gather(-1, sampled).squeeze(-1)),
        advantages=torch.randn(seq, generator=g, dtype=torch.float64).to(dtype),
        loss_mask=torch.rand(seq, generator=g) > 0.25 if mask is None else mask,
        loss_weights=leaf(torch.rand(seq, generator=g, dtype=torch.float64) + 0.5),
        support=Support(ids, leaf(log_q.gather(-1, ids)), leaf(log_p.gather(-1, ids))),
        token_ids=tokens,
        segment_ids=first_segment + torch.arange(seq) * 4 // seq,
        replay=make_inputs(LOSS_TYPES["dpo"](), seq, seed + 50, dtype, first_segment, mask)
        if "replay" in config.needs
        else None,
    )


def student_leaves(inputs: LossInputs) -> list[torch.Tensor]:
    own = [inputs.trainer_logprobs, inputs.support.student_logprobs]
    return own + (student_leaves(inputs.replay) if inputs.replay else [])


def with_weights(inputs: LossInputs, weights: torch.Tensor | None) -> LossInputs:
    replay = inputs.replay and dataclasses.replace(inputs.replay, loss_weights=weights)
    return dataclasses.replace(inputs, loss_weights=weights, replay=replay)


def loss_and_grads(config, inputs: LossInputs):
    for x in student_leaves(inputs):
        x.grad = None
    out = setup_loss_fn(config)(inputs)
    out.loss.backward()
    return out, [
        torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in student_leaves(inputs)
    ]


@each_config
def test_the_loss_is_a_sum_in_the_graph_and_the_metrics_are_detached_scalars(config):
    out = setup_loss_fn(config)(make_inputs(config))
    assert out.loss.shape == () and out.loss.requires_grad and out.loss.isfinite()
    assert out.metrics
    for name, value in out.metrics.items():
        assert value.shape == () and not value.requires_grad and value.isfinite(), name
        assert "/" in name


@each_config
def test_an_empty_mask_trains_nothing_and_backward_works(config):
    inputs = make_inputs(config, mask=torch.zeros(12, dtype=torch.bool))
    out, grads = loss_and_grads(config, inputs)
    assert out.loss == 0
    assert all((g == 0).all() for g in grads)
    assert all(v.isfinite() for v in out.metrics.values())


@each_config
def test_metrics_have_the_same_keys_on_every_call(config):
    full = setup_loss_fn(config)(make_inputs(config, mask=torch.ones(12, dtype=torch.bool)))
    empty = setup_loss_fn(config)(make_inputs(config, mask=torch.zeros(12, dtype=torch.bool)))
    assert full.metrics.keys() == empty.metrics.keys()


def soil(inputs: LossInputs, garbage: float) -> LossInputs:
    off = ~inputs.loss_mask

    def dirty(x):
        return (
            x.detach()
            .masked_fill(off if x.dim() == 1 else off.unsqueeze(-1), garbage)
            .requires_grad_(x.requires_grad)
        )

    return dataclasses.replace(
        inputs,
        trainer_logprobs=dirty(inputs.trainer_logprobs),
        inference_logprobs=dirty(inputs.inference_logprobs),
        ref_logprobs=dirty(inputs.ref_logprobs),
        advantages=dirty(inputs.advantages),
        loss_weights=dirty(inputs.loss_weights),
        token_ids=inputs.token_ids.masked_fill(off, 1),
        support=Support(
            inputs.support.token_ids.masked_fill(off.unsqueeze(-1), -1),
            dirty(inputs.support.teacher_logprobs),
            dirty(inputs.support.student_logprobs),
        ),
        replay=inputs.replay and soil(inputs.replay, garbage),
    )


@each_config
@pytest.mark.parametrize("garbage", [0.0, float("-inf"), float("nan"), float("inf"), -1e30])
def test_what_stands_at_masked_positions_changes_neither_loss_nor_gradient(config, garbage):
    inputs = make_inputs(config)
    out, grads = loss_and_grads(config, inputs)
    assert (~inputs.loss_mask).any()
    soiled = soil(inputs, garbage)
    soiled_out, soiled_grads = loss_and_grads(config, soiled)
    torch.testing.assert_close(soiled_out.loss, out.loss, rtol=1e-14, atol=0)
    for a, b in zip(soiled_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-16)
    for name in out.metrics:
        torch.testing.assert_close(
            soiled_out.metrics[name], out.metrics[name], rtol=1e-12, atol=1e-15
        )


def concatenated(a: LossInputs, b: LossInputs) -> LossInputs:
    def cat(name):
        return torch.cat([getattr(a, name).detach(), getattr(b, name).detach()]).requires_grad_(
            getattr(a, name).requires_grad
        )

    names = [
        f.name
        for f in dataclasses.fields(LossInputs)
        if isinstance(getattr(a, f.name), torch.Tensor)
    ]
    support = Support(
        *(
            torch.cat([getattr(s.support, f.name).detach() for s in (a, b)])
            for f in dataclasses.fields(Support)
        )
    )
    support.student_logprobs.requires_grad_()
    replay = a.replay and concatenated(a.replay, b.replay)
    return LossInputs(**{name: cat(name) for name in names}, support=support, replay=replay)


@each_config
def test_the_loss_of_a_pack_is_the_sum_of_its_sequences(config):
    a, b = make_inputs(config, seed=1), make_inputs(config, seq=20, seed=2, first_segment=100)
    (out_a, grads_a), (out_b, grads_b) = loss_and_grads(config, a), loss_and_grads(config, b)
    packed, grads = loss_and_grads(config, concatenated(a, b))
    torch.testing.assert_close(packed.loss, out_a.loss + out_b.loss, rtol=1e-12, atol=1e-12)
    for got, first, second in zip(grads, grads_a, grads_b, strict=True):
        torch.testing.assert_close(got, torch.cat([first, second]), rtol=1e-12, atol=1e-12)


@each_config
def test_gradient_reaches_the_students_logprobs_only(config):
    inputs = make_inputs(config)
    _, grads = loss_and_grads(config, inputs)
    assert any((g != 0).any() for g in grads)
    for x in (inputs.inference_logprobs, inputs.ref_logprobs, inputs.support.teacher_logprobs):
        assert x.grad is None or (x.grad == 0).all()


@each_config
def test_no_weights_are_weights_of_one_and_doubled_weights_double_the_loss(config):
    inputs = make_inputs(config)
    plain, plain_grads = loss_and_grads(config, with_weights(inputs, None))
    ones, ones_grads = loss_and_grads(
        config, with_weights(inputs, torch.ones(12, dtype=torch.float64))
    )
    twos, twos_grads = loss_and_grads(
        config, with_weights(inputs, 2 * torch.ones(12, dtype=torch.float64))
    )
    assert torch.equal(plain.loss, ones.loss)
    assert torch.equal(2 * plain.loss, twos.loss)
    for a, b, c in zip(plain_grads, ones_grads, twos_grads, strict=True):
        assert torch.equal(a, b) and torch.equal(2 * a, c)


@each_config
def test_a_token_of_weight_zero_does_not_train(config):
    inputs = make_inputs(config, mask=torch.ones(12, dtype=torch.bool))
    # A whole sequence: losses over sequences give its tokens no gradient either.
    zero = inputs.segment_ids // 2 == 0
    weights = torch.where(zero, 0.0, 1.0).double()
    _, grads = loss_and_grads(config, with_weights(inputs, weights))
    assert all((g[zero] == 0).all() for g in grads)


@each_config
def test_a_missing_need_raises_and_names_the_recipe_section(config):
    for need in config.needs:
        with pytest.raises(ValueError, match=rf"\[recipe\.loss[^\]]*\].*{need}"):
            setup_loss_fn(config, "recipe.loss")(
                dataclasses.replace(make_inputs(config), **{need: None})
            )
        with pytest.raises(ValueError, match=rf"\[recipe\.loss[^\]]*\].*{need}"):
            require(config, config.needs - {need}, {}, "recipe.loss")
    require(config, config.needs, {})


@each_config
def test_half_precision_stays_finite(config):
    for dtype in (torch.bfloat16, torch.float32):
        out, grads = loss_and_grads(config, make_inputs(config, dtype=dtype))
        assert out.loss.isfinite() and all(g.isfinite().all() for g in grads)
        assert all(v.isfinite() for v in out.metrics.values())


@each_config
def test_very_improbable_tokens_stay_finite(config):
    inputs = make_inputs(config, dtype=torch.float32, mask=torch.ones(12, dtype=torch.bool))
    for x in (
        inputs.ref_logprobs,
        inputs.support.teacher_logprobs,
        inputs.support.student_logprobs,
    ):
        x.data[::2, ...] -= 60.0
    out, grads = loss_and_grads(config, inputs)
    assert out.loss.isfinite() and all(g.isfinite().all() for g in grads)
    assert all(v.isfinite() for v in out.metrics.values())


@pytest.mark.parametrize(
    "config",
    [c for c in CONFIGS if not c.surrogate and "stop_gradient" not in config_id(c)],
    ids=config_id,
)
def test_the_gradient_is_the_central_difference_of_the_value(config):
    inputs = make_inputs(config, seed=3)
    _, grads = loss_and_grads(config, inputs)
    eps = 1e-6
    for leaf, grad in zip(student_leaves(inputs), grads, strict=True):
        flat = leaf.data.view(-1)
        for i in range(0, flat.numel(), max(1, flat.numel() // 25)):
            value = flat[i].item()
            flat[i] = value + eps
            up = setup_loss_fn(config)(inputs).loss.item()
            flat[i] = value - eps
            down = setup_loss_fn(config)(inputs).loss.item()
            flat[i] = value
            assert grad.view(-1)[i].item() == pytest.approx(
                (up - down) / (2 * eps), rel=2e-6, abs=2e-8
            )


@each_config
def test_the_order_of_the_support_does_not_matter(config):
    inputs = make_inputs(config)
    order = torch.randperm(
        inputs.support.token_ids.shape[-1], generator=torch.Generator().manual_seed(0)
    )
    s = inputs.support
    shuffled = dataclasses.replace(
        inputs,
        support=Support(
            s.token_ids[:, order], s.teacher_logprobs[:, order], s.student_logprobs[:, order]
        ),
    )
    torch.testing.assert_close(
        setup_loss_fn(config)(shuffled).loss,
        setup_loss_fn(config)(inputs).loss,
        rtol=1e-12,
        atol=1e-12,
    )


@each_config
def test_a_config_survives_the_recipe(config):
    union = TypeAdapter(AnyLoss)
    assert union.validate_python(config.model_dump(mode="json", exclude_none=True)) == config
    with pytest.raises(ValidationError, match="Extra inputs"):
        union.validate_python({**config.model_dump(), "typo": 1})


@each_config
def test_advantages_with_a_gradient_are_refused(config):
    inputs = dataclasses.replace(
        make_inputs(config), advantages=torch.zeros(12, dtype=torch.float64, requires_grad=True)
    )
    with pytest.raises(ValueError, match="does not depend on the sampled token"):
        setup_loss_fn(config)(inputs)


def test_an_unknown_loss_type_names_the_choices():
    with pytest.raises(ValidationError) as error:
        TypeAdapter(AnyLoss).validate_python({"type": "topk_kl"})
    assert all(name in str(error.value) for name in LOSS_TYPES)


def test_every_loss_names_itself_and_its_function():
    for config, fn in LOSS_FNS.items():
        name = config.model_fields["type"].default
        assert fn.__name__ == f"{name}_loss_fn"
        assert (
            fn.__module__
            == config.__module__
            == f"prime_composer.losses.{fn.__module__.rsplit('.', 1)[1]}"
        )
        assert all(
            field.description for key, field in config.model_fields.items() if key != "type"
        ), name


def rows(inputs: LossInputs, index: torch.Tensor, **changed) -> LossInputs:
    """The positions ``index`` of every tensor, as new leaves."""

    def take(x):
        return (
            x.detach()[index].requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        )

    values = {f.name: take(getattr(inputs, f.name)) for f in dataclasses.fields(LossInputs)}
    values["support"] = Support(
        *(take(getattr(inputs.support, f.name)) for f in dataclasses.fields(Support))
    )
    values["replay"] = inputs.replay and rows(inputs.replay, index, **changed)
    return LossInputs(**{**values, **changed})


@each_config
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    index=st.lists(st.integers(0, 11), min_size=1, max_size=9),
    garbage=st.sampled_from([0.0, -math.inf, math.nan]),
)
def test_padding_anywhere_changes_neither_loss_nor_gradient(config, index, garbage):
    inputs = make_inputs(config, seed=4, mask=torch.ones(12, dtype=torch.bool))
    out, grads = loss_and_grads(config, inputs)
    # Each position of ``index`` stands twice, once as padding: of its own sequence, and masked.
    order = torch.tensor([t for t in range(12) for _ in range(1 + index.count(t))])
    real = torch.cat([torch.ones(1, dtype=torch.bool), order[1:] != order[:-1]])
    padded = soil(rows(inputs, order, loss_mask=real), garbage)
    padded_out, padded_grads = loss_and_grads(config, padded)
    torch.testing.assert_close(padded_out.loss, out.loss, rtol=1e-11, atol=1e-12)
    for got, expected in zip(padded_grads, grads, strict=True):
        torch.testing.assert_close(got[real], expected, rtol=1e-11, atol=1e-13)
        assert (got[~real] == 0).all()


@each_config
@settings(max_examples=4, deadline=None, derandomize=True)
@given(order=st.permutations(range(4)))
def test_the_order_of_the_sequences_in_a_pack_does_not_matter(config, order):
    # Eight sequences of three tokens; chosen and rejected stay next to one another.
    inputs = make_inputs(
        config,
        seq=24,
        seed=5,
        mask=torch.rand(24, generator=torch.Generator().manual_seed(1)) > 0.2,
    )
    segments = torch.arange(8).repeat_interleave(3)
    inputs = rows(inputs, torch.arange(24), segment_ids=segments)
    out, grads = loss_and_grads(config, inputs)
    index = torch.cat([torch.arange(6) + 6 * pair for pair in order])
    shuffled = rows(inputs, index, segment_ids=segments)
    shuffled_out, shuffled_grads = loss_and_grads(config, shuffled)
    torch.testing.assert_close(shuffled_out.loss, out.loss, rtol=1e-11, atol=1e-12)
    for got, expected in zip(shuffled_grads, grads, strict=True):
        torch.testing.assert_close(got, expected[index], rtol=1e-11, atol=1e-13)
