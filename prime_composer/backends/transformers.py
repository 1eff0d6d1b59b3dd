"""A transformers model in memory: its window, what it saves, and what sampler and scorer share."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_composer.backends.errors import own_words
from prime_composer.backends.hf_model import (
    ModelUnavailable,
    cap_attention,
    import_transformers,
    lm_head_weight,
    load_model,
    read_config,
    without_progress_bars,
)
from prime_composer.backends.model_files import cached_file
from prime_composer.backends.protocols import Limits
from prime_composer.backends.scratch import scratch_folder

LENGTHENING = ("linear", "dynamic")  # Types whose ``factor`` lengthens the config's positions


def window(model: str | Path) -> int | None:
    """Return ``window_of`` a model on this machine; None for one that is not, or not readable."""
    with suppress(OSError, ValueError):  # whoever opens the model says what is wrong
        if cached_file(model, "config.json") is None:
            return None
        try:
            return window_of(read_config(model))
        except ModelUnavailable:  # of a type that transformers does not know, if it is one at all
            generic = import_transformers().PreTrainedConfig
            return window_of(generic.from_pretrained(str(model)))
    return None


def window_of(config: Any) -> int | None:
    """Return how many positions a model has, as vLLM counts them; None for no limit."""
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(
        config, "max_seq_len", None
    )
    if not isinstance(positions, int) or positions <= 0:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    if "gemma3" in config.model_type:
        tables = []
    factors = [t.get("factor") for t in tables if t.get("rope_type") in LENGTHENING]
    return int(positions * max([1.0, *(factor for factor in factors if factor)]))


def fix_frequencies(model: nn.Module, context: int | None) -> None:
    """Fix rotary frequencies that follow the longest position of a batch, up to ``context``.

    A row's log-probs then depend on the row alone, as in vLLM. None is the model's own length.
    """
    net: Any = model
    length = context or window_of(net.config)
    if length is None:
        return
    for module in net.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if not isinstance(kind, str) or (kind != "longrope" and "dynamic" not in kind):
                continue
            # The module's own update, once, and then no more of them.
            x = torch.zeros(1, device=next(module.buffers()).device)
            if x.is_meta:
                continue
            last = torch.tensor([[length - 1]], device=x.device)
            module(x, last, **({} if layer is None else {"layer_type": layer}))
            if layer is None:
                module.rope_type = "default"
            else:
                module.rope_type = module.rope_type | {layer: "default"}


def try_saving(model: Any, tokenizer: Any) -> None:
    """Refuse a model or tokenizer that a scratch folder does not give back as it was."""
    transformers = import_transformers()
    what = "config, generation config and adapter"
    with scratch_folder("prime_composer_trial_") as folder:
        try:
            with without_progress_bars():
                model.save_pretrained(folder, state_dict={})
            if (folder / "config.json").exists():
                read_config(folder)
            what = "tokenizer"
            tokenizer.save_pretrained(folder)
            again = transformers.AutoTokenizer.from_pretrained(str(folder))
        except OSError as error:  # of the disk, which may not say where
            place = str(error.filename or folder)
            raise OSError(error.errno, error.strerror or str(error), place) from error
        except Exception as error:  # transformers and tokenizers raise anything
            raise ModelUnavailable(
                f"[student] its checkpoints could not be written or read: {what}, in {folder} "
                f"({own_words(error)}); correct these files of the model"
            ) from error
    kept, before = ((one.get_vocab(), one.chat_template) for one in (again, tokenizer))
    if kept != before:
        raise ModelUnavailable(
            "[student] its tokenizer is another one once it was saved and loaded again "
            f"({type(again).__name__}), in its checkpoints too; save it with this version of "
            "transformers, and name that folder in student.model"
        )


class LoadedModel:
    """A transformers model in memory, within its own window: what sampler and scorer share."""

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
        cap_attention(net)
        self.limits = Limits(
            max_model_len=limit,
            vocab_size=vocab_size,
            max_logprobs=vocab_size,
        )

    @property
    def origin(self) -> str:
        return "The model in memory" if self._source is None else f"The model {self._source}"

    @property
    def model(self) -> Any:
        if self._model is None:
            raise ValueError("This backend is closed; make a new one.")
        return self._model

    def close(self) -> None:
        """Drop the model. Closing twice is harmless."""
        self._model = None
