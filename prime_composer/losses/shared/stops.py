"""Stops: ids that end an answer are one outcome, whichever of them a model has learned to write."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_composer.contract import IN_TAIL, LossInputs, Support, TwoHeads, given
from prime_composer.divergences import upcast
from prime_composer.full_vocabulary import WholeVocabulary, teacher_logprobs
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.modifiers import TokenModifier


class Stops(TokenModifier):
    """Compare the ids that end an answer as one outcome.

    A base model ends with ``<|endoftext|>`` and its chat model with ``<|im_end|>``. A student that
    ends as it has learned is then taught not to end, and never samples the teacher's end. With S
    the ids,

        P = sum_{v in S} p(v),    Q = sum_{v in S} q(v)

    take the place of their terms before any divergence, and the gradient of log P for log p(v) is
    p(v) / P. Where the sampled token is in S, log P and log Q are its log-probs, and log mu + log P
    - log p stands for the sampler's mass, so that the importance ratio is that of the sampled id.

    ``k = "full"`` has every q. On a top K, Q is the sum of what the teacher lists, and q of the
    sampled id for the sampled token. Each id that it does not list has at most its K-th
    probability, which stays in the teacher's tail. Where it lists none of S, S is in the tail of
    both sides, which is 1 minus all other ids of the support.

    Every position has the outcome: a second end after the first one of a rollout is compared like
    any other. ``distillation/kl`` and evaluations compare ids.

    Source: "When EOS Tokens Disagree" (2026), https://arxiv.org/abs/2609.20511, and
    UNCSciML/opd-eos (EOS_MODE=semantic_class), of the sampled token. The rest is not from there.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"stops", "token_ids"})
    table: ClassVar[str] = "stops"
    texts_key: ClassVar[str] = "texts"

    texts: tuple[str, ...] = ()
    """The same as text. Each has to be one token of the student's tokenizer."""

    def apply(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, Tensor]]:
        """Return the inputs with these ids as one, and metrics of the sampled ones.

        ``stops/sampled`` is the share of the mask's tokens, ``stops/student`` and
        ``stops/teacher`` are the means of P and Q there.
        """
        token_ids, stops, ids = given(inputs.token_ids), given(inputs.stops), self.resolved_ids
        sampled = inputs.loss_mask & is_in(token_ids, ids)
        columns = [stops.token_ids.index(i) for i in ids]

        def mass(logprobs: Tensor) -> Tensor:
            kept = torch.where(inputs.loss_mask.unsqueeze(-1), upcast(logprobs), 0.0)
            # One column after the other: a list of them would be copied to the device, and wait.
            return torch.stack([kept[:, column] for column in columns], -1).logsumexp(-1)

        log_p, trainer = mass(stops.logprobs), inputs.trainer_logprobs
        tempered = log_p if stops.tempered is None else mass(stops.tempered)
        shift = (tempered - trainer).detach()
        if isinstance(inputs.support, WholeVocabulary):
            support, log_q = _of_heads(inputs.support.heads, ids, sampled)
        else:
            support, log_q = _of_support(given(inputs.support), ids, inputs, log_p)

        def of_stops(values: Tensor | None, own: Tensor) -> Tensor | None:
            return None if values is None else torch.where(sampled, own, values)

        with torch.no_grad():
            metrics = {
                "stops/sampled": token_mean(sampled, inputs.loss_mask),
                "stops/student": token_mean(torch.exp(log_p), sampled),
                "stops/teacher": token_mean(torch.exp(log_q), sampled),
            }
        mu = inputs.inference_logprobs
        changed = dataclasses.replace(
            inputs,
            support=support,
            trainer_logprobs=given(of_stops(trainer, tempered)),
            untempered_logprobs=of_stops(inputs.untempered_logprobs, log_p),
            inference_logprobs=given(of_stops(mu, mu + shift)),
            ref_logprobs=of_stops(inputs.ref_logprobs, log_q),
            token_ids=token_ids.masked_fill(sampled, ids[0]),
        )
        return changed, metrics


def _of_heads(
    heads: TwoHeads, ids: tuple[int, ...], sampled: Bool[Tensor, " seq"]
) -> tuple[Support, Float[Tensor, " seq"]]:
    """Return the whole vocabulary with S as one outcome, and log Q of the sampled tokens."""
    refuse_beyond(ids, min(side.size for side in heads.sides))
    asked = torch.tensor(ids, device=sampled.device).expand(len(sampled), -1)
    log_q = teacher_logprobs(heads.masked(sampled), asked).logsumexp(-1)
    return WholeVocabulary(dataclasses.replace(heads, merged=ids)), log_q


def _of_support(
    support: Support, stops: tuple[int, ...], inputs: LossInputs, log_p: Float[Tensor, " seq"]
) -> tuple[Support, Float[Tensor, " seq"]]:
    """Return the support with one column for S, and log Q of the sampled tokens."""
    support = support.masked(inputs.loss_mask)
    ids, teacher = support.token_ids, upcast(support.teacher_logprobs)
    listed = is_in(ids, stops)
    log_q = torch.where(listed, teacher, IN_TAIL).logsumexp(-1)
    merged = Support(
        torch.cat([ids, torch.full_like(ids[:, :1], stops[0])], -1),
        torch.cat([teacher, log_q.unsqueeze(-1)], -1),
        torch.cat([support.student_logprobs, log_p.unsqueeze(-1)], -1),
        torch.cat([~listed & (ids >= 0), listed.any(-1, keepdim=True)], -1),
    )
    if inputs.ref_logprobs is None:
        return merged, log_q
    has_sampled = (ids == given(inputs.token_ids).unsqueeze(-1)).any(-1)
    # One more summand, where the teacher does not list the sampled id.
    own = torch.where(has_sampled, IN_TAIL, inputs.ref_logprobs.detach())
    return merged, torch.logaddexp(log_q, own.to(log_q))


def refuse_beyond(ids: Sequence[int], size: int) -> None:
    """Refuse stops that an output head lacks."""
    if max(ids, default=0) >= size:
        raise ValueError(
            f"stops.ids has {max(ids)}, and an output head has {size} entries: name ids that "
            "student and teacher have."
        )


def is_in(token_ids: Int[Tensor, "..."], ids: tuple[int, ...]) -> Bool[Tensor, "..."]:
    """Return which tokens are among the ids."""
    # One comparison per id: a tensor of the ids would need a copy to the device, and a wait.
    return torch.stack([token_ids == token for token in ids]).any(0)
