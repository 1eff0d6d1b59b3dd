"""Modules with prime-rl's surfaces and none of its code, for tests of the trainer's adapter."""

import sys
import types
from dataclasses import dataclass, field
from typing import Any

from prime_composer.upstream.trainer.adapter import adapter

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
def opd_loss_fn(inputs): ...
def compute_loss(trainer_logprobs, inference_logprobs, teacher_logprobs, advantages, loss_mask,
                 loss_fns, loss_scale, training_mode='rl'): ...
def setup_loss_fns(loss_config):{IMPORTS}
    return {{'opd': opd_loss_fn, 'rl': lambda inputs: fn(inputs, **loss_config.kwargs)}}
"""
V07 = f"""
def ref_kl_loss_fn(inputs): ...
def compute_loss(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask,
                 rl_weights, ce_weights, ref_kl_weights, rl_loss_fn, rl_scale, ce_scale,
                 ref_kl_scale): ...
def setup_rl_loss_fn(loss_config):{IMPORTS}
    return lambda inputs: fn(inputs, **loss_config.kwargs)
"""


def loss_module(contract):
    """Return a module with the surface of ``contract`` ("v0.6" or "v0.7"), not in sys.modules."""
    module = types.ModuleType(LOSS)
    module.__file__ = f"<{contract}>"
    module.LossOutputs = LossOutputs
    module.LossInputs = LossInputsV06 if contract == "v0.6" else LossInputsV07
    exec(V06 if contract == "v0.6" else V07, module.__dict__)
    return module


def data_module():
    """Return a module with prime-rl's ``DataLoader``; a batch is the list of its micro-batches."""
    module = types.ModuleType(DATA)

    class DataLoader:
        def __init__(self, output_dir, start_step, dp_world_size=1, config=None):
            self.micro_batches = [{"number": 0}, {"number": 1}]

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
    adapter.cache_clear()


def custom(**kwargs):
    """Return prime-rl's CustomLossConfig that names our loss."""
    return types.SimpleNamespace(
        type="custom", import_path="prime_composer.upstream.loss_fn", kwargs=kwargs
    )
