"""One of our losses in prime-rl's terms: its inputs translated, its tokens counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.losses.bound import Objective
from prime_composer.losses.shared.metrics import DISTILLATION_KL, distillation_kl
from prime_composer.losses.shared.reductions import summed_over_ranks
from prime_composer.upstream.log import log
from prime_composer.upstream.settings import EXAMPLE, SET_SWITCH
from prime_composer.upstream.trainer.batches import distilled_of
from prime_composer.upstream.trainer.validity import check_own
from prime_composer.upstream.versions.records import LossContract
from prime_composer.upstream.wire import MARK, NO_ADVANTAGE

PATIENCE = 10  # Steps without a token of the loss, where others may come, before it is an error


class RegisteredLoss:
    """One of our losses, called with prime-rl's ``LossInputs``, returning its ``LossOutputs``."""

    def __init__(
        self,
        objective: Objective,
        contract: LossContract,
        outputs: type,
        called: Callable[[], None],
        aligned: Callable[[Tensor], dict[str, Any]] | None = None,
        in_file: bool = False,
        teachers_mixed: bool = False,
    ):
        self.objective = objective
        self.contract = contract
        self.in_file = in_file
        self.teachers_mixed = teachers_mixed
        self.compares = objective.config.compares_with_teacher
        self.distils = contract.distils(objective.config)  # called on distillation tokens, not rl
        self.seen = False  # a token of this loss has come, on any rank
        self._outputs = outputs
        self._called = called
        self._aligned = aligned

    @property
    def label(self) -> str:
        """The loss by section and type, as error messages begin."""
        return f"[{self.objective.section}] type = {self.objective.config.type!r}"

    def __call__(self, inputs: Any) -> Any:
        """Return the loss of one sequence: the SUM over ``loss_mask``, with ``loss_weights``."""
        self._called()
        fields = {"ref_logprobs": getattr(inputs, self.contract.ref_field)}
        if self._aligned is not None:
            fields |= self._aligned(inputs.trainer_logprobs)
        ref_logprobs, environment = fields["ref_logprobs"], fields.pop("environment", None)
        advantages = inputs.advantages
        if self.compares and not self.distils and advantages is not None:
            advantages = advantages.masked_fill(advantages == NO_ADVANTAGE, 0.0)
        if self.compares and ref_logprobs is not None:
            check_own(self.label, ref_logprobs, inputs.loss_mask)
        own = LossInputs(
            trainer_logprobs=inputs.trainer_logprobs,
            inference_logprobs=inputs.inference_logprobs,
            advantages=advantages,
            loss_mask=inputs.loss_mask,
            loss_weights=getattr(inputs, "loss_weights", None),
            **fields,
        )
        out = self.objective(own)
        # prime-rl averages all metrics alike: how ours are averaged is no use to it.
        metrics = {name: value.as_subclass(Tensor) for name, value in out.metrics.items()}
        if self.compares and ref_logprobs is not None:
            kl, compared = distillation_kl(own)
            # By token, as prime-rl's mismatch_kl: its mean is then that of the step's tokens.
            metrics[DISTILLATION_KL] = kl[compared]
            if environment is not None:
                metrics[f"{DISTILLATION_KL}/{environment}"] = kl[compared]
        return self._outputs(loss=out.loss, metrics=metrics)

    def rl_tokens(self, inputs: Any) -> Any:
        """Return the loss of one sequence of rl tokens, where ``[trainer.loss]`` names this loss.

        One that compares with a teacher is refused: in a bin of both kinds, prime-rl fills the
        teacher's log-probs of rl tokens with 0.0.
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
        """Refuse distillation tokens, where the loss reads a teacher for rl tokens."""
        raise ValueError(
            f"{self.label} reads rewards and a teacher for the same tokens, and the orchestrator "
            "sends tokens for prime-rl's own distillation: it runs without the adapter. "
            f"{SET_SWITCH}"
        )

    def tokens_in(self, tensors: Mapping[str, Any]) -> int:
        """Return how many tokens of a micro-batch, which is on the CPU, are for this loss."""
        if not self.contract.separates_kinds:  # a batch has tokens of one kind
            own = {"rl": not self.distils or self.in_file, "opd": self.distils}
            if not own.get(tensors["training_mode"], False):
                return 0
        return int(distilled_of(tensors, not self.distils).sum())

    def batch_came(self, batches: Sequence[Mapping[str, Any]], step: int) -> list[int]:
        """Return how many tokens of each micro-batch are for this loss. All ranks call it."""
        tokens = [self.tokens_in(tensors) for tensors in batches]
        if not self.seen:
            self._check_tokens(sum(tokens), batches, step)
        return tokens

    def _check_tokens(self, own: int, batches: Sequence[Mapping[str, Any]], step: int) -> None:
        # Sums over all ranks: one rank may have nothing but padding.
        counts = torch.tensor([own, *self._scored_and_marked(batches)])
        tokens, scored, marked = summed_over_ranks(counts).tolist()
        if tokens > 0:
            if self.teachers_mixed and scored > 0 and marked == 0:
                raise RuntimeError(
                    f"prime_composer: [{self.objective.section}] adapter = true: this run's "
                    "teachers are mixed or routed by the adapter, or have tokenizers of their own, "
                    "and the orchestrator runs without it: prime-rl has asked one of them for all, "
                    f"in the student's tokens. {SET_SWITCH}"
                )
            self.seen = True
            return
        patience = PATIENCE if self._has_other_tokens() else 1
        name = self.objective.config.type
        if step < patience:
            log(
                f"{name} has no token in the batch of step {step} (the run ends after {patience} "
                "such steps)"
            )
            return
        which = "the first batch" if patience == 1 else f"the first {patience} batches"
        kind = "distillation" if self.distils else "rl"
        key = self.contract.distillation_key if self.compares else self.contract.rl_key
        if self.compares and not self.distils:
            key += f", and [trainer.loss] names this loss. {SET_SWITCH}".rstrip(".")
        raise RuntimeError(
            f"prime_composer: {self.label} is registered with prime-rl, and {which} had no token "
            f"for it on any rank: it is called on {kind} tokens. These come from {key}."
        )

    def _scored_and_marked(self, batches: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return how many sequences have teacher scores, and how many of them the mark."""
        firsts: list[Tensor] = []
        for tensors in batches if self.teachers_mixed else ():
            scores = tensors[self.contract.ref_field]
            if scores is not None and self.tokens_in(tensors):
                lengths = torch.tensor(tensors["sequence_lengths"])
                firsts.append(scores[0][lengths.cumsum(0) - lengths])
        first = torch.cat(firsts) if firsts else torch.empty(0)
        return len(first), int((first == MARK).sum())

    def _has_other_tokens(self) -> bool:
        """Return whether a batch may have tokens for other losses alone."""
        if self.compares and not self.distils:
            return self.in_file  # [trainer.loss] has to name a loss of rewards and a teacher
        return not self.in_file or (self.contract.separates_kinds and not self.distils)
