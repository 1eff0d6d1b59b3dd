"""One of our losses in prime-rl's terms: its inputs translated, its calls counted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.losses.bound import Objective
from prime_composer.losses.shared.reductions import summed_over_ranks
from prime_composer.upstream.log import log
from prime_composer.upstream.settings import EXAMPLE, SET_SWITCH
from prime_composer.upstream.trainer.batches import Aligned
from prime_composer.upstream.trainer.validity import check_own
from prime_composer.upstream.versions import LossContract
from prime_composer.upstream.wire import MARK

PATIENCE = 10
"""Steps without a token of the loss, in a run that may have other tokens, before it is an error."""


class RegisteredLoss:
    """One of our losses, callable with prime-rl's ``LossInputs`` and returning its ``LossOutputs``.

    The first step is checked when the second batch is asked for, so a run of a single step is not.

    Args:
        objective: the bound loss.
        contract: prime-rl's loss contract.
        outputs: prime-rl's ``LossOutputs``.
        aligned: returns what belongs to a sequence, given its ``trainer_logprobs``; None without
            the whole-run adapter.
        in_file: ``[trainer.loss]`` names this loss; else rl tokens have a loss of their own.
        teachers_mixed: the orchestrator has to run with the adapter too, whatever the loss reads.

    Attributes:
        compares: the loss compares with a teacher.
        distils: it is called on distillation tokens, not on rl tokens.
        calls: number of calls since the last step.
        seen: a token of this loss has come, on any rank.
    """

    def __init__(
        self,
        objective: Objective,
        contract: LossContract,
        outputs: type,
        aligned: Callable[[Tensor], Aligned] | None = None,
        in_file: bool = False,
        teachers_mixed: bool = False,
    ):
        self.objective = objective
        self.contract = contract
        self.in_file = in_file
        self.teachers_mixed = teachers_mixed
        self.compares = objective.config.compares_with_teacher
        self.distils = contract.distils(objective.config)
        self.calls = 0
        self.seen = False
        self._outputs = outputs
        self._aligned = aligned
        self._token_counts: list[Tensor] = []
        self._first_scores: list[Tensor] = []

    @property
    def label(self) -> str:
        """The loss by section and type, as error messages begin."""
        return f"[{self.objective.section}] type = {self.objective.config.type!r}"

    def __call__(self, inputs: Any) -> Any:
        """Return the loss of one sequence: the SUM over ``loss_mask``, with ``loss_weights``.

        Raises:
            ValueError: the teacher's log-prob of a token that trains is none.
        """
        sent = ref_logprobs = getattr(inputs, self.contract.ref_field)
        found = Aligned() if self._aligned is None else self._aligned(inputs.trainer_logprobs)
        if found.ref_logprobs is not None:
            ref_logprobs = found.ref_logprobs
        if self.compares and ref_logprobs is not None:
            check_own(self.label, ref_logprobs, inputs.loss_mask)
        out = self.objective(
            LossInputs(
                trainer_logprobs=inputs.trainer_logprobs,
                inference_logprobs=inputs.inference_logprobs,
                ref_logprobs=ref_logprobs,
                advantages=inputs.advantages,
                loss_mask=inputs.loss_mask,
                loss_weights=getattr(inputs, "loss_weights", None),
                support=found.support,
                hidden_states=found.hidden_states,
                token_ids=found.token_ids,
            )
        )
        self.calls += 1
        if not self.seen:
            self._token_counts.append(inputs.loss_mask.sum())
            if sent is not None:
                self._first_scores.append(sent[:1])
        # prime-rl averages all metrics alike: how ours are averaged is no use to it.
        metrics = {name: value.as_subclass(Tensor) for name, value in out.metrics.items()}
        return self._outputs(loss=out.loss, metrics=metrics)

    def rl_tokens(self, inputs: Any) -> Any:
        """Return the loss of one sequence of rl tokens, where ``[trainer.loss]`` names this loss.

        Raises:
            ValueError: rl tokens reached a loss that compares with a teacher. Where a run has both
                kinds, prime-rl fills the teacher's log-probs of rl tokens in a shared bin with 0.0.
        """
        unscored = self.distils and self.contract.separates_kinds
        if unscored and bool(inputs.loss_mask.any()):  # batches of padding come here too
            raise ValueError(
                f"{self.label} compares with a teacher, and tokens of an rl environment reached "
                'it. Distillation environments have algo.type = "opd" (or "opsd"). In a run that '
                "has both kinds, leave [trainer.loss] to the loss of rl tokens, and name this one "
                f"in the environment: {EXAMPLE} rl @ FILE"
            )
        return self(inputs)

    def no_distillation_tokens(self, inputs: Any) -> Any:
        """Refuse distillation tokens, where the loss reads a teacher for rl tokens.

        Raises:
            ValueError: the orchestrator runs without the adapter.
        """
        raise ValueError(
            f"{self.label} reads rewards and a teacher for the same tokens, and the orchestrator "
            "sends tokens for prime-rl's own distillation: it runs without the adapter. "
            f"{SET_SWITCH}"
        )

    def end_step(self, step: int) -> None:
        """Close a step: check the first one with tokens, advance a schedule. All ranks call it.

        Args:
            step: number of the steps of this process so far, at least 1.

        Raises:
            RuntimeError: no token came on any rank in the first step (in a run that may have tokens
                of another loss, in the first ten). Or the orchestrator runs without the adapter,
                and this run's teachers are mixed.
        """
        if not self.seen:
            self._check_tokens(step)
        self.objective.end_step()
        self.calls = 0
        self._token_counts.clear()
        self._first_scores.clear()

    def _check_tokens(self, step: int) -> None:
        calls, tokens, scored, marked = self._global_counts()
        name = self.objective.config.type
        if tokens > 0:
            if self.teachers_mixed and scored > 0 and marked == 0:
                raise RuntimeError(
                    f"prime_composer: [{self.objective.section}] adapter = true: this run's "
                    "teachers are mixed or routed by the adapter, and the orchestrator runs "
                    f"without it: prime-rl has asked one of them for all. {SET_SWITCH}"
                )
            self.seen = True
            when = "the first step" if step == 1 else f"step {step}, the first with tokens for it"
            log(f"{name} was called {calls} times on {tokens} tokens in {when}, on all ranks")
            return
        patience = PATIENCE if self._has_other_tokens() else 1
        if step < patience:
            log(
                f"{name} was not called in step {step}: no token for it in the batch (the run ends "
                f"after {patience} such steps)"
            )
            return
        steps = "the first optimizer step" if patience == 1 else f"the first {patience} steps"
        kind = "distillation" if self.distils else "rl"
        key = self.contract.distillation_key if self.compares else self.contract.rl_key
        if self.compares and not self.distils:
            key += f", and [trainer.loss] names this loss. {SET_SWITCH}".rstrip(".")
        raise RuntimeError(
            f"prime_composer: {self.label} was registered with prime-rl and never called in "
            f"{steps}: no token was sent to the {kind} loss. These tokens come from {key}."
        )

    def _has_other_tokens(self) -> bool:
        """Return whether a batch may have tokens for other losses alone."""
        if self.compares and not self.distils:
            return self.in_file  # [trainer.loss] has to name a loss of rewards and a teacher
        return not self.in_file or (self.contract.separates_kinds and not self.distils)

    def _global_counts(self) -> tuple[int, int, int, int]:
        """Return this step's calls, tokens, sequences with teacher scores, and marked sequences.

        Sums over all ranks: one rank may have had nothing but padding.
        """
        marked = [(first == MARK).sum() for first in self._first_scores]
        tokens = sum(int(count) for count in self._token_counts)
        counts = [self.calls, tokens, len(marked), sum(int(count) for count in marked)]
        calls, tokens, scored, with_mark = summed_over_ranks(torch.tensor(counts)).tolist()
        return calls, tokens, scored, with_mark
