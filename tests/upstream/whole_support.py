"""A loss from outside the package that reads log-probs of the whole vocabulary.

Losses of the package compare whole vocabularies by hidden states.
"""

from typing import Literal

from prime_composer import LossInputs, LossOutputs
from prime_composer.losses import SupportLossConfig

NAME = "tests.upstream.whole_support:margin"
FULL = {"type": NAME, "k": "full"}


class MarginConfig(SupportLossConfig):
    type: Literal["tests.upstream.whole_support:margin"] = NAME


def margin(inputs: LossInputs, config: MarginConfig) -> LossOutputs:
    """Return the SUM of log max p - log p at the teacher's most probable token."""
    assert inputs.support is not None
    support = inputs.support.masked(inputs.loss_mask)
    best = support.teacher_logprobs.argmax(-1, keepdim=True)
    log_p = support.student_logprobs
    gap = log_p.amax(-1) - log_p.gather(-1, best).squeeze(-1)
    return LossOutputs(loss=gap[inputs.loss_mask].sum(), metrics={})
