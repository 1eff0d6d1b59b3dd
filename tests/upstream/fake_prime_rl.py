"""Loss modules with prime-rl's surfaces and none of its code, for tests of what we do at the door."""

import sys
import types
from dataclasses import dataclass, field
from typing import Any

LOSS = "prime_rl.trainer.rl.loss"


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


def loss_module(era):
    """A module with the surface of ``era`` ("v0.6" or "v0.7"), under prime-rl's name but not in sys.modules."""
    module = types.ModuleType(LOSS)
    module.__file__ = f"<{era}>"
    module.LossOutputs = LossOutputs
    if era == "v0.6":
        module.LossInputs = LossInputsV06
        exec(
            "def opd_loss_fn(inputs): ...\n"
            "def compute_loss(trainer_logprobs, inference_logprobs, teacher_logprobs, advantages, loss_mask, loss_fns,"
            " loss_scale, training_mode='rl'): ...\n"
            "def setup_loss_fns(loss_config):\n"
            "    import importlib\n"
            "    module, _, name = loss_config.import_path.rpartition('.')\n"
            "    fn = getattr(importlib.import_module(module), name)\n"
            "    return {'opd': opd_loss_fn, 'rl': lambda inputs: fn(inputs, **loss_config.kwargs)}\n",
            module.__dict__,
        )
    else:
        module.LossInputs = LossInputsV07
        exec(
            "def ref_kl_loss_fn(inputs): ...\n"
            "def compute_loss(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights,"
            " ce_weights, ref_kl_weights, rl_loss_fn, rl_scale, ce_scale, ref_kl_scale): ...\n"
            "def setup_rl_loss_fn(loss_config):\n"
            "    import importlib\n"
            "    module, _, name = loss_config.import_path.rpartition('.')\n"
            "    fn = getattr(importlib.import_module(module), name)\n"
            "    return lambda inputs: fn(inputs, **loss_config.kwargs)\n",
            module.__dict__,
        )
    return module


def put(monkeypatch, module):
    """Make ``module`` importable as prime-rl's loss module for one test."""
    parts = LOSS.split(".")
    for i in range(1, len(parts)):
        name = ".".join(parts[:i])
        parent = types.ModuleType(name)
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, name, parent)
    monkeypatch.setitem(sys.modules, LOSS, module)
    return module


def custom(**kwargs):
    """prime-rl's CustomLossConfig that names our loss."""
    return types.SimpleNamespace(
        type="custom", import_path="prime_composer.upstream.loss_fn", kwargs=kwargs
    )
