"""Check that a sampler has the student's weights: as loaded, and after it is sent others.

Two of these mistakes raise no error anywhere else: an engine that keeps an old head where
embeddings are tied, and an engine that reuses key-value entries of old weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from prime_composer.backends.hf_model import (
    hidden_states,
    lm_head_weight,
    logits_over,
    pad,
    sequence_logprobs,
)
from prime_composer.backends.protocols import Sampler, SamplingParams
from prime_composer.lm_head import logprobs_at
from prime_composer.local.engine import Engine
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.transformers import TransformersScorer

Side = Literal["left", "right"]

TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}
"""Largest difference in nats between the engine's and the trainer's log-prob of one token, by
dtype. Of a sampler in half precision it is the mean over the tokens of a completion.

float32 engines agree to 5e-6 in practice. bfloat16 moves a log-prob by 0.06 to 0.09 at random. The
stale weights that the check plants on purpose move it by several nats.
"""

LEAST_OF_ROWS = 1e-3  # Least tolerance of a row beside others: sums have another order

PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 144  # Longer than a block of vLLM's prefix cache (128 tokens on a CPU)


def check_loaded_weights(
    sampler: Sampler,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    engine_dtype: str = "float32",
) -> float:
    """Compare the sampler's and the trainer's log-probs as loaded. The sampler's weights stay."""
    limit = TOLERANCES[engine_dtype]
    probe = probe_prompt(prompts, sampler.limits.max_model_len)
    as_loaded = sync_difference(sampler, model, probe, engine_dtype)
    if not as_loaded <= limit:
        raise PreflightError(
            f"Sampler and trainer disagree by {as_loaded:.2g} nat on the same tokens before any "
            f"training (at most {limit} in {engine_dtype}); make both load the same weights (a "
            "server keeps what an earlier run sent it until it is started again), and let the "
            "sampler return processed log-probs."
        )
    return as_loaded


def check_weight_sync(
    sampler: Sampler,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    engine_dtype: str = "float32",
) -> float:
    """Compare the sampler's and the trainer's log-probs as loaded, after a sync, and after another.

    The first sync sends weights that were changed by about 20%: right after loading, an engine that
    keeps old weights would agree. The second one sends the original weights again. The prompt is
    the same each time, so that stale key-value entries would be reused. The result is the largest
    difference of a token's log-prob, in nats.
    """
    as_loaded = check_loaded_weights(sampler, model, prompts, engine_dtype)
    limit = TOLERANCES[engine_dtype]
    probe = probe_prompt(prompts, sampler.limits.max_model_len)
    with perturbed(model):
        sampler.update_weights(model)
        changed = sync_difference(sampler, model, probe, engine_dtype)
    sampler.update_weights(model)
    restored = sync_difference(sampler, model, probe, engine_dtype)
    for which, moved in (("a", changed), ("a second", restored)):
        if not moved <= limit:
            raise PreflightError(
                f"After {which} weight sync sampler and trainer disagree by {moved:.2g} nat (at "
                f"most {limit} in {engine_dtype}): the sampler kept old weights, or cached "
                "prefixes of theirs. Each time, send it every weight under the name that its "
                "checkpoint uses (state_dict().items() lists an lm_head.weight that is tied to the "
                "embeddings, named_parameters() does not), and reset its prefix cache."
            )
    return max(as_loaded, changed, restored)


def check_batches(engine: Engine, rollout: RolloutConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Check the rows of every transformers model of a run, padded as its backends pad them."""
    longest = max(map(len, prompts)) + rollout.max_tokens
    models = [("student", engine.model, engine.sampler.limits.max_model_len)]
    for teacher, live in (engine.teachers.watched if engine.teachers else {}).items():
        if isinstance(live, TransformersScorer):
            models.append((teacher.table, live.model, live.limits.max_model_len))
    for table, model, limit in models:
        trains_alone = model is engine.model and not isinstance(engine.sampler, TransformersSampler)
        sides: tuple[Side, ...] = ("right",) if trains_alone else ("right", "left")
        check_rows(table, model, prompts, min(longest, limit or longest), sides)


@torch.no_grad()
def check_rows(
    table: str,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    longest: int,
    sides: Sequence[Side],
) -> None:
    """Check that a short sequence has the same log-probs alone and beside a ``longest`` one."""
    head = lm_head_weight(model)
    tokens = [token % len(head) for ids in prompts[:PROBE_PROMPT_TOKENS] for token in ids]
    row = (tokens * (longest // len(tokens) + 1))[:longest]
    short = row[: max(2, min(PROBE_TOKENS * 2, longest // 2))]
    (alone,) = sequence_logprobs(model, [short])
    engine_dtype = str(head.dtype).removeprefix("torch.")
    limit = max(LEAST_OF_ROWS, TOLERANCES.get(engine_dtype, 0.0))
    for side in sides:
        ids, mask = pad([short, row], head.device, side)
        hidden = hidden_states(model, ids, mask)[0][mask[0].bool()]
        labels = ids[0][mask[0].bool()][1:, None]
        own = logprobs_at(logits_over(model, hidden[:-1]), labels)[:, 0]
        moved = distance(own.float().cpu() - alone[1:], engine_dtype)
        if not moved <= limit:
            raise PreflightError(
                f"[{table}] {type(model).__name__}: the log-probs of {len(short)} tokens move by "
                f"{moved:.2g} nat (at most {limit}) beside a sequence of {longest}, padded on the "
                f"{side}: its rows depend on their batch. Use another model, or run a teacher with "
                'backend = "vllm", which pads nothing.'
            )


def probe_prompt(prompts: Sequence[Sequence[int]], max_model_len: int | None) -> list[int]:
    """Return tokens of the run's prompts, one prompt after the other, up to the probe's length."""
    length = PROBE_PROMPT_TOKENS
    if max_model_len is not None:
        length = min(length, max_model_len - PROBE_TOKENS - 1)
    tokens = [token for ids in prompts[:PROBE_PROMPT_TOKENS] for token in ids]
    return (tokens * (length // len(tokens) + 1))[: max(length, 1)]


def sync_difference(
    sampler: Sampler, model: nn.Module, prompt: list[int], engine_dtype: str
) -> float:
    """Return ``distance`` between sampler's and model's log-probs of sampled tokens, in nats."""
    (rollout,) = sampler.generate([prompt], SamplingParams(max_tokens=PROBE_TOKENS), seed=0)
    (expected,) = sequence_logprobs(model, [rollout.token_ids.tolist()])
    return distance((rollout.inference_logprobs - expected)[rollout.loss_mask], engine_dtype)


def distance(differences: torch.Tensor, engine_dtype: str) -> float:
    """Return the largest absolute value in float32, and the mean in half precision."""
    sizes = differences.abs()
    return float(sizes.max() if engine_dtype == "float32" else sizes.mean())


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Multiply every floating-point parameter by 1 + 0.2 * noise, and restore the exact values."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    saved = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.any():
                    parameter.mul_(1 + 0.2 * noise.to(parameter))
                else:
                    parameter.add_(0.02 * noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters, saved, strict=True):
                parameter.copy_(original)
