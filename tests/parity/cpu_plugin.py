"""A pytest plugin for upstream's own tests: no GPU, and our adapter installed as its .pth does."""

import functools
import json
import os

import torch
from driver import stand_ins

from prime_composer.upstream import autoload


def on_cpu(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        kwargs.pop("device", None)
        return function(*args, **kwargs)

    return wrapped


stand_ins()
torch.Tensor.cuda = lambda self, *args, **kwargs: self
for name in ("randn", "tensor", "zeros", "ones", "full", "rand"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
if os.environ.get("PRIME_COMPOSER"):
    autoload.install()
elif table := os.environ.get("FIVE_LINES"):  # what [trainer.loss] does at prime-rl's setup
    from prime_composer.upstream.trainer.adapter import trainer_adapter

    trainer_adapter().register(json.loads(table), in_file=True)
