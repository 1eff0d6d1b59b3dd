"""Check a teacher's hidden states and output head against its own log-probs."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from prime_composer.backends.answers import IMPOSSIBLE, InvalidAnswer
from prime_composer.contract import TeacherHead


def check_states(
    computed: Float[Tensor, " n"],
    own: Float[Tensor, " n"],
    heads: Sequence[TeacherHead],
    place: Callable[[int], str],
) -> None:
    """Check what hidden states and heads give for sampled tokens. It waits for the device once."""
    limit = max(head.tolerance or 0.0 for head in heads)
    # Below this vLLM's own numbers are those of an impossible token.
    gaps = (computed.clamp(min=IMPOSSIBLE) - own.to(computed.device).clamp(min=IMPOSSIBLE)).abs()
    wrong = (~(gaps <= limit)).nonzero()
    if not len(wrong):
        return
    row = int(wrong[0])
    origins = " and ".join(head.origin for head in heads if head.tolerance is not None)
    raise InvalidAnswer(
        f"{origins} gave a hidden state at position {place(row)}. With the output head its token "
        f"has log-prob {float(computed[row]):.6g}, and the server's own is {float(own[row]):.6g} "
        f"(at most {limit:g} apart). States and head are not of one model, so this step is not "
        "trained. Start the server anew with prime-composer teacher, leave `head` out of the "
        "teacher's table, and resume."
    )
