"""Modules with prime-rl's surfaces and none of its code, for tests of the trainer's adapter."""

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from prime_composer.upstream.trainer.adapter import trainer_adapter
from prime_composer.upstream.trainer.head import hook_head

LOSS = "prime_rl.trainer.rl.loss"
DATA = "prime_rl.trainer.rl.data"


@dataclass
class LossOutputs:
    loss: Any
    metrics: dict


@dataclass
class LossInputsV06:
    trainer_logprobs: Any
    inference_logprobs: Any
    teacher_logprobs: Any
    advantages: Any
    loss_mask: Any


@dataclass
class LossInputsV07:
    trainer_logprobs: Any
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any
    loss_weights: Any = field(default=None)


IMPORTS = """
    import importlib
    module, _, name = loss_config.import_path.rpartition('.')
    fn = getattr(importlib.import_module(module), name)
"""
V06 = f"""
def opd_loss_fn(inputs): return LossOutputs(inputs.trainer_logprobs.sum(), {{}})
def compute_loss(trainer_logprobs, inference_logprobs, teacher_logprobs, advantages, loss_mask,
                 loss_fns, loss_scale, training_mode='rl'):
    rows = zip(trainer_logprobs, inference_logprobs, teacher_logprobs, advantages, loss_mask)
    return sum(loss_fns[training_mode](LossInputs(*row)).loss for row in rows) / loss_scale, {{}}
def setup_loss_fns(loss_config):{IMPORTS}
    return {{'opd': opd_loss_fn, 'rl': lambda inputs: fn(inputs, **loss_config.kwargs)}}
"""
V07 = f"""
def ref_kl_loss_fn(inputs): return LossOutputs(inputs.trainer_logprobs.sum(), {{}})
def compute_loss(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask,
                 rl_weights, ce_weights, ref_kl_weights, rl_loss_fn, rl_scale, ce_scale,
                 ref_kl_scale):
    total = 0.0
    rows = zip(trainer_logprobs, inference_logprobs, ref_logprobs, advantages)
    for i, row in enumerate(rows):
        for fn, weights in (rl_loss_fn, rl_weights[i]), (ref_kl_loss_fn, ref_kl_weights[i]):
            if (weights != 0).any():
                total = total + fn(LossInputs(*row, weights != 0, weights)).loss
    return total, {{}}
def setup_rl_loss_fn(loss_config):{IMPORTS}
    return lambda inputs: fn(inputs, **loss_config.kwargs)
"""
LOOP = """
import torch
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn as setup
def train(loss_config, loader, steps):
    rl_loss, losses = setup(loss_config), []
    for _ in range(steps):
        loader.wait_for_batch()
        batches = loader.get_batch()
        assert sum(int(b["loss_mask"].sum()) for b in batches) >= 0
        for batch in batches:
            def rows(name):
                return batch[name][0].split(batch["sequence_lengths"])
            logprobs = torch.full(batch["input_ids"][0].shape, -1.5, requires_grad=True)
            logprobs = logprobs.split(batch["sequence_lengths"])
            own, ref = rows("inference_logprobs"), rows(loader.ref_field)
            first = (logprobs, own, ref, rows("advantages"), rows("loss_mask"))
            more = (rows("rl_weights"), None, rows("ref_kl_weights"), rl_loss, 1, 1, 1)
            losses.append(torch.as_tensor(compute_loss(*first, *more)[0]).item())
    return losses
"""
LENGTH, TRAINED = 6, 4
"""Tokens of each sequence, and how many of them train."""


def micro_batch(contract="v0.7", kinds="d"):
    """Return a micro-batch of prime-rl's data loader.

    Args:
        contract: "v0.6" or "v0.7".
        kinds: one letter per sequence: d distillation, r rl, - padding. v0.6 has one kind in each.
    """
    n = LENGTH * len(kinds)
    trains = torch.arange(LENGTH) % 3 != 0
    distilled, rl = (
        torch.cat([trains if kind == letter else torch.zeros(LENGTH).bool() for letter in kinds])
        for kind in "dr"
    )
    generator = torch.Generator().manual_seed(0)
    inference, ref = -torch.rand(2, 1, n, generator=generator)
    batch = {
        "input_ids": torch.randint(0, 50, (1, n), generator=generator),
        "loss_mask": (distilled | rl)[None],
        "advantages": torch.ones(1, n),
        "inference_logprobs": inference,
        "temperatures": torch.ones(1, n),
        "sequence_lengths": [LENGTH] * len(kinds),
        "env_names": ["sums"] * n,
        "routed_experts": None,
    }
    if contract == "v0.6":
        return batch | {"teacher_logprobs": ref, "training_mode": "rl" if "r" in kinds else "opd"}
    return batch | {
        "ref_logprobs": ref,
        "rl_weights": rl.float()[None],
        "ce_weights": None,
        "ref_kl_weights": distilled.float()[None],
    }


def loss_module(contract, *edits):
    """Return a module with the surface of ``contract`` ("v0.6" or "v0.7"), not in sys.modules.

    ``edits`` are pairs of a text in its source and what it becomes.
    """
    module = types.ModuleType(LOSS)
    module.__file__ = f"<{contract}>"
    module.LossOutputs = LossOutputs
    module.LossInputs = LossInputsV06 if contract == "v0.6" else LossInputsV07
    exec(edited(V06 if contract == "v0.6" else V07, edits), module.__dict__)
    return module


def loop_module(*edits):
    """Return a module with prime-rl's train loop, whose names come from its loss module.

    ``edits`` are pairs of a text in its source and what it becomes.
    """
    module = types.ModuleType("prime_rl.trainer.rl.train")
    exec(edited(LOOP, edits), module.__dict__)
    return module


def edited(source, edits):
    """Return a source with replacements, each of a text that it has."""
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


def data_module(contract="v0.7"):
    """Return a module with prime-rl's ``DataLoader``.

    A batch is the list of its micro-batches; tests set it. At first it has two of distillation.
    """
    module = types.ModuleType(DATA)

    class DataLoader:
        ref_field = "teacher_logprobs" if contract == "v0.6" else "ref_logprobs"

        def __init__(self, output_dir, start_step, dp_world_size=1, config=None):
            self.micro_batches = [micro_batch(contract), micro_batch(contract)]

        def wait_for_batch(self):
            pass

        def get_batch(self):
            return self.micro_batches

    module.DataLoader = DataLoader
    return module


def put(monkeypatch, *modules):
    """Make modules importable under their names for one test, in a process without an adapter."""
    for module in modules:
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                parent = types.ModuleType(name)
                parent.__path__ = []
                monkeypatch.setitem(sys.modules, name, parent)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    trainer_adapter.cache_clear()


def inputs_of(mask, logprobs=-1.0):
    """Return prime-rl's inputs of one sequence that no teacher has scored yet."""
    row = torch.full(mask.shape, logprobs)
    return LossInputsV07(
        trainer_logprobs=row.clone().requires_grad_(),
        inference_logprobs=row,
        ref_logprobs=torch.full(mask.shape, torch.nan),
        advantages=torch.zeros(mask.shape),
        loss_mask=mask,
    )


def custom(**kwargs):
    """Return prime-rl's CustomLossConfig that names our loss."""
    return types.SimpleNamespace(
        type="custom", import_path="prime_composer.upstream.loss_fn", kwargs=kwargs
    )


class PlainHead(torch.nn.Linear):
    """Stands in for prime-rl's plain head."""

    softcap = None

    def forward(self, hidden_states, labels=None, temperature=None):
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return {"logits": logits}


def head_module(original=PlainHead, name="VanillaOutputLinear"):
    """Return a hooked module of prime-rl's heads, and one of its classes.

    Args:
        original: the class that all heads are copies of.
        name: the class to return. A name that prime-rl has not is left alone by the hook.
    """
    module = types.ModuleType("prime_rl.trainer.models.layers.lm_head")
    for each in {"FusedOutputLinear", "VanillaOutputLinear", name}:
        cls = type(each, (original,), {"forward": original.forward, "__module__": module.__name__})
        setattr(module, each, cls)
    hook_head(module)
    return getattr(module, name)
