"""What a recipe may change about the tokens of any loss: which ones count, and how much.

A modifier is a table under the loss, ``[loss.special_tokens]``, and ``BoundLoss`` applies it before the loss function runs. A
token that is taken out leaves ``loss_mask``, so that neither the sum nor the loss's metrics see what stands there (its
teacher log-prob may be -inf). The trainer's denominator is the trainer's: it still counts the token, as a weight of 0 would.
"""

import dataclasses
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Int
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, model_validator
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.reductions import masked_sum

M = TypeVar("M", bound=BaseModel)


class Modifier(BaseModel):
    """Knobs of one modifier."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SpecialTokenMask(Modifier):
    """Takes the tokens of a chat template (``<think>``, ``<|im_end|>``, EOS) out of the loss.

    Student and teacher may share a tokenizer and still use its template differently: the teacher then gives such a token
    e^-20 and less, and a few of them outweigh all the text. Masking the first occurrence in a response is what "Revisiting
    On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, does for "<", "think" and "<|im_end|>".
    """

    needs: ClassVar[frozenset[str]] = frozenset({"token_ids"})

    ids: tuple[int, ...] = ()
    """Token ids to take out."""

    strings: tuple[str, ...] = ()
    """The same as text; each has to be one token of the student's tokenizer."""

    occurrence: Literal["first", "all"] = "first"
    """Of each id: its first occurrence in a response, or all of them."""

    @model_validator(mode="after")
    def _names_a_token(self) -> "SpecialTokenMask":
        if not self.ids and not self.strings:
            raise ValueError(
                "special_tokens names no token: set ids = [...] or strings = [...], or leave the table out."
            )
        return self

    def resolve(self, tokenizer: Any) -> "SpecialTokenMask":
        """``strings`` turned into ``ids``.

        Args:
            tokenizer: transformers' or tokenizers': its ``encode(text, add_special_tokens=False)`` is used.

        Raises:
            ValueError: a string is not exactly one token.
        """
        ids = list(self.ids)
        for string in self.strings:
            encoded = tokenizer.encode(string, add_special_tokens=False)
            encoded = list(getattr(encoded, "ids", encoded))
            if len(encoded) != 1:
                raise ValueError(
                    f"special_tokens.strings: {string!r} is {len(encoded)} tokens {encoded} of this tokenizer, not one; "
                    "name its parts one by one, or give special_tokens.ids."
                )
            ids += encoded
        return self.model_copy(update={"ids": tuple(dict.fromkeys(ids)), "strings": ()})

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Inputs without these tokens, and what was removed.

        Metrics: ``special_tokens/removed`` is the share of the mask's tokens; ``special_tokens/removed_signal`` the |A| of
        these tokens per token of the mask, A = log q - log p; ``special_tokens/removed_signal_share`` its share of all |A|.
        """
        if self.strings:
            raise ValueError(
                "special_tokens.strings are not resolved to ids yet: call prime_composer.losses.shared.modifiers.resolve(config, tokenizer)."
            )
        mask = inputs.loss_mask
        # One comparison per id: a tensor of the ids would have to be copied to the device, and waited for.
        hits = torch.stack([inputs.token_ids == i for i in self.ids]) & mask
        if self.occurrence == "first":
            earlier = hits.long().cumsum(-1) - hits.long()
            hits = hits & (earlier == at_segment_start(earlier, inputs.segment_ids))
        removed = hits.any(0)
        with torch.no_grad():
            metrics = {"special_tokens/removed": token_mean(removed, mask)}
            if inputs.ref_logprobs is not None:
                signal = (inputs.ref_logprobs - inputs.trainer_logprobs).abs()
                everything, taken = masked_sum(signal, mask), masked_sum(signal, removed)
                metrics["special_tokens/removed_signal"] = taken / mask.sum().clamp(min=1)
                metrics["special_tokens/removed_signal_share"] = taken / everything.clamp(min=1e-30)
        return dataclasses.replace(inputs, loss_mask=mask & ~removed), metrics


class PositionWeights(Modifier):
    """IW-OPD: early tokens of a response weigh more, by how much of its teacher-student discrepancy still lies ahead.

        w_t = 1 + gamma (1 - sum_{i<t} |a_i| / sum_i |a_i|),    a = sg(log q - log mu)

    from 1 + gamma at a response's first token down towards 1 (the last one keeps its own share of gamma). A response on which
    teacher and sampler agree gets 1 + gamma.
    Source: "On the Position Bias of On-Policy Distillation" (2026), https://arxiv.org/abs/2606.22600; trl's IWOPDTrainer.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})

    gamma: NonNegativeFloat = 0.5
    """Extra weight of the first token."""

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Inputs with ``loss_weights`` multiplied by w. Metric: ``position_weights/mean``."""
        mask = inputs.loss_mask
        with torch.no_grad():
            gap = torch.where(mask, inputs.ref_logprobs - inputs.inference_logprobs, 0.0).abs()
            # float64: a pack's cumulative sum loses the digits of its last responses otherwise.
            before = gap.double().cumsum(0) - gap.double()
            prefix = before - at_segment_start(before, inputs.segment_ids)
            total = segment_totals(gap.double(), inputs.segment_ids)
            weights = (1 + self.gamma * (1 - prefix / total.clamp(min=1e-8))).to(gap.dtype)
            metrics = {"position_weights/mean": token_mean(weights, mask)}
            if inputs.loss_weights is not None:
                weights = weights * inputs.loss_weights
        return dataclasses.replace(inputs, loss_weights=weights), metrics


def segment_starts(segment_ids: Int[Tensor, " seq"]) -> Bool[Tensor, " seq"]:
    """True at the first token of each sequence of a pack."""
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[1:] = segment_ids[1:] != segment_ids[:-1]
    return starts


def at_segment_start(counts: Tensor, segment_ids: Int[Tensor, " seq"] | None) -> Tensor:
    """Each token gets the value of ``counts`` at the first token of its sequence.

    Args:
        counts: [..., seq], not negative and non-decreasing along the last axis, as an exclusive cumulative sum is.
    """
    if segment_ids is None:
        return counts[..., :1]
    return torch.where(segment_starts(segment_ids), counts, 0).cummax(-1).values


def segment_totals(values: Tensor, segment_ids: Int[Tensor, " seq"] | None) -> Tensor:
    """Each token gets the sum of ``values`` over its sequence, [seq]."""
    if segment_ids is None:
        return values.sum().expand_as(values)
    rows = segment_starts(segment_ids).long().cumsum(0) - 1
    return torch.zeros_like(values).index_add(0, rows, values)[rows]


def position_in_segment(
    mask: Bool[Tensor, " seq"], segment_ids: Int[Tensor, " seq"] | None
) -> Int[Tensor, " seq"]:
    """How many tokens of ``mask`` stand before a token in its sequence."""
    before = mask.long().cumsum(0) - mask.long()
    return before - at_segment_start(before, segment_ids)


def resolve(config: M, tokenizer: Any) -> M:
    """The config with every ``special_tokens.strings`` in it turned into ids, those of nested channels included."""
    changed = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, SpecialTokenMask):
            changed[name] = value.resolve(tokenizer)
        elif isinstance(value, BaseModel):
            changed[name] = resolve(value, tokenizer)
        elif isinstance(value, dict):
            changed[name] = {
                k: resolve(v, tokenizer) if isinstance(v, BaseModel) else v
                for k, v in value.items()
            }
    return config.model_copy(update=changed)
