"""Every loss on a GPU: the numbers of the CPU, and no wait for the device where none is needed."""

import dataclasses

import pytest
import torch

from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.builders import packed_inputs, student_leaves
from tests.gpu.waits import no_waits

CONFIGS = [(name, i) for name, config in LOSS_TYPES.items() for i in range(len(config.examples))]
SYNCHRONIZING = {"default", "ipo", "sft", "sampled_reverse_kl", "compose"}
"""Losses with prime-rl's own reductions, which index by the mask."""


def bound(name, index):
    config = LOSS_TYPES[name]
    return setup_loss_fn(config.model_validate({**config.examples[index], "type": name}))


def waits(name, index):
    """Return whether a loss reads numbers on the host.

    ``rl_mix`` adds prime-rl's own loss. Over two heads the rows of the mask are computed alone, and
    the host has to count them.
    """
    config = bound(name, index).config
    adds_rl = getattr(config, "rl_mix", None) is not None
    return name in SYNCHRONIZING or adds_rl or "hidden_states" in config.needs


def on(device, value):
    """Return inputs on a device, as leaves: a tensor, or whatever contains some."""
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return type(value)(**{name: on(device, getattr(value, name)) for name in names})
    if isinstance(value, tuple):
        items = [on(device, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    return value


@pytest.mark.parametrize("name,index", CONFIGS)
def test_a_loss_on_a_gpu_returns_the_numbers_of_the_cpu(device, name, index):
    loss = bound(name, index)
    inputs = packed_inputs(loss.config, seq=400)
    there = on(device, inputs)
    assert {leaf.device.type for leaf in student_leaves(there)} == {device}
    outputs, outputs_there = loss(inputs), bound(name, index)(there)
    torch.testing.assert_close(outputs_there.loss.cpu(), outputs.loss, rtol=1e-10, atol=1e-12)
    assert outputs.metrics.keys() == outputs_there.metrics.keys()
    for metric, value in outputs.metrics.items():
        other = outputs_there.metrics[metric].as_subclass(torch.Tensor).cpu()
        value = value.as_subclass(torch.Tensor)
        torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-9, check_device=False)
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(outputs.loss, student_leaves(inputs), **options)
    grads_there = torch.autograd.grad(outputs_there.loss, student_leaves(there), **options)
    for gradient, other in zip(grads, grads_there, strict=True):
        torch.testing.assert_close(other.cpu(), gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name,index", [(name, index) for name, index in CONFIGS if not waits(name, index)]
)
def test_a_loss_does_not_wait_for_the_gpu(device, name, index):
    """A host synchronization in every micro-batch would stop the queue of kernels."""
    loss = bound(name, index)
    inputs = on(device, packed_inputs(loss.config, seq=64))
    loss(inputs).loss.backward()  # warm up
    with no_waits(device):
        loss(inputs).loss.backward()
