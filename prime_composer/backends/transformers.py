"""A transformers model in memory: what sampler and scorer share."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_composer.backends.hf_model import (
    fix_frequencies,
    lm_head_weight,
    load_model,
    window_of,
)
from prime_composer.backends.protocols import Limits


class LoadedModel:
    """A transformers model in memory: what sampler and scorer share.

    Args:
        model: a model, a directory or a hub id.
        dtype: of weights and activations, where the model is loaded here.
        device: None is the GPU where there is one.
        max_model_len: longest sequence, within the model's own window, which is also that of None.
            Rotary frequencies are fixed for it.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        dtype: str,
        device: str | torch.device | None,
        max_model_len: int | None,
    ):
        self._source = None if isinstance(model, nn.Module) else model
        net = model if isinstance(model, nn.Module) else load_model(model, dtype, device)
        self._model: Any = net
        vocab_size = lm_head_weight(net).shape[0]
        limits = [one for one in (max_model_len, window_of(net.config)) if one is not None]
        limit = min(limits, default=None)
        fix_frequencies(net, limit)
        self.limits = Limits(
            max_model_len=limit,
            vocab_size=vocab_size,
            max_logprobs=vocab_size,
        )

    @property
    def origin(self) -> str:
        """The model in words, for messages."""
        return "The model in memory" if self._source is None else f"The model {self._source}"

    @property
    def model(self) -> Any:
        """The model itself."""
        if self._model is None:
            raise ValueError("This backend is closed; make a new one.")
        return self._model

    def close(self) -> None:
        """Drop the model. Closing twice is harmless."""
        self._model = None
