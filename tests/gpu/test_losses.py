"""Every loss on a GPU: the numbers of the CPU, and no wait for the device where none is needed."""

import dataclasses

import pytest
import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.builders import packed_inputs, student_leaves

CONFIGS = [(name, i) for name, config in LOSS_TYPES.items() for i in range(len(config.examples))]
SYNCHRONIZING = {"default", "ipo", "sft", "sampled_reverse_kl", "compose"}
"""Losses with prime-rl's own reductions, which index by the mask."""


def bound(name, index):
    config = LOSS_TYPES[name]
    return setup_loss_fn(config.model_validate({**config.examples[index], "type": name}))


def on(device, inputs):
    """Return the inputs on a device, as leaves."""

    def move(value):
        if isinstance(value, Support):
            fields = dataclasses.fields(Support)
            return Support(*(move(getattr(value, field.name)) for field in fields))
        if isinstance(value, LossInputs):
            return on(device, value)
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(device).requires_grad_(value.requires_grad)

    fields = dataclasses.fields(LossInputs)
    return LossInputs(**{field.name: move(getattr(inputs, field.name)) for field in fields})


@pytest.mark.parametrize("name,index", CONFIGS)
def test_a_loss_on_a_gpu_returns_the_numbers_of_the_cpu(device, name, index):
    loss = bound(name, index)
    inputs = packed_inputs(loss.config, seq=400)
    there = on(device, inputs)
    outputs, outputs_there = loss(inputs), loss(there)
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
    "name,index", [(name, index) for name, index in CONFIGS if name not in SYNCHRONIZING]
)
def test_a_loss_does_not_wait_for_the_gpu(device, name, index):
    """A host synchronization in every micro-batch would stop the queue of kernels."""
    loss = bound(name, index)
    inputs = on(device, packed_inputs(loss.config, seq=64))
    loss(inputs).loss.backward()  # warm up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(inputs).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
