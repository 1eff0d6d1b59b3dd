"""Choose the problems that a step asks."""

import math
import random
from collections.abc import Sequence
from functools import cache, lru_cache


def prompt_batches(n_problems: int, batch_prompts: int, seed: int, step: int) -> list[int]:
    """Return the indices of the problems that step ``step`` (from 0) asks.

    They are a function of the arguments alone, so a resumed run needs no iterator state. Each epoch
    asks every problem once. A batch may straddle two epochs.
    """
    first = step * batch_prompts
    return [
        _permutation(n_problems, seed, i // n_problems)[i % n_problems]
        for i in range(first, first + batch_prompts)
    ]


def environment_batches(
    sizes: Sequence[int], ratios: Sequence[float], batch_prompts: int, seed: int, step: int
) -> list[int]:
    """Return the indices of a step's problems over several environments, concatenated.

    The count of each in a step is within one of its exact share by ``ratios``, and exact on
    average: systematic sampling, with an offset drawn anew each step.
    """
    if len(sizes) == 1:
        return prompt_batches(sizes[0], batch_prompts, seed, step)
    counts = [_shares(tuple(ratios), batch_prompts, seed, earlier) for earlier in range(step + 1)]
    batch, start = [], 0
    for environment, size in enumerate(sizes):
        first = sum(count[environment] for count in counts[:step])
        for i in range(first, first + counts[step][environment]):
            batch.append(start + _permutation(size, seed, i // size)[i % size])
        start += size
    return batch


@cache
def _shares(ratios: tuple[float, ...], batch_prompts: int, seed: int, step: int) -> list[int]:
    offset = random.Random(f"environments {seed} {step}").random()
    total, reached, before, counts = sum(ratios), 0.0, 0, []
    for ratio in ratios:
        reached += ratio
        # Of the points offset, offset + 1, ...: those below this environment's end of the line.
        below = min(batch_prompts, max(0, math.ceil(batch_prompts * reached / total - offset)))
        counts.append(below - before)
        before = below
    counts[-1] += batch_prompts - before
    return counts


@lru_cache(maxsize=32)
def _permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)
