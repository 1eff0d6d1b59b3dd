"""Modifiers: changes to the tokens of any loss, namely which ones count and how much.

A removed token leaves ``loss_mask``, so that neither the sum nor the metrics read its values (its
teacher log-prob may be -inf). The trainer's denominator still counts it, as with a weight of 0.
"""

import dataclasses
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Int
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, model_validator
from torch import Tensor

from prime_composer.contract import LossInputs, given
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.tables import Table

M = TypeVar("M", bound=BaseModel)


class Modifier(Table):
    """Knobs of one modifier."""

    needs: ClassVar[frozenset[str]] = frozenset()  # inputs that it reads

    def with_token_ids(self, tokenizer: Any) -> "Modifier":
        """Return the modifier with texts of tokens as ids, by transformers or tokenizers."""
        return self

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the changed inputs, and the modifier's metrics."""
        raise NotImplementedError


class TokenModifier(Modifier):
    """Knobs of a modifier of some tokens, which a recipe names by id or by text."""

    table: ClassVar[str]  # its key
    texts_key: ClassVar[str]  # that of the texts, each of which is one token

    ids: tuple[NonNegativeInt, ...] = ()
    """Ids of the tokens."""

    @model_validator(mode="after")
    def _names_a_token(self) -> "TokenModifier":
        if not self.ids and not getattr(self, self.texts_key):
            raise ValueError(
                f"{self.table} names no token: set ids = [...] or {self.texts_key} = [...], or "
                "leave the table out."
            )
        return self

    def with_token_ids(self, tokenizer: Any) -> "TokenModifier":
        """Return the modifier with its texts as ``ids``."""
        ids = list(self.ids)
        for text in getattr(self, self.texts_key):
            encoded = tokenizer.encode(text, add_special_tokens=False)
            encoded = list(getattr(encoded, "ids", encoded))
            if len(encoded) != 1:
                raise ValueError(
                    f"{self.table}.{self.texts_key}: {text!r} is {len(encoded)} tokens {encoded} "
                    "of this tokenizer, not one; name its parts one by one, "
                    f"or give {self.table}.ids."
                )
            ids += encoded
        return self.model_copy(update={"ids": tuple(dict.fromkeys(ids)), self.texts_key: ()})

    @property
    def resolved_ids(self) -> tuple[int, ...]:
        """The ids, once each. Texts that are not among them yet are an error."""
        if getattr(self, self.texts_key):
            raise ValueError(
                f"{self.table}.{self.texts_key} are not resolved to ids yet: "
                "call prime_composer.losses.shared.modifiers.with_token_ids(config, tokenizer)."
            )
        return tuple(dict.fromkeys(self.ids))


class SpecialTokenMask(TokenModifier):
    """Remove the tokens of a chat template (``<think>``, ``<|im_end|>``, EOS) from the loss.

    Student and teacher may share a tokenizer and still use its template differently. The teacher
    then gives such a token a probability of e^-20 and less, and a few of them outweigh all the
    text. "Revisiting On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, masks the
    first occurrence of "<", "think" and "<|im_end|>" in a response.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"token_ids"})
    table: ClassVar[str] = "special_tokens"
    texts_key: ClassVar[str] = "strings"

    strings: tuple[str, ...] = ()
    """The same as text. Each has to be one token of the student's tokenizer."""

    occurrence: Literal["first", "all"] = "first"
    """Remove the first occurrence of each id in a response, or all of them."""

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the inputs without these tokens, and metrics of what was removed.

        ``special_tokens/removed`` is the share of the mask's tokens. With A = log q - log p,
        ``special_tokens/signal`` is the mean |A| of the mask's tokens, and
        ``special_tokens/removed_signal`` what the removed ones contribute to it.
        """
        mask, token_ids = inputs.loss_mask, given(inputs.token_ids)
        # One comparison per id: a tensor of the ids would need a copy to the device, and a wait.
        hits = torch.stack([token_ids.eq(token) for token in self.resolved_ids]) & mask
        if self.occurrence == "first":
            earlier = hits.long().cumsum(-1) - hits.long()
            hits = hits & (earlier == at_segment_start(earlier, inputs.segment_ids))
        removed = hits.any(0)
        with torch.no_grad():
            metrics = {"special_tokens/removed": token_mean(removed, mask)}
            if inputs.ref_logprobs is not None:
                signal = (inputs.ref_logprobs - inputs.own_logprobs).abs()
                of_removed = torch.where(removed, signal, 0.0)
                metrics["special_tokens/signal"] = token_mean(signal, mask)
                metrics["special_tokens/removed_signal"] = token_mean(of_removed, mask)
        return dataclasses.replace(inputs, loss_mask=mask & ~removed), metrics


class PositionWeights(Modifier):
    """Weight early tokens of a response by how much teacher-student discrepancy follows (IW-OPD).

        w_t = 1 + gamma (1 - sum_{i<t} |a_i| / sum_i |a_i|),    a = sg(log q - log mu)

    The weight falls from 1 + gamma at a response's first token towards 1. The last token keeps its
    own share of gamma. A response without discrepancy gets 1 + gamma everywhere.

    Source: "On the Position Bias of On-Policy Distillation" (2026),
    https://arxiv.org/abs/2606.22600, and trl's IWOPDTrainer.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})

    gamma: NonNegativeFloat = 0.5
    """Extra weight of the first token."""

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the inputs with ``loss_weights`` times w, and the metric of the mean weight."""
        mask = inputs.loss_mask
        with torch.no_grad():
            # log mu as it would be at temperature 1, which log q has.
            untempered = inputs.own_logprobs - inputs.trainer_logprobs
            difference = given(inputs.ref_logprobs) - (inputs.inference_logprobs + untempered)
            gap = torch.where(mask, difference, 0.0).abs()
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
    """Return True at the first token of each sequence of a pack."""
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[1:] = segment_ids[1:] != segment_ids[:-1]
    return starts


def at_segment_start(counts: Tensor, segment_ids: Int[Tensor, " seq"] | None) -> Tensor:
    """Return for each token the value of ``counts`` at the first token of its sequence.

    ``counts`` is [..., seq], not negative and non-decreasing, as an exclusive cumulative sum is.
    """
    if segment_ids is None:
        return counts[..., :1]
    return torch.where(segment_starts(segment_ids), counts, 0).cummax(-1).values


def segment_totals(values: Tensor, segment_ids: Int[Tensor, " seq"] | None) -> Tensor:
    """Return for each token the sum of ``values`` over its sequence, [seq]."""
    if segment_ids is None:
        return values.sum().expand_as(values)
    rows = segment_starts(segment_ids).long().cumsum(0) - 1
    return torch.zeros_like(values).index_add(0, rows, values)[rows]


def position_in_segment(
    mask: Bool[Tensor, " seq"], segment_ids: Int[Tensor, " seq"] | None
) -> Int[Tensor, " seq"]:
    """Return the number of tokens of ``mask`` before each token in its sequence."""
    before = mask.long().cumsum(0) - mask.long()
    return before - at_segment_start(before, segment_ids)


def with_token_ids(config: M, tokenizer: Any) -> M:
    """Return a config with the texts of tokens in it turned into ids, at any depth.

    A string that is not exactly one token is a ``ValueError``.
    """
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Modifier):
            changed[name] = value.with_token_ids(tokenizer)
        elif isinstance(value, BaseModel):
            changed[name] = with_token_ids(value, tokenizer)
        elif isinstance(value, dict):
            changed[name] = {
                key: with_token_ids(item, tokenizer) if isinstance(item, BaseModel) else item
                for key, item in value.items()
            }
    return config.model_copy(update=changed)
