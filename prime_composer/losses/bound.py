"""Bound losses: what a trainer calls with ``LossInputs``, one loss function or a weighted sum."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from prime_composer.contract import Count, LossInputs, LossOutputs, PairMean, Support, given
from prime_composer.losses.config import LossConfig, SupportRequest, loss_type
from prime_composer.losses.needs import require
from prime_composer.losses.registry import LOSS_FNS
from prime_composer.losses.shared.modifiers import PositionWeights, SpecialTokenMask
from prime_composer.losses.shared.reductions import summed_over_ranks

REMEDIES = {
    "ref_logprobs": "Configure a [teacher] that scores the student's tokens.",
    "support": "Configure a [teacher]: its scorer returns the top-K support of each position.",
    "hidden_states": (
        "Configure a [teacher] on this machine, or one that prime-rl teacher serves; or set k to a "
        "number."
    ),
    "advantages": (
        "Configure rewards: [rollout] group_size of at least 2 and a dataset with answers."
    ),
    "credit": "Pass LossInputs.credit, computed from whole groups by the loss's config.credit.",
    "contrast_logprobs": (
        "Configure [teacher.policy], whose wrong hints are wrong rollouts of the same group."
    ),
    "token_ids": "Pass LossInputs.token_ids.",
    "segment_ids": (
        "Preference losses read pairs of sequences: pass LossInputs.segment_ids "
        "(2i chosen, 2i + 1 rejected)."
    ),
    "by_teacher": "Pass LossInputs.by_teacher: which tokens are the teacher's.",
    "replay": (
        "Configure a source of preference pairs, or set the weight of the replay channel to 0."
    ),
}
"""Remedy of each need where a trainer's call lacks it."""


@runtime_checkable
class Objective(Protocol):
    """What a trainer calls: a bound loss or a weighted sum of them.

    Attributes:
        config: the config that it was made from.
        section: recipe section of the config, for messages.
        stateful: a schedule advances with ``end_step``, and ``state_dict`` is not empty.
    """

    config: LossConfig
    section: str
    stateful: bool

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the SUM of the loss over the mask, and its metrics by full name."""

    def end_step(self) -> None:
        """Advance the schedules, once per optimizer step. Every rank has to call it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedules as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class StepMean:
    """Loss per token of one optimizer step, over its micro-batches and over all ranks."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, loss: Tensor, mask: Tensor) -> None:
        """Add the sum of one micro-batch, and its tokens."""
        part = torch.stack([loss.detach().double(), mask.sum().double()])
        self._total = part if self._total is None else self._total + part

    def take(self) -> float | None:
        """Return the mean since the last call, None without a token. Every rank has to call it."""
        total = torch.zeros(2, dtype=torch.double) if self._total is None else self._total
        self._total = None
        loss, tokens = summed_over_ranks(total).tolist()
        return loss / tokens if tokens else None


class BoundLoss:
    """A loss function with its config, its modifiers and its state.

    Args:
        config: the knobs, without ``rl_mix``.
        fn: ``fn(inputs, config)``, or ``fn(inputs, config, state)`` where the config makes a state.
        section: recipe section of the config, for messages.
        prefix: put in front of the loss's own metrics, ``<type>/`` by default.
        modifier_prefix: put in front of the modifiers' metrics.
    """

    def __init__(
        self,
        config: LossConfig,
        fn: Callable[..., LossOutputs],
        section: str = "loss",
        prefix: str | None = None,
        modifier_prefix: str = "",
    ):
        self.config = config
        self.section = section
        self.state = config.make_state()
        self.stateful = self.state is not None
        self._fn = fn
        self._prefix = f"{config.type}/" if prefix is None else prefix
        self._modifier_prefix = modifier_prefix
        self._step_mean = StepMean()

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the SUM of the loss over the mask, and its metrics by full name.

        A token of the mask whose teacher log-prob is NaN makes the sum NaN: the trainer stops at
        the rollout. A missing log-prob must never be 0.0, which means probability 1.

        Raises:
            ValueError: an input that the loss needs is missing, or advantages carry a graph.
        """
        _check(inputs, self.config, self.section)
        support = _requested(inputs.support, self.config.support)
        inputs = dataclasses.replace(inputs, support=support)
        step_mask = inputs.loss_mask  # as a trainer counts: a removed token is one of weight 0
        inputs, modifier_metrics = _modified(inputs, self.config.modifiers)
        outputs = (
            self._fn(inputs, self.config)
            if self.state is None
            else self._fn(inputs, self.config, self.state)
        )
        if self.stateful and outputs.loss.requires_grad:  # an evaluation is no step
            self._step_mean.add(outputs.loss, step_mask)
        return LossOutputs(
            loss=outputs.loss,
            metrics=_prefixed(outputs.metrics, self._prefix)
            | _prefixed(modifier_metrics, self._modifier_prefix),
        )

    def end_step(self) -> None:
        """Advance the state by the loss per token of the step's calls with a gradient."""
        if self.state is not None:
            mean_loss = self._step_mean.take()
            if mean_loss is not None:
                self.state.end_step(mean_loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {} if self.state is None else self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        if self.state is not None:
            self.state.load_state_dict(state)


@dataclass(frozen=True)
class Term:
    """One term of a weighted sum.

    Attributes:
        objective: the bound loss, or a sum itself.
        weight: factor in the sum.
        on_pairs: the term reads ``LossInputs.replay``.
        mean_metric: name of the metric for the term's loss per token, None for no such metric.
    """

    objective: Objective
    weight: float
    on_pairs: bool = False
    mean_metric: str | None = None


class WeightedSum:
    """Weighted sum of objectives over the same rollouts (and over preference pairs).

    Each term keeps its own schedule, which reads the term's own mean loss and not the sum's.

    Args:
        config: the config that the sum was made from.
        section: recipe section of the config, for messages.
        terms: the terms by name.
        modifiers: applied to the inputs of all terms.
    """

    def __init__(
        self,
        config: LossConfig,
        section: str,
        terms: Mapping[str, Term],
        modifiers: Iterable[SpecialTokenMask | PositionWeights] = (),
    ):
        self.config = config
        self.section = section
        self.terms = dict(terms)
        self.stateful = any(term.objective.stateful for term in self.terms.values())
        self._modifiers = tuple(modifiers)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the sum of weight times each term's sum, and the metrics of all terms.

        Raises:
            ValueError: an input that a term needs is missing, or advantages carry a graph.
        """
        _check(inputs, self.config, self.section)
        inputs, metrics = _modified(inputs, self._modifiers)
        # The anchor keeps a micro-batch of pairs alone in the graph of the policy's log-probs.
        loss = torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0).sum() * 0.0
        for term in self.terms.values():
            outputs = term.objective(given(inputs.replay) if term.on_pairs else inputs)
            loss = loss + term.weight * outputs.loss
            metrics |= _per_pair(outputs.metrics) if term.on_pairs else outputs.metrics
            if term.mean_metric is not None:
                tokens = inputs.loss_mask.sum().clamp(min=1)
                metrics[term.mean_metric] = outputs.loss.detach() / tokens
        return LossOutputs(loss=loss, metrics=metrics)

    def end_step(self) -> None:
        """Advance the schedule of each term by the term's own mean loss."""
        for term in self.terms.values():
            term.objective.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the terms that have one, by name."""
        return {
            name: term.objective.state_dict()
            for name, term in self.terms.items()
            if term.objective.stateful
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: the state is of another sum, or of a checkpoint in an older format.
        """
        if state.keys() - self.terms.keys():
            raise ValueError(
                f"[{self.section}]: the checkpoint has loss states of {', '.join(state)}, and this "
                f"loss has the terms {', '.join(self.terms)}: it was written by another recipe or "
                "an older version. Start a new run."
            )
        for name, term_state in state.items():
            self.terms[name].objective.load_state_dict(term_state)


def setup_loss_fn(config: LossConfig, section: str = "loss") -> Objective:
    """Bind a config: what it returns is called with ``LossInputs``.

    Args:
        config: config of a registered loss.
        section: recipe section of the config, for messages.

    Raises:
        ValueError: the config's class is not registered, and its ``type`` names no loss from
            outside.
    """
    return _bind(config, section, prefix=f"{config.type}/", modifier_prefix="")


def _bind(config: LossConfig, section: str, prefix: str, modifier_prefix: str) -> Objective:
    if config.rl_mix is not None:
        rl, (rl_weight, kd_weight) = config.rl_mix.loss, config.rl_mix.weights
        alone = config.model_copy(update={"rl_mix": None})
        rl_objective = _bind(
            rl, f"{section}.rl_mix.loss", f"{modifier_prefix}{rl.type}/", modifier_prefix
        )
        kd_objective = _bind(alone, section, prefix, modifier_prefix)
        terms = {"kd": Term(kd_objective, kd_weight), "rl": Term(rl_objective, rl_weight)}
        return WeightedSum(config, section, terms)
    if config.parts:
        terms = {}
        for part in config.parts:
            below = f"{prefix}{part.name}/"
            terms[part.name] = Term(
                _bind(part.loss, f"{section}.{part.key}", below, below),
                part.weight,
                on_pairs=part.on_pairs,
                mean_metric=None if part.on_pairs else f"{below}loss",
            )
        return WeightedSum(config, section, terms, config.modifiers)
    return BoundLoss(config, _function_of(config), section, prefix, modifier_prefix)


def _function_of(config: LossConfig) -> Callable[..., LossOutputs]:
    if type(config) not in LOSS_FNS and loss_type(config.type) is not type(config):
        raise ValueError(
            f"{type(config).__module__}.{type(config).__qualname__} is not the config of "
            f"{config.type!r}, which is {loss_type(config.type).__module__}."
            f"{loss_type(config.type).__qualname__}."
        )
    return LOSS_FNS[type(config)]


def _check(inputs: LossInputs, config: LossConfig, section: str) -> None:
    """Raise where an input that the loss needs is missing, or where advantages carry a graph."""
    available = {need for need in config.needs if getattr(inputs, need) is not None}
    if available != config.needs:
        require(config, available, REMEDIES, section)
    if inputs.advantages is not None and inputs.advantages.requires_grad:
        raise ValueError(
            f"[{section}] got advantages that carry a gradient. A divergence used as an advantage "
            "does not depend on the sampled token: its expected policy gradient is 0. Use it as a "
            "loss of its own, or detach a reward."
        )


def _modified(
    inputs: LossInputs, modifiers: Iterable[SpecialTokenMask | PositionWeights]
) -> tuple[LossInputs, dict[str, Tensor]]:
    """Apply the modifiers in order. Return the changed inputs and the modifiers' metrics."""
    metrics: dict[str, Tensor] = {}
    for modifier in modifiers:
        inputs, modifier_metrics = modifier.apply(inputs)
        metrics |= modifier_metrics
    return inputs, metrics


def _requested(support: Support | None, request: SupportRequest | None) -> Support | None:
    """Return the K ids that a loss asks for, of a support that another loss made larger."""
    if support is None or request is None or request.k == "full":
        return support
    if support.token_ids.shape[-1] <= request.k:
        return support
    if request.chosen_by == "student":
        index = support.student_logprobs.detach().topk(request.k, dim=-1).indices
        return Support(
            support.token_ids.gather(-1, index),
            support.teacher_logprobs.gather(-1, index),
            support.student_logprobs.gather(-1, index),
        )
    return Support(
        support.token_ids[:, : request.k],
        support.teacher_logprobs[:, : request.k],
        support.student_logprobs[:, : request.k],
    )


def _prefixed(metrics: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the metrics under full names. A graph, which would hold memory, is cut off."""
    return {
        f"{prefix}{name}": value.detach() if value.requires_grad else value
        for name, value in metrics.items()
    }


def _per_pair(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mark means over the tokens of pairs, which the trainer averages by pairs."""
    return {
        name: value if isinstance(value, (PairMean, Count)) else PairMean(value)
        for name, value in metrics.items()
    }
