"""Compare the sampler's log-probs with the trainer's own, on the tokens of every on-policy step.

A sampler that stopped taking weights samples from an old policy. Its tokens look like any others.
Only the policy that trains can tell, and its log-probs of the same tokens are at hand anyway.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.recipe.schema import Recipe

MISMATCH_LIMITS = {"float32": 1e-6, "bfloat16": 0.05}
"""Largest KL(mu || trainer) of a step in nats per token, by the trainer's dtype.

Measured with recipes/gsm8k_opd.toml on a CPU: up to 8e-12 in float32, and in bfloat16 1.2e-3 on
vLLM and 2.9e-3 on transformers (16 rollouts per step). A sampler that is one step behind (lr 1e-3)
has 9e-3, two steps 0.03, three steps 0.08. So it is seen in the first step that uses old weights in
float32, and in the third one in bfloat16. The preflight's 1e-4 nat in float32 would be a KL of
5e-9. Larger models in bfloat16 are reported at 1e-3 to 1e-2.
"""

FEW_TOKENS = 64
"""Tokens that a step counts as at least, so that one improbable token in bfloat16 is no alarm."""

METRIC = "sampler/mismatch_kl"


class SamplerMismatch(ValueError):
    """The sampler's probabilities are not the trainer's; the message says by how much."""


@dataclass(frozen=True)
class SamplerCheck:
    """How far the sampler may be from the trainer, in a recipe where both compute one distribution.

    At another temperature than 1, or with top_p below 1, mu is another distribution than the
    trainer's, and the loss path has no log-probs of it. There the canary alone compares the two.

    Attributes:
        limit: largest KL(mu || trainer) of a step, in nats per token.
        dtype: the trainer's, for the message.
        with_solutions: whether some tokens are the data's, which have no mu.
    """

    limit: float
    dtype: str
    with_solutions: bool = False

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> "SamplerCheck | None":
        """Return the check of a recipe; None where mu is not the trainer's distribution."""
        rollout, dtype = recipe.rollout, recipe.trainer.dtype
        if rollout.temperature != 1 or rollout.top_p < 1:
            return None
        return cls(MISMATCH_LIMITS[dtype], dtype, with_solutions=rollout.student_fraction < 1)


@dataclass
class Mismatch:
    """The KL of a step, added up over its micro-batches.

    With r = log p - log mu of a token sampled from mu, KL(mu || p) is estimated by the mean of

        exp(r) - 1 - r

    It is unbiased, and never negative (k3 of http://joschu.net/blog/kl-approx.html).

    Attributes:
        check: the limit, and whose tokens have no mu.
    """

    check: SamplerCheck
    _sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    _tokens: int = 0

    def add(self, inputs: LossInputs) -> None:
        """Add the tokens of a micro-batch. Masked tokens and the data's solutions are left out."""
        compared = inputs.loss_mask
        if self.check.with_solutions:
            compared = compared & ~inputs.inference_logprobs.isnan()
        log_ratio = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
        log_ratio = log_ratio[compared].double()
        self._sum = self._sum.to(log_ratio.device) + (log_ratio.expm1() - log_ratio).sum()
        self._tokens += log_ratio.shape[0]

    @property
    def kl(self) -> float:
        """The estimate in nats per token; 0 without a token."""
        return float(self._sum) / max(self._tokens, 1)

    def result(self, step: int) -> dict[str, float]:
        """Return the step's metric; empty where no token was sampled.

        Raises:
            SamplerMismatch: the KL is above the limit, or not a number.
        """
        if not self._tokens:
            return {}
        kl = self.kl
        if not kl * min(1.0, self._tokens / FEW_TOKENS) <= self.check.limit:
            raise SamplerMismatch(
                f"step {step}: the sampler's probabilities are not the student's: KL {kl:.2g} nat "
                f"per token on the step's {self._tokens} sampled tokens (at most "
                f"{self.check.limit:.0e} in {self.check.dtype}). The sampler has other weights or "
                "caches than the trainer, so restart its server (the [rollout] table) and continue "
                "from the last checkpoint"
            )
        return {METRIC: kl}
