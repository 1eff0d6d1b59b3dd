"""Bound losses: what a trainer calls with ``LossInputs``, one loss function or a weighted sum."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from prime_composer.contract import Count, LossInputs, LossOutputs, Mean, PairMean, Support, given
from prime_composer.full_vocabulary import WholeVocabulary
from prime_composer.losses.config import LossConfig, Part, loss_type
from prime_composer.losses.needs import require
from prime_composer.losses.registry import LOSS_FNS
from prime_composer.losses.shared.modifiers import Modifier
from prime_composer.losses.shared.reductions import summed_over_ranks


@runtime_checkable
class Objective(Protocol):
    """What a trainer calls: a bound loss or a weighted sum of them."""

    config: LossConfig  # that it was made from
    section: str  # recipe section of the config, for messages
    stateful: bool  # a schedule advances with ``end_step``

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the SUM of the loss over the mask, and its metrics by full name."""

    def end_step(self) -> None:
        """Advance the schedules, once per optimizer step. Every rank has to call it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedules as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class BoundLoss:
    """A loss function with its config, its modifiers and its state."""

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
        self._step_total: Tensor | None = None

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the SUM of the loss over the mask, and its metrics by full name.

        A token of the mask whose teacher log-prob is NaN makes the sum NaN: a missing log-prob must
        never be 0.0, which means probability 1.
        """
        _check(inputs, self.config, self.section)
        inputs = dataclasses.replace(inputs, support=_requested(inputs, self.config))
        step_mask = inputs.loss_mask  # as a trainer counts: a removed token is one of weight 0
        inputs, modifier_metrics = _modified(inputs, self.config.modifiers)
        if self.config.clamp is None:
            outputs = self._outputs(inputs)
        else:
            outputs, of_clamp = self.config.clamp.bounded(self._outputs, inputs, self.section)
            modifier_metrics |= of_clamp
        if self.stateful and outputs.loss.requires_grad:  # an evaluation is no step
            part = torch.stack([outputs.loss.detach().double(), step_mask.sum().double()])
            self._step_total = part if self._step_total is None else self._step_total + part
        return LossOutputs(
            loss=outputs.loss,
            metrics=_prefixed(outputs.metrics, self._prefix)
            | _prefixed(modifier_metrics, self._modifier_prefix),
        )

    def _outputs(self, inputs: LossInputs) -> LossOutputs:
        if self.state is None:
            return self._fn(inputs, self.config)
        return self._fn(inputs, self.config, self.state)

    def end_step(self) -> None:
        """Advance the state by the loss per token of the step's calls with a gradient."""
        if self.state is not None:
            total = self._step_total
            self._step_total = None
            no_tokens = torch.zeros(2, dtype=torch.double)
            loss, tokens = summed_over_ranks(no_tokens if total is None else total).tolist()
            if tokens:
                self.state.end_step(loss / tokens)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.state is not None:
            self.state.load_state_dict(state)


@dataclass(frozen=True)
class Term:
    """One bound term of a weighted sum."""

    part: Part  # its weight, and what it reads
    objective: Objective  # the bound loss, or a sum itself
    # name of the metric for the term's loss per token, None for no such metric
    mean_metric: str | None = None


class WeightedSum:
    """Weighted sum of objectives over the same rollouts (and over preference pairs).

    Each term keeps its own schedule, which reads the term's own mean loss and not the sum's.
    """

    def __init__(self, config: LossConfig, section: str, terms: Mapping[str, Term]):
        self.config = config
        self.section = section
        self.terms = dict(terms)
        self.stateful = any(term.objective.stateful for term in self.terms.values())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the sum of weight times each term's sum, and the metrics of all terms."""
        _check(inputs, self.config, self.section)
        inputs, metrics = _modified(inputs, self.config.modifiers)
        # The anchor keeps a micro-batch of pairs alone in the graph of the policy's log-probs.
        loss = torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0).sum() * 0.0
        for term in self.terms.values():
            on_pairs = term.part.on_pairs
            outputs = term.objective(given(inputs.replay) if on_pairs else inputs)
            loss = loss + term.part.weight * outputs.loss
            metrics |= _per_pair(outputs.metrics) if on_pairs else outputs.metrics
            if term.mean_metric is not None:
                tokens = inputs.loss_mask.sum()
                metrics[term.mean_metric] = Mean(outputs.loss / tokens.clamp(min=1), tokens)
        return LossOutputs(loss=loss, metrics=metrics)

    def end_step(self) -> None:
        """Advance the schedule of each term by the term's own mean loss."""
        for term in self.terms.values():
            term.objective.end_step()

    def state_dict(self) -> dict[str, Any]:
        return {
            name: term.objective.state_dict()
            for name, term in self.terms.items()
            if term.objective.stateful
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
    if not config.parts:
        return BoundLoss(config, _function_of(config), section, prefix, modifier_prefix)
    terms = {}
    for part in config.parts:
        if not part.mixed:
            own = of_modifiers = f"{prefix}{part.name}/"
        else:
            own = f"{modifier_prefix}{part.loss.type}/" if part.key else prefix
            of_modifiers = modifier_prefix
        below = part.section(section)
        mean_metric = None if part.mixed or part.on_pairs else f"{own}loss"
        terms[part.name] = Term(part, _bind(part.loss, below, own, of_modifiers), mean_metric)
    return WeightedSum(config, section, terms)


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
        require(config, available, "call", section)
    if inputs.advantages is not None and inputs.advantages.requires_grad:
        raise ValueError(
            f"[{section}] got advantages that carry a gradient. A divergence used as an advantage "
            "does not depend on the sampled token: its expected policy gradient is 0. Use it as a "
            "loss of its own, or detach a reward."
        )


def _modified(
    inputs: LossInputs, modifiers: Iterable[Modifier]
) -> tuple[LossInputs, dict[str, Tensor]]:
    """Apply the modifiers in order. Return the changed inputs and the modifiers' metrics."""
    metrics: dict[str, Tensor] = {}
    for modifier in modifiers:
        inputs, modifier_metrics = modifier.apply(inputs)
        metrics |= modifier_metrics
    return inputs, metrics


def _requested(inputs: LossInputs, config: LossConfig) -> Support | None:
    """Return the K ids that a loss asks for, or all of them where it needs hidden states."""
    support, request = inputs.support, config.support
    if inputs.hidden_states is not None and "hidden_states" in config.own_needs:
        return WholeVocabulary(inputs.hidden_states)
    if support is None or request is None:
        return None
    if request.k == "full":
        return support
    if support.token_ids.shape[-1] <= request.k:
        return support
    if request.chosen_by == "student":
        ranked = support.student_logprobs.detach()
        if support.known is not None:
            ranked = torch.where(support.known, ranked, -math.inf)
        return support.of_ids(ranked.topk(request.k, dim=-1).indices)
    first = torch.arange(request.k, device=support.token_ids.device)
    return support.of_ids(first.expand(support.token_ids.shape[0], -1))


def _prefixed(metrics: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the metrics under full names. A graph, which would hold memory, is cut off."""
    return {
        f"{prefix}{name}": value.detach() if value.requires_grad else value
        for name, value in metrics.items()
    }


def _per_pair(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mark means over pairs and over their tokens, which a step without pairs has none of."""
    return {
        name: value
        if isinstance(value, (PairMean, Count))
        else PairMean(value, getattr(value, "count", None))
        for name, value in metrics.items()
    }
