"""Whole runs of an unmodified prime-rl whose student repeats itself, with ``[loss.repetition]``.

As in test_whole_run.py, whose functions and stand-ins these are.
"""

import pytest

from tests.upstream import test_whole_run as whole_run
from tests.upstream.test_whole_run import TOP_K, mean, other

models = whole_run.models

COPIES, TOKENS, PERIOD = 5, 16, 64
"""``copies`` is the recipe's own, the others are the defaults."""
MASKED = {**TOP_K, "repetition": {"copies": COPIES}}
LENGTH = 28
"""Tokens of an answer, eight of them before its end repeats: four come five times, five do not."""


def new_tokens(tokens, prompt):
    """Return the places of an answer without those that repeat its end, by the definition."""
    answer, repeated = tokens[prompt:], 0
    for period in range(1, PERIOD + 1):
        length = period
        while length < len(answer) and answer[-length - 1] == answer[-length - 1 + period]:
            length += 1
        if length >= max(TOKENS, COPIES * period):
            repeated = max(repeated, length - period)
    return list(range(prompt, len(tokens) - repeated))


@other
def test_whole_run_leaves_repetitions_out(trees, models, tmp_path):
    """The divergence of the first step is the models' over the tokens before a repetition.

    prime-rl divides the sum by all tokens that it trains on, the repeated ones included.
    """
    result = whole_run.run(
        trees,
        models,
        tmp_path,
        MASKED,
        loops=True,
        rollout={"max_tokens": LENGTH},
        seq_len=512,  # the whole batch fits one micro-batch, so that loss/mean is the step's
    )
    rows = whole_run.metric_rows(result)
    kept, update = whole_run.reference(result, places=new_tokens)
    every, _ = whole_run.reference(result)
    tokens, all_tokens = ([len(one) for one in numbers["log_ratio"]] for numbers in (kept, every))
    shares = [1 - n / of for n, of in zip(tokens, all_tokens, strict=True)]
    assert 0 in shares and max(shares) > 0.5, shares
    share = whole_run.first_value(rows, "repetition/tokens/mean")
    assert share == pytest.approx(mean(shares), abs=1e-6)
    whole_run.check_kl(whole_run.first_value(rows, "topk_reverse_kl/kl/mean"), kept)
    # With repetitions it would differ by this.
    assert mean(every["tail_kl"]) - mean(kept["tail_kl"]) > 1e-2
    of_sequences = zip(tokens, kept["tail_kl_bfloat16"], strict=True)
    total = sum(n * mean_kl for n, mean_kl in of_sequences)
    loss = whole_run.first_value(rows, "loss/mean")
    assert loss == pytest.approx(total / sum(all_tokens), abs=5e-3)
    whole_run.check_update(kept, update)
