"""Hooks on the modules of prime-rl's orchestrator; ``autoload.HOOKS`` lists them.

prefill_logprobs is replaced; assign_reference_logprobs copies the support to the nodes of the
episode's graph. Where the trainer asks the teachers, no request is made here, and NaN is sent in
the place of scores.

Where rewards train the tokens that a teacher scores, the distilling algorithms assign GRPO's
advantages, and stamp_loss_routing sends their tokens to the rl loss.

The settings are read when a score is asked for, never at import: the launcher loads some of these
modules too, before it has read its config.
"""

import functools
import importlib
import math
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, TypeVar

from prime_composer.contract import Scores
from prime_composer.recipe.urls import public_url
from prime_composer.upstream import launches, wire
from prime_composer.upstream.log import log
from prime_composer.upstream.orchestrator.client import Requests
from prime_composer.upstream.orchestrator.hints import (
    SIBLING,
    traces_of,
    with_hints,
    with_siblings,
)
from prime_composer.upstream.orchestrator.own_prompt import scored_by_prompt
from prime_composer.upstream.orchestrator.teachers import HEADER, score_by_each, teachers_of
from prime_composer.upstream.settings import TOKENIZERS_KEY, AdapterSettings
from prime_composer.upstream.tally import DOCTOR, Tally
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.capabilities import located, take

REQUESTS = Requests()

T = TypeVar("T")

REQUEST, SUPPORT, SAMPLES, STAMP = "request for scores", "support", "samples", "loss routing"
"""Names of the orchestrator's hooks in a ``Tally``."""

MADE = Tally()
"""The samples that this process has made, and the hooks that ran on them.

prime-rl finalizes one group after the other: the samples of one are made and stamped before the
next one is scored.
"""


class Scoring(NamedTuple):
    """One episode that a distilling algorithm scores."""

    frozen: bool  # a frozen teacher scores, and not the live policy (opsd)
    tally: Tally  # the hooks that ran on it
    traces: Sequence[Any] = ()  # the rollouts that train, with their messages


SCORING: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
"""What is scored here: a task that scores one of its sequences has it too."""

MISSED = f"this prime-rl does it in another way. {DOCTOR}"


def _settings() -> AdapterSettings:
    return AdapterSettings.from_env() or AdapterSettings()


def hook_client(module: Any) -> None:
    """Let ``prefill_logprobs`` ask for K; the scorer looks it up at every call.

    559b4477 utils/client.py:479, 4103b285 orchestrator/clients.py:464 (later versions have it
    there).
    TODO(prime-rl): remove once samples have a field for the support.
    """
    original = take(capabilities.PREFILL, module)
    if original is None:
        return

    @functools.wraps(original)
    async def prefill_logprobs(openai: Any, model: str, token_ids: list[int], **more: Any) -> Any:
        if any(value is not None for value in more.values()):
            return await original(openai, model, token_ids, **more)  # something else is asked
        launches.judge_trainer()
        k = _settings().support_size()
        header = openai.default_headers.get(HEADER)
        scoring = SCORING.get()
        frozen = scoring is not None and scoring.frozen
        ran(REQUEST)
        if _settings().trainer_asks and (header is not None or frozen):
            return marked(wire.unscored(len(token_ids)))
        tokenizers = _settings().teacher_tokenizers or {}
        directory = tokenizers.get(model)
        if header is not None and tokenizers:
            raise ValueError(
                f"{TOKENIZERS_KEY}: a teacher with a tokenizer of its own has ids without a "
                "probability, which are missing from a mixture: route each environment to one "
                "teacher."
            )
        if scoring is not None and frozen and directory is not None:
            return marked(await said(by_turns(openai, model, directory, token_ids, scoring)))

        async def score(client: Any, name: str) -> Scores:
            fixed = frozen or header is not None
            if fixed and scoring is not None and name in (_settings().teacher_prompts or {}):
                return await scored_by_prompt(REQUESTS, client, name, scoring.traces, token_ids, k)
            return await REQUESTS.score(client, name, token_ids, k, frozen=fixed)

        if header is not None:
            request = score_by_each(score, teachers_of(header), token_ids)
        else:
            request = score(openai, model)
        return marked(wire.sent(await said(request)))

    module.prefill_logprobs = prefill_logprobs


async def by_turns(
    openai: Any, model: str, directory: str, token_ids: list[int], scoring: Scoring
) -> wire.Sent:
    """Return the scores of a branch by a teacher with a tokenizer of its own."""
    from prime_composer.upstream.orchestrator.own_tokenizer import opened, scored_branch

    own = await REQUESTS.compute(opened, directory, _settings().student_tokenizer, model)
    facts = await REQUESTS.meet(openai, model, own.tokenizer)

    def ask(reading: list[int], start: int, k: int) -> Awaitable[Scores]:
        return REQUESTS.score(openai, model, reading, k, start=start, frozen=True)

    return await scored_branch(own, facts, scoring.traces, token_ids, ask, REQUESTS.compute)


def hook_algorithm(module: Any) -> None:
    """Judge what the distilling algorithms score, and let them assign advantages and write hints.

    559b4477, orchestrator/algo/opd.py:37, opsd.py:68, ``score_episode``. opd's teacher is frozen,
    so that its requests are marked.
    """
    for scores, groups in (
        (capabilities.OPD_SCORES, capabilities.OPD_GROUP),
        (capabilities.OPSD_SCORES, capabilities.OPSD_GROUP),
    ):
        frozen = scores is capabilities.OPD_SCORES
        capabilities.replace(scores, module, functools.partial(_judged, frozen=frozen))
        capabilities.replace(groups, module, _as_grpo)
    score = take(capabilities.OPSD_SCORES, module)
    if score is not None:
        capabilities.replace(capabilities.OPSD_SCORES, module, with_hints)
        capabilities.replace(
            capabilities.OPSD_GROUP, module, functools.partial(with_siblings, score)
        )


def _as_grpo(score_group: Any) -> Any:
    """Let a distilling algorithm assign advantages as GRPO does, where rewards count.

    Upstream's ``score_group`` of these algorithms does nothing: 559b4477 orchestrator/algo/base.py
    :71. GRPO's is in grpo.py:25.
    TODO(prime-rl): remove once an algorithm both assigns credit and asks for reference scores.
    """

    @functools.wraps(score_group)
    async def score_all(self: Any, group: Any, *args: Any, **more: Any) -> None:
        if _settings().rewards is None:
            await score_group(self, group, *args, **more)
            return
        MADE.judge()
        grpo = importlib.import_module("prime_rl.orchestrator.algo.grpo")
        for needed in (capabilities.GRPO_CONFIG, capabilities.GRPO_GROUP):
            take(needed, grpo)
        found = located(capabilities.GRPO, grpo)
        assert found is not None  # no other module may have it
        _, clients = found[0].needs  # an algorithm keeps them by the parameter's name
        await grpo.GRPOAlgorithm(grpo.GRPOAlgoConfig(), getattr(self, clients)).score_group(group)

    return score_all


def _judged(score: Any, frozen: bool) -> Any:
    """Let a scoring method end the run if it scored what trains without our hooks."""

    @functools.wraps(score)
    async def judged(self: Any, episode: Any, *args: Any, **more: Any) -> None:
        tally = Tally()
        token = SCORING.set(Scoring(frozen, tally, traces_of([episode])))
        try:
            await score(self, episode, *args, **more)
        finally:
            SCORING.reset(token)
        settings = _settings()
        if settings.loss is None:
            return
        scored = len(traces_of([episode]))
        tally.expect(
            REQUEST,
            scored,
            f"{type(self).__name__} has scored a rollout that trains, and not by prefill_logprobs: "
            + MISSED,
        )
        tally.expect(
            SUPPORT,
            scored if settings.support_size() and not settings.trainer_asks else 0,
            f"{type(self).__name__} has scored a rollout that trains, and kept the scores without "
            f"the teacher's top-{settings.support_size()}, not by assign_reference_logprobs: "
            + MISSED,
        )
        tally.judge()

    return judged


def ran(hook: str) -> None:
    """Note that a hook ran on what is scored here."""
    scoring = SCORING.get()
    if scoring is not None:
        scoring.tally.called(hook)


def hook_routing(module: Any) -> None:
    """Let ``assign_reference_logprobs`` also attach the support to the branch's nodes.

    559b4477, orchestrator/algo/routing.py:37; opd and opsd copy it by name later. Prompt nodes
    have it too: a branch has a payload only if all its nodes have one.
    TODO(prime-rl): remove with ``hook_client``.
    """
    original = take(capabilities.REFERENCE, module)
    if original is None:
        return

    @functools.wraps(original)
    def assign_reference_logprobs(branch: Any, values: Any, *args: Any, **more: Any) -> None:
        own = list(values) if isinstance(values, wire.Sent) else values
        original(branch, own, *args, **more)
        if not isinstance(values, wire.Sent) or not values.scores.k:
            return
        ran(SUPPORT)
        payload = wire.pack(values.scores)
        start = 0
        for node in branch.nodes:
            end = start + len(node.token_ids)
            if node.routed_experts is None:
                node.routed_experts = payload[start:end].copy()
            elif node.routed_experts.shape[1:] != payload.shape[1:]:
                refuse_router_replay()
            start = end

    module.assign_reference_logprobs = assign_reference_logprobs


def hook_stamps(module: Any) -> None:
    """Let ``stamp_loss_routing`` send scored tokens to the rl loss, where rewards count.

    559b4477, orchestrator/algo/routing.py:67. Upstream sends a token to one loss, and sets its rl
    weight to 0 if that is distillation. A sample without rl weights is trained by the rl loss,
    whose denominator is the number of trained tokens.

    A sample that no teacher has scored gets NaN in the place of its scores. prime-rl would pack it
    as 0.0, which is a probability of 1.

    Where the loss reads rewards, an advantage of 0 is sent as ``wire.NO_ADVANTAGE``: prime-rl takes
    tokens with an advantage of 0 out of the rl loss (559b4477 orchestrator/train_sink.py:36, later
    versions without a key that turns it off), and these have a teacher.
    TODO(prime-rl): remove with ``_as_grpo``.
    """
    original = take(capabilities.STAMPS, module)
    if original is None:
        return

    @functools.wraps(original)
    def stamp_loss_routing(sample: Any, action_loss_type: str, *args: Any, **more: Any) -> None:
        rewards, distilled = _settings().rewards, action_loss_type == "ref_kl"
        MADE.called(STAMP)
        made = "A sample that a teacher has scored was not made by trace_to_samples: " + MISSED
        MADE.expect(SAMPLES, int(distilled and _settings().loss is not None), made)
        MADE.judge()
        kind = "rl" if rewards == "in_loss" and distilled else action_loss_type
        original(sample, kind, *args, **more)
        if rewards == "beside" and distilled:
            sample.rl_weights = None
        if rewards == "in_loss" and sample.ref_logprobs is None:
            sample.ref_logprobs = wire.unscored(len(sample.token_ids))
        elif distilled and _settings().teacher_tokenizers:
            leave_out_unscored(sample)
        if rewards == "in_loss" and sample.advantages is not None:
            pairs = zip(sample.advantages, sample.mask, strict=True)
            sample.advantages = [a or (wire.NO_ADVANTAGE if trains else a) for a, trains in pairs]

    module.stamp_loss_routing = stamp_loss_routing


def leave_out_unscored(sample: Any) -> None:
    """Take the tokens without a score out of the distillation loss: its weight is 0 there."""
    unscored = [math.isnan(score) for score in sample.ref_logprobs]
    for values in (sample.ref_logprobs, sample.ref_kl_weights):
        for at, has_none in enumerate(unscored):
            if has_none:
                values[at] = 0.0


def hook_samples(module: Any) -> None:
    """Let ``trace_to_samples`` mark the samples that have teacher scores, and leave out those that
    a hint-conditioned teacher had no hint for.

    559b4477, orchestrator/trajectories.py:111. It keeps scores of sampled tokens only, so the mark
    of ``prefill_logprobs`` is lost.
    TODO(prime-rl): remove with ``hook_routing``.
    """
    original = take(capabilities.SAMPLES, module)
    if original is None:
        return

    @functools.wraps(original)
    def trace_to_samples(*args: Any, **kwargs: Any) -> Any:
        trace = args[0] if args else kwargs["trace"]
        if getattr(trace, "info", {}).get(SIBLING, "") is None:
            return []  # no hint
        samples = original(*args, **kwargs)
        MADE.called(SAMPLES)
        for sample in samples:
            if sample.ref_logprobs is not None:
                sample.ref_logprobs = marked(sample.ref_logprobs)
                stamped = "stamp_loss_routing did not run on samples that a teacher scored: "
                MADE.expect(STAMP, int(_settings().rewards is not None), stamped + MISSED)
        return samples

    module.trace_to_samples = trace_to_samples


async def said(request: Awaitable[T]) -> T:
    """Await a teacher's scores. An error is in the log before prime-rl sees it.

    prime-rl does not catch it: its main loop ends, and the run with exit status 1. But the teardown
    comes first, and if that takes 300 s, the process exits with status 0 and says nothing of the
    error (559b4477, ``stop`` of orchestrator/orchestrator.py).
    """
    try:
        return await request
    except Exception as error:
        log(f"a rollout got no scores, and the run ends: {public_url(str(error))}", level="error")
        raise


def marked(scores: list[float]) -> list[float]:
    """Return ``scores`` of a sequence, with ``wire.MARK`` where the trainer expects it."""
    if _settings().needs_orchestrator:
        scores[0] = wire.MARK
    return scores


def refuse_router_replay() -> NoReturn:
    """Raise the error for rollouts that already carry router-replay data."""
    raise ValueError(
        "The rollouts carry router-replay data in the field of the teacher's top-K support. Start "
        "the inference server without enable_return_routed_experts, or use a loss without a "
        "support (sampled_reverse_kl)."
    )
