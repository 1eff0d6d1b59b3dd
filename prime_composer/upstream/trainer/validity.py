"""The trainer's own check of a teacher's numbers, whoever put them into the batch.

With the adapter, the orchestrator has checked each answer (``backends.answers``), except for ids
beyond the vocabulary, which it does not know. Without the adapter nobody has.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prime_composer.backends.answers import IMPOSSIBLE, LOGPROB_TOLERANCE, MASS_TOLERANCE
from prime_composer.contract import Scores
from prime_composer.scoring.shared_vocabulary import MOST_PADDING, alien


def check_own(label: str, ref_logprobs: Float[Tensor, " seq"], mask: Bool[Tensor, " seq"]) -> None:
    """Check the teacher's log-probs of the tokens that train, at the price of one synchronization.

    NaN is the orchestrator's mark of a sequence that no teacher scored (``hooks.hook_stamps``).
    """
    wrong = mask & ~((ref_logprobs > IMPOSSIBLE) & (ref_logprobs <= LOGPROB_TOLERANCE))
    if wrong.any():
        position = int(wrong.nonzero()[0])
        if ref_logprobs[position].isnan():
            raise ValueError(
                f"{label}: no teacher has scored the token at position {position} of a sequence: "
                "its log-prob is nan. Each environment whose tokens reach this loss needs a "
                'teacher, algo.type = "opd" or "opsd"; or the teacher\'s server answers nan.'
            )
        raise ValueError(
            f"{label}: the teacher's log-prob of the token at position {position} of a sequence is "
            f"{float(ref_logprobs[position]):.6g}, where a finite number of at most 0 was "
            "expected: the teacher's server answers wrong numbers, so this step is not trained. "
            "Restart the server and resume."
        )


def check_support(scores: Scores, vocab_size: int) -> None:
    """Check the supports of the tokens that train. Tensors on the CPU cost no synchronization.

    Ids beyond the student's head are a wider teacher's padding (``shared_vocabulary``).
    """
    token_ids, logprobs = scores.token_ids, scores.teacher_logprobs
    if scores.known is not None:
        token_ids = token_ids[scores.known]
        logprobs = logprobs.masked_fill(~scores.known, -torch.inf)
    if not token_ids.numel():
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(token_ids))
    wrong = alien(lowest, highest, vocab_size)
    if wrong is not None:
        raise ValueError(
            f"The teacher's top-K holds the token id {wrong} and the student's head has a "
            f"vocabulary of {vocab_size}, of which padding explains at most {MOST_PADDING} more: "
            "student and teacher must share one tokenizer."
        )
    mass = logprobs.exp().sum(dim=-1)
    if not ((logprobs <= LOGPROB_TOLERANCE).all() and (mass <= 1 + MASS_TOLERANCE).all()):
        raise ValueError(
            "The teacher's top-K of this batch are no log-probs (NaN, above 0, or a mass of "
            f"{float(mass.max()):.6g}, where at most 1 was expected), so this step is not trained. "
            "Run the same version of prime-composer in orchestrator and trainer."
        )
