"""Compare the sampler's log-probs with the trainer's own, on the tokens of every on-policy step.

A sampler that stopped taking weights samples from an old policy. Its tokens look like any others.
Only the policy that trains can tell, and its log-probs of the same tokens are at hand anyway.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prime_composer.contract import LossInputs
from prime_composer.recipe.schema import Recipe

MISMATCH_LIMITS = {"float32": 1e-6, "bfloat16": 0.05}
"""Largest KL(mu || trainer) of a step in nats per token, by the trainer's dtype.

Measured with recipes/gsm8k_opd.toml on a CPU: up to 8e-12 in float32, and in bfloat16 1.2e-3 on
vLLM and 2.9e-3 on transformers. A sampler that is one step behind (lr 1e-3) has 6e-4 to 0.018 in
either dtype, four steps up to 0.08. So it is seen in the first step that uses old weights in
float32, and in the fourth one or later in bfloat16. Larger models in bfloat16 are reported at 1e-3
to 1e-2.
"""

FEW_TOKENS = 64  # Counted at least: one improbable token in bfloat16 is no alarm

LARGEST_RATIO = 2.0  # Nats that a token's log-ratio counts with at most: one of 5 outweighs 2,000

METRIC = "sampler/mismatch_kl"


class SamplerMismatch(ValueError):
    """The sampler's probabilities are not the trainer's; the message says by how much."""


@dataclass(frozen=True)
class SamplerCheck:
    """How far the sampler may be from the trainer, in a recipe where both compute one distribution.

    With top_p below 1 mu is another distribution than the trainer's. There ``local.watch`` alone
    compares the two. ``limit`` is the largest KL(mu || trainer) of a step, in nats per token, which
    goes with 1/T^2. It is infinite with ``rollout.ahead``. ``with_solutions``: some tokens are the
    data's, which have no mu.
    """

    limit: float
    dtype: str
    with_solutions: bool = False
    served: bool = False

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> "SamplerCheck | None":
        """Return the check of a recipe; None where mu is not the trainer's distribution."""
        rollout = recipe.rollout
        if rollout.top_p < 1:
            return None
        check = cls.of_completions(recipe, rollout.student_fraction < 1, rollout.temperature)
        return replace(check, limit=math.inf) if rollout.ahead else check

    @classmethod
    def of_completions(
        cls, recipe: Recipe, with_solutions: bool = False, temperature: float = 1.0
    ) -> "SamplerCheck":
        """Return the check of tokens that are sampled at top-p 1."""
        dtype, limit = recipe.trainer.dtype, recipe.checks.mismatch
        return cls(
            MISMATCH_LIMITS[dtype] / temperature**2 if limit is None else limit,
            dtype,
            with_solutions,
            served=recipe.rollout.url is not None,
        )

    @property
    def remedy(self) -> str:
        """What a user does about a sampler that is too far away."""
        afresh = "Restart its server" if self.served else "Continue in a new process"
        return (
            f"{afresh} (the [rollout] table). Where a larger model is only rounded in "
            "another way, raise checks.mismatch"
        )


@dataclass
class Mismatch:
    """The KL of a step, added up over its micro-batches.

    With r = log p - log mu of a token sampled from mu, KL(mu || p) is estimated by the mean of

        exp(r) - 1 - r

    It is unbiased, and never negative (k3 of http://joschu.net/blog/kl-approx.html). A few tokens
    far in the tails can make it any number, so that the step is judged by ``capped_kl``.
    """

    check: SamplerCheck
    _sums: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    _tokens: int = 0

    def add(self, inputs: LossInputs) -> None:
        """Add the tokens of a micro-batch. Masked tokens and the data's solutions are left out."""
        compared = inputs.loss_mask
        if self.check.with_solutions:
            compared = compared & ~inputs.inference_logprobs.isnan()
        log_ratio = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
        log_ratio = log_ratio[compared].double()
        ratios = torch.stack([log_ratio, log_ratio.clamp(-LARGEST_RATIO, LARGEST_RATIO)])
        self._sums = self._sums.to(ratios.device) + (ratios.expm1() - ratios).sum(dim=1)
        self._tokens += log_ratio.shape[0]

    @property
    def kl(self) -> float:
        """The estimate in nats per token; 0 without a token."""
        return float(self._sums[0]) / max(self._tokens, 1)

    @property
    def capped_kl(self) -> float:
        """The same with log-ratios up to ``LARGEST_RATIO``; NaN where one is not finite."""
        capped = float(self._sums[1]) / max(self._tokens, 1)
        return capped if math.isfinite(float(self._sums[0])) else math.nan

    def result(self, step: int) -> dict[str, float]:
        """Return the step's metric; empty where no token was sampled."""
        if not self._tokens:
            return {}
        kl = self.capped_kl
        if not kl * min(1.0, self._tokens / FEW_TOKENS) <= self.check.limit:
            raise SamplerMismatch(
                f"step {step}: the sampler's probabilities are not the student's: KL {kl:.2g} nat "
                f"per token on the step's {self._tokens} sampled tokens (at most "
                f"{self.check.limit:.0e} in {self.check.dtype}). The sampler has other weights or "
                f"caches than the trainer. {self.check.remedy}"
            )
        return {METRIC: self.kl}
