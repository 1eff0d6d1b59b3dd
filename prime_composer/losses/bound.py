"""Objectives: what a trainer calls with ``LossInputs``, one loss function or a weighted sum."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, Mean, Support, given
from prime_composer.full_vocabulary import WholeVocabulary
from prime_composer.losses.config import LossConfig, Term, loss_type
from prime_composer.losses.needs import require_inputs
from prime_composer.losses.registry import LOSS_FNS
from prime_composer.losses.shared.modifiers import Modifier
from prime_composer.losses.shared.reductions import summed_over_ranks


class Objective:
    """A loss function with its config, its modifiers and its state; or a weighted sum of such.

    Metrics have ``prefix`` in front of the function's own names, and ``folder`` in front of those
    of modifiers.
    """

    def __init__(
        self, config: LossConfig, section: str = "loss", prefix: str | None = None, folder: str = ""
    ):
        self.config = config
        self.section = section  # recipe section of the config, for messages
        self._prefix = f"{config.type}/" if prefix is None else prefix
        self._folder = folder
        self.terms = {term.name: (term, self._bound(term)) for term in config.terms}
        self._fn = None if self.terms else _function_of(config)
        self.state = None if self.terms else config.make_state()
        self._step_total: Tensor | None = None

    def _bound(self, term: Term) -> "Objective":
        section = f"{self.section}.{term.key}" if term.key else self.section
        if not term.mixed:
            folder = f"{self._prefix}{term.name}/"
            return Objective(term.loss, section, folder, folder)
        own = f"{self._folder}{term.loss.type}/" if term.key else self._prefix
        return Objective(term.loss, section, own, self._folder)

    @property
    def stateful(self) -> bool:
        """Whether a schedule advances with ``end_step``."""
        return self.state is not None or any(one.stateful for _, one in self.terms.values())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the SUM of the loss over the mask, and its metrics by full name.

        A token of the mask whose teacher log-prob is NaN makes the sum NaN: a missing log-prob must
        never be 0.0, which means probability 1.
        """
        _check(inputs, self.config, self.section)
        if self.terms:
            return self._sum(inputs)
        inputs = dataclasses.replace(inputs, support=_requested(inputs, self.config))
        step_mask = inputs.loss_mask  # as a trainer counts: a removed token is one of weight 0
        inputs, of_modifiers = _modified(inputs, self.config.modifiers)
        with_state = () if self.state is None else (self.state,)
        outputs = given(self._fn)(inputs, self.config, *with_state)
        if self.stateful and outputs.loss.requires_grad:  # an evaluation is no step
            part = torch.stack([outputs.loss.detach().double(), step_mask.sum().double()])
            self._step_total = part if self._step_total is None else self._step_total + part
        return LossOutputs(
            loss=outputs.loss,
            metrics=_prefixed(outputs.metrics, self._prefix)
            | _prefixed(of_modifiers, self._folder),
        )

    def _sum(self, inputs: LossInputs) -> LossOutputs:
        """Return the sum of weight times each term's sum, and the metrics of all terms."""
        inputs, metrics = _modified(inputs, self.config.modifiers)
        losses = []
        for name, (term, objective) in self.terms.items():
            outputs = objective(inputs)
            losses.append(term.weight * outputs.loss)
            metrics |= outputs.metrics
            if not term.mixed:
                tokens = inputs.loss_mask.sum()
                mean = Mean(outputs.loss / tokens.clamp(min=1), tokens)
                metrics[f"{self._prefix}{name}/loss"] = mean
        return LossOutputs(loss=sum(losses[1:], losses[0]), metrics=metrics)

    def end_step(self) -> None:
        """Advance the schedules, once per optimizer step. Every rank has to call it.

        A state advances by its own loss per token of the step's calls with a gradient, within a sum
        too.
        """
        for _, objective in self.terms.values():
            objective.end_step()
        if self.state is not None:
            total = self._step_total
            self._step_total = None
            no_tokens = torch.zeros(2, dtype=torch.double)
            loss, tokens = summed_over_ranks(no_tokens if total is None else total).tolist()
            if tokens:
                self.state.end_step(loss / tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedules as JSON values."""
        if self.state is not None:
            return self.state.state_dict()
        return {name: one.state_dict() for name, (_, one) in self.terms.items() if one.stateful}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        if self.state is not None:
            return self.state.load_state_dict(state)
        if self.terms and state.keys() - self.terms.keys():
            raise ValueError(
                f"[{self.section}]: the checkpoint has loss states of {', '.join(state)}, and this "
                f"loss has the terms {', '.join(self.terms)}: it was written by another recipe or "
                "an older version. Start a new run."
            )
        for name, (_, objective) in self.terms.items():
            if name in state:
                objective.load_state_dict(state[name])


def setup_loss_fn(config: LossConfig, section: str = "loss") -> Objective:
    """Bind a config, from the recipe's ``section``: the result is called with ``LossInputs``.

    Raises:
        ValueError: the config's class is not registered, and its ``type`` names no loss from
            outside.
    """
    return Objective(config, section)


def _function_of(config: LossConfig) -> Any:
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
        require_inputs(config, available, "call", section=section)
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
