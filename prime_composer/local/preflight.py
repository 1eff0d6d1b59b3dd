"""What is checked before the first step, so that a recipe that cannot work says why instead of training on nonsense.

Every failure is one sentence that ends with the remedy (``PreflightError``); what is legal but worth knowing comes back
as a warning. Three of these mistakes raise no error anywhere else: two vocabularies of the same size with different
tokens, an engine that keeps an old head when embeddings are tied, and one that reuses key-values of old weights.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from prime_composer.backends.hf_model import hidden_states, lm_head_weight, sequence_logprobs
from prime_composer.backends.protocols import Rollout, Sampler, SamplingParams, Scorer
from prime_composer.lm_head import selected_logprobs

PROBES = (
    "Natalia sold 48/2 = 24 clips in May.\nShe has $1,234.50 left.\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}  # ok",
    "Größe, naïve, 東京, Привет, 👍🏽",
)
"""Numbers, white space and byte-level characters: where tokenizers of one family differ."""

TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}
"""Largest difference in nats between the engine's and the trainer's log-prob of one token, by the engine's dtype.

float32 engines agree to 5e-6 in practice. Rounding weights and activations to bfloat16 moves a log-prob by 0.06 to 0.09
at random, more for an improbable token; the stale weights that the check plants on purpose move it by several nats.
"""

PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 144
"""Longer than the largest block of vLLM's prefix cache (128 tokens on a CPU), so that a stale one is in reach."""


class PreflightError(ValueError):
    """The recipe's parts do not fit together; the message names the remedy."""


@dataclass
class Preflight:
    """What the checks found.

    Attributes:
        warnings: what is legal but worth knowing.
        facts: what was measured, for the log, in nats where it is a difference.
    """

    warnings: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)


def preflight(
    *,
    model: nn.Module,
    tokenizer: Any,
    sampler: Sampler,
    teachers: Mapping[str, tuple[Scorer, Any | None]],
    prompts: Sequence[Sequence[int]],
    asked: Mapping[str, Sequence[Sequence[int]]] | None = None,
    params: SamplingParams,
    support_size: int | Literal["full"] = 0,
    engine_dtype: str = "float32",
) -> Preflight:
    """Every check, the cheap ones first; the weights of model and sampler are the same afterwards as before.

    Args:
        model: the student that trains; its tokenizer beside it.
        sampler: the student's sampler.
        teachers: by the name of its table in the recipe, each teacher's scorer and its tokenizer, or None in the place of
            one that cannot be had, which becomes a warning; empty where the loss needs no teacher.
        prompts: the prompts of the run, as token ids (the longest one is checked against the context).
        asked: by the teacher's name, the prompts whose rollouts it scores; None: all of them. One that is asked about none
            is not asked here either.
        params: how the run samples.
        support_size: the K of the loss.
        engine_dtype: the sampler's dtype, which sets the tolerance of the live comparison.

    Raises:
        PreflightError: one sentence with the remedy, after the name of the teacher where there are several.
    """
    found = Preflight()
    vocab_size = lm_head_weight(model).shape[0]
    check_context(prompts, params.max_tokens, sampler, None)
    mine = dict.fromkeys(teachers, prompts) if asked is None else asked
    for name, (scorer, teacher_tokenizer) in teachers.items():
        with named(name if len(teachers) > 1 else None):
            if mine[name]:
                check_context(mine[name], params.max_tokens, sampler, scorer)
            if teacher_tokenizer is None:
                found.warnings.append(
                    "The teacher's tokenizer is out of reach, so nobody has checked that its token ids mean the same as the "
                    f"student's; give [{name}] a model directory or hub id."
                )
            else:
                found.warnings += check_tokenizers(tokenizer, teacher_tokenizer)
            found.warnings += check_vocabularies(vocab_size, scorer, tokenizer, support_size)
    found.warnings += sampling_warnings(params)
    found.facts["sampler_trainer_difference"] = check_weight_sync(
        sampler, model, prompts, engine_dtype
    )
    # Within the run's own budget, which check_context has compared with the teachers' contexts.
    probe = SamplingParams(max_tokens=min(PROBE_TOKENS, params.max_tokens))
    for name, (scorer, _) in teachers.items():
        if mine[name]:
            rollouts = sampler.generate([list(mine[name][0])], probe, seed=0)
            with named(name if len(teachers) > 1 else None):
                check_scores(scorer, rollouts, support_size, vocab_size)
    return found


@contextmanager
def named(teacher: str | None) -> Iterator[None]:
    """Say which of several teachers an error is about."""
    try:
        yield
    except PreflightError as error:
        raise PreflightError(f"[{teacher}]: {error}" if teacher else str(error)) from None


def tokenizer_hash(tokenizer: Any) -> str:
    """A fingerprint of the vocabulary: every token with its id, added ones included."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\n".encode())
    return digest.hexdigest()[:12]


def check_tokenizers(student: Any, teacher: Any) -> list[str]:
    """The same tokens under the same ids, and the same text cut the same way; the ends of a text only warn.

    Raises:
        PreflightError: they differ, with the first difference.
    """
    remedy = "choose a teacher and a student with one tokenizer"
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    hashes = tokenizer_hash(student), tokenizer_hash(teacher)
    special = {
        token: (ours.get(token), theirs.get(token))
        for token in sorted({*special_tokens(student), *special_tokens(teacher)})
        if ours.get(token) != theirs.get(token)
    }
    if special:
        token, (mine, other) = next(iter(special.items()))
        raise PreflightError(
            f"The special token {token!r} has id {mine} for the student and {other} for the teacher (None: it has no such "
            f"token); {remedy}."
        )
    if hashes[0] != hashes[1]:
        token = min({*ours.items()} ^ {*theirs.items()})[0]
        raise PreflightError(
            f"Student and teacher have different vocabularies ({len(ours)} tokens, hash {hashes[0]}, against "
            f"{len(theirs)}, {hashes[1]}; for example {token!r} is {ours.get(token)} and {theirs.get(token)}); {remedy}."
        )
    for text in PROBES:
        mine, other = (t.encode(text, add_special_tokens=False) for t in (student, teacher))
        if mine != other:
            raise PreflightError(
                f"Student and teacher cut {text!r} into {len(mine)} and {len(other)} tokens that differ although their "
                f"vocabularies are equal (merges or pre-tokenizer); {remedy}."
            )
    if student.eos_token_id != teacher.eos_token_id:
        return [
            f"The student ends a text with {student.eos_token!r} and the teacher with {teacher.eos_token!r}: the teacher "
            "finds the student's ending improbable, so mask special tokens in the loss or align the EOS."
        ]
    return []


def special_tokens(tokenizer: Any) -> list[str]:
    """Tokens with a role of their own: BOS, EOS, padding and the added ones."""
    return [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]


def check_vocabularies(
    vocab_size: int, scorer: Scorer, tokenizer: Any, support_size: int | Literal["full"]
) -> list[str]:
    """Head sizes against the tokenizer and each other, K against the vocabulary and what the teacher answers.

    Raises:
        PreflightError: an id that one side knows is out of the other's range, or K is out of reach.
    """
    tokens = len(tokenizer)
    teacher_size = getattr(scorer, "vocab_size", None)
    if tokens > vocab_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the student's head {vocab_size} entries; resize its embeddings."
        )
    if teacher_size is not None and tokens > teacher_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the teacher's head {teacher_size} entries; choose a teacher with the "
            "student's tokenizer."
        )
    smallest = min(size for size in (vocab_size, teacher_size) if size is not None)
    if support_size != "full" and support_size > smallest:
        raise PreflightError(
            f'The loss asks for K = {support_size} and the vocabulary has {smallest} entries; set k to at most that, or to "full".'
        )
    warnings = []
    if teacher_size is not None and teacher_size != vocab_size:
        if support_size == "full":
            raise PreflightError(
                f"A full-vocabulary loss needs heads of one size, and the student's has {vocab_size} entries and the "
                f"teacher's {teacher_size} (padding beyond the tokenizer's {tokens}); use a top-K loss, or pad the "
                "smaller one."
            )
        warnings.append(
            f"The student's head has {vocab_size} entries and the teacher's {teacher_size} for {tokens} tokens: the rest "
            "is padding, and a run stops if the teacher ever puts a padding id of its own into the support."
        )
    limit = getattr(scorer, "max_logprobs", None)
    k = teacher_size if support_size == "full" else support_size
    if limit is not None and k is not None and k > limit:
        raise PreflightError(
            f"The loss asks for K = {k} teacher log-probs per token and the teacher answers at most {limit}; start its "
            f"server with --max-logprobs {k}, or set the loss's k to {limit}."
        )
    return warnings


def check_context(
    prompts: Sequence[Sequence[int]], max_tokens: int, sampler: Sampler, scorer: Scorer | None
) -> None:
    """The longest prompt and a full completion fit into the sampler's context and into the teacher's.

    Raises:
        PreflightError: they do not; a teacher on vLLM needs one token more than it reads.
    """
    if not prompts:
        raise PreflightError("There is no prompt to sample from; check [data].")
    longest = max(len(ids) for ids in prompts)
    if min(len(ids) for ids in prompts) == 0:
        raise PreflightError(
            "One of the prompts has no tokens; check the data and the prompt template in [data]."
        )
    needed = longest + max_tokens
    for name, part, extra in (("student's sampler", sampler, 0), ("teacher's scorer", scorer, 1)):
        limit = getattr(part, "max_model_len", None)
        if limit is not None and needed > limit - extra:
            raise PreflightError(
                f"The longest prompt has {longest} tokens, with {max_tokens} new ones that is {needed}, and the {name} "
                f"takes {limit - extra}; raise rollout.max_model_len (a server's --max-model-len) to {needed + extra}, "
                "or lower rollout.max_tokens."
            )


def sampling_warnings(params: SamplingParams) -> list[str]:
    """What a temperature or a nucleus means for the losses."""
    warnings = []
    if params.temperature != 1:
        warnings.append(
            f"rollout.temperature is {params.temperature}: mu is the tempered distribution, while the loss's student and "
            "teacher log-probs are those at temperature 1."
        )
    if params.top_p < 1:
        warnings.append(
            f"rollout.top_p is {params.top_p}: mu is renormalised over the nucleus, so the ratio p/mu is below 1 inside it "
            "and tokens outside are never sampled."
        )
    return warnings


def check_weight_sync(
    sampler: Sampler,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    engine_dtype: str = "float32",
) -> float:
    """Compare the sampler's and the trainer's log-probs: as loaded, after a sync of changed weights, and back again.

    Every weight is changed by about 20 % for the second comparison: right after loading, an engine that keeps old
    weights would agree. The prompt is long, and the same each time, so that old cached key-values would be reused.

    Returns:
        The largest difference seen, in nats.

    Raises:
        PreflightError: a difference above the dtype's tolerance; the message says which weights or cache are stale.
    """
    limit = TOLERANCES[engine_dtype]
    probe = probe_prompt(prompts, getattr(sampler, "max_model_len", None))
    as_loaded = sync_difference(sampler, model, probe)
    if not as_loaded <= limit:
        raise PreflightError(
            f"Sampler and trainer disagree by {as_loaded:.2g} nat on the same tokens before any training (at most {limit} "
            f"in {engine_dtype}); make both load the same weights, and let the sampler return processed log-probs."
        )
    old_head = lm_head_weight(model).detach().clone()
    with perturbed(model):
        sampler.update_weights(model)
        changed = sync_difference(sampler, model, probe)
        reason = None if changed <= limit else stale_part(sampler, model, probe, old_head, limit)
    sampler.update_weights(model)
    if reason is not None:
        raise PreflightError(
            f"After a weight sync sampler and trainer disagree by {changed:.2g} nat (at most {limit} in {engine_dtype}): {reason}."
        )
    restored = sync_difference(sampler, model, probe)
    if not restored <= limit:
        raise PreflightError(
            f"After a second weight sync sampler and trainer disagree by {restored:.2g} nat (at most {limit} in "
            f"{engine_dtype}): update_weights works only once, so reload every weight and reset the prefix cache each time."
        )
    return max(as_loaded, changed, restored)


def check_scores(
    scorer: Scorer,
    rollouts: Sequence[Rollout],
    support_size: int | Literal["full"],
    vocab_size: int,
) -> None:
    """Score a rollout and look at the numbers: log-probs, of distinct ids, that the student's head knows.

    Raises:
        PreflightError: they cannot be log-probabilities of the student's vocabulary.
    """
    for rollout, scores in zip(rollouts, scorer.score(rollouts, support_size), strict=True):
        mask = rollout.loss_mask
        own, ids, support = (
            scores.ref_logprobs[mask],
            scores.token_ids[mask],
            scores.teacher_logprobs[mask],
        )
        mass = support.exp().sum(dim=-1)
        if not (own <= 1e-4).all() or not (support <= 1e-4).all() or not (mass <= 1.001).all():
            raise PreflightError(
                "The teacher's scores are not log-probabilities (NaN, above 0, or a mass above 1); let its engine return "
                "raw log-probs of the full vocabulary."
            )
        if ids.numel() and int(ids.max()) >= vocab_size:
            raise PreflightError(
                f"The teacher puts id {int(ids.max())} into the support and the student's head has {vocab_size} entries; "
                "choose a smaller k, or a teacher with the student's vocabulary."
            )
        ordered = ids.sort(dim=-1).values
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise PreflightError(
                "The teacher's support has an id twice at one position, whose mass would count twice; check the server's version."
            )
        inside = ids == rollout.token_ids[mask].unsqueeze(-1)
        found = support[inside] - own[inside.any(dim=-1)]
        if not (found.abs() <= 1e-3).all():
            raise PreflightError(
                "The teacher's log-prob of a sampled token differs from the one in its own support; the scores are out of "
                "alignment, so check the server's version."
            )


def probe_prompt(prompts: Sequence[Sequence[int]], max_model_len: int | None) -> list[int]:
    """Tokens of the run's own prompts, one after the other, up to the probe's length."""
    length = (
        PROBE_PROMPT_TOKENS
        if max_model_len is None
        else min(PROBE_PROMPT_TOKENS, max_model_len - PROBE_TOKENS - 1)
    )
    tokens = [token for ids in prompts[:PROBE_PROMPT_TOKENS] for token in ids]
    return (tokens * (length // len(tokens) + 1))[: max(length, 1)]


def sync_difference(sampler: Sampler, model: nn.Module, prompt: list[int]) -> float:
    """The largest distance between the sampler's and the model's log-prob of a sampled token."""
    (rollout,) = sampler.generate([prompt], SamplingParams(max_tokens=PROBE_TOKENS), seed=0)
    (expected,) = sequence_logprobs(model, [rollout.token_ids.tolist()])
    return float((rollout.inference_logprobs - expected)[rollout.loss_mask].abs().max())


def stale_part(
    sampler: Sampler, model: nn.Module, probe: list[int], old_head: torch.Tensor, limit: float
) -> str:
    """Which part of the sampler did not follow the model, and what to do about it."""
    # The same tokens, rotated: no prefix of it was ever cached.
    fresh = (
        probe[1:] + probe[:1]
        if len({*probe}) > 1
        else [*probe[:-1], (probe[-1] + 1) % old_head.shape[0]]
    )
    if sync_difference(sampler, model, fresh) <= limit:
        return "it reuses cached prefixes of the old weights, so reset its prefix cache after every sync"
    (rollout,) = sampler.generate([fresh], SamplingParams(max_tokens=PROBE_TOKENS), seed=0)
    with torch.no_grad():
        ids = rollout.token_ids.to(old_head.device).unsqueeze(0)
        hidden = hidden_states(model, ids, torch.ones_like(ids))[0, :-1]
        with_old_head = selected_logprobs(hidden, old_head, ids[0, 1:, None])[:, 0].float().cpu()
    difference = (rollout.inference_logprobs[1:] - with_old_head)[rollout.loss_mask[1:]].abs().max()
    if float(difference) <= limit:
        return (
            "it kept the old lm_head, which is tied to the embeddings, so send state_dict().items(), which lists "
            "lm_head.weight, and not named_parameters()"
        )
    return "it kept old weights, so check that every weight reaches the engine under the name that its checkpoint uses"


@contextmanager
def perturbed(model: nn.Module):
    """Every floating-point parameter times 1 + 0.2 * noise, and exactly the old values afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    saved = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + 0.2 * noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, saved, strict=True):
                parameter.copy_(old)
