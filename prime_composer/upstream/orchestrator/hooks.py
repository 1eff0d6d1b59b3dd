"""Hooks on the modules of prime-rl's orchestrator; ``autoload.HOOKS`` lists them.

prefill_logprobs is replaced; assign_reference_logprobs copies the support to the nodes of the
episode's graph. Where the trainer asks the teachers, no request is made here, and NaN is sent in
the place of scores.

Where rewards train the tokens that a teacher scores, the distilling algorithms assign GRPO's
advantages, and stamp_loss_routing sends their tokens to the rl loss.

A hook that prime-rl goes past ends the run in the trainer, which lacks a support or a mark then, or
gets distillation tokens for a loss of rewards. What no trainer can see is judged here: the request,
and a sample without scores.

The settings are read when a score is asked for, never at import: the launcher loads some of these
modules too, before it has read its config.
"""

import functools
import importlib
import math
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from prime_composer.contract import Scores
from prime_composer.recipe.urls import public_url
from prime_composer.upstream import launches, wire
from prime_composer.upstream.keys import TOKENIZERS_KEY
from prime_composer.upstream.log import log
from prime_composer.upstream.orchestrator.client import Requests
from prime_composer.upstream.orchestrator.hints import (
    SIBLING,
    traces_of,
    with_siblings,
    with_two_hints,
)
from prime_composer.upstream.orchestrator.messages import (
    leave_prompts,
    read_of,
    scored_by_prompt,
    scored_by_tokenizer,
)
from prime_composer.upstream.orchestrator.mixture import score_by_each
from prime_composer.upstream.refusals import NOT_IN_A_MIXTURE
from prime_composer.upstream.settings import AdapterSettings
from prime_composer.upstream.silent_hook import DOCTOR, SilentHook
from prime_composer.upstream.teachers import teachers_of
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.capabilities import located, take
from prime_composer.upstream.versions.toml_shapes import HEADER

REQUESTS = Requests()

T = TypeVar("T")


@dataclass
class Scoring:
    """One episode that a distilling algorithm scores."""

    frozen: bool  # a frozen teacher scores, and not the live policy (opsd)
    traces: Sequence[Any] = ()  # the rollouts that train, with their messages
    asked: bool = False  # by our request


SCORING: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
"""What is scored here: a task that scores one of its sequences has it too."""


def silent(what: str) -> SilentHook:
    """Return the error for what this prime-rl has done without our hook."""
    return SilentHook(f"prime_composer: {what}: this prime-rl does it in another way. {DOCTOR}")


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
        settings, scoring, header = _settings(), SCORING.get(), openai.default_headers.get(HEADER)
        k = settings.support_size()
        frozen = header is not None
        if scoring is not None:
            scoring.asked = True
            frozen |= scoring.frozen
        if header is not None and settings.teacher_tokenizers:
            raise ValueError(f"{TOKENIZERS_KEY}: such a teacher {NOT_IN_A_MIXTURE}")
        if settings.trainer_asks and frozen:
            if settings.teacher_prompts and scoring is not None:
                names = {model} if header is None else {one.model for one in teachers_of(header)}
                for name in names & settings.teacher_prompts.keys():
                    await said(leave_prompts(REQUESTS, name, scoring.traces, token_ids))
            return marked(wire.unscored(len(token_ids)))

        @functools.cache  # once for all teachers of a mixture
        def read() -> Tensor | None:
            return None if scoring is None else read_of(scoring.traces, token_ids)

        async def score(client: Any, name: str) -> Scores:
            if scoring is not None and frozen and name in (settings.teacher_tokenizers or {}):
                return await scored_by_tokenizer(REQUESTS, client, name, scoring.traces, token_ids)
            if scoring is not None and frozen and name in (settings.teacher_prompts or {}):
                return await scored_by_prompt(REQUESTS, client, name, scoring.traces, token_ids, k)
            return await REQUESTS.score(client, name, token_ids, k, read=read(), frozen=frozen)

        if header is not None:
            request = score_by_each(score, teachers_of(header), token_ids)
        else:
            request = score(openai, model)
        return marked(wire.sent(await said(request)))

    module.prefill_logprobs = prefill_logprobs


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
        capabilities.replace(capabilities.OPSD_SCORES, module, with_two_hints)
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
        if not _settings().reads_rewards:
            await score_group(self, group, *args, **more)
            return
        grpo = importlib.import_module("prime_rl.orchestrator.algo.grpo")
        for needed in (capabilities.GRPO_CONFIG, capabilities.GRPO_GROUP):
            take(needed, grpo)
        found = located(capabilities.GRPO, grpo)
        assert found is not None  # no other module may have it
        _, clients = found[0].needs  # an algorithm keeps them by the parameter's name
        await grpo.GRPOAlgorithm(grpo.GRPOAlgoConfig(), getattr(self, clients)).score_group(group)

    return score_all


def _judged(score: Any, frozen: bool) -> Any:
    """Let a scoring method end the run if it asked for what trains without our request."""

    @functools.wraps(score)
    async def judged(self: Any, episode: Any, *args: Any, **more: Any) -> None:
        scoring = Scoring(frozen, traces_of([episode]))
        token = SCORING.set(scoring)
        try:
            await score(self, episode, *args, **more)
        finally:
            SCORING.reset(token)
        if _settings().loss is not None and traces_of([episode]) and not scoring.asked:
            name = type(self).__name__
            raise silent(f"{name} has scored a rollout that trains, and not by prefill_logprobs")

    return judged


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
        payload = wire.pack(values.scores)
        start = 0
        for node in branch.nodes:
            end = start + len(node.token_ids)
            if node.routed_experts is None:
                node.routed_experts = payload[start:end].copy()
            elif node.routed_experts.shape[1:] != payload.shape[1:]:
                raise ValueError(wire.ROUTER_REPLAY)
            start = end

    module.assign_reference_logprobs = assign_reference_logprobs


def hook_stamps(module: Any) -> None:
    """Let ``stamp_loss_routing`` send scored tokens to the rl loss, where rewards count.

    559b4477, orchestrator/algo/routing.py:67. Upstream sends a token to one loss, and sets its rl
    weight to 0 if that is distillation. A sample without rl weights is trained by the rl loss,
    whose denominator is the number of trained tokens.

    A sample that no teacher has scored gets NaN in the place of its scores. prime-rl would pack it
    as 0.0, which is a probability of 1. One of a distilling algorithm ends the run.

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
        settings, distilled = _settings(), action_loss_type == "ref_kl"
        if distilled and settings.loss is not None and sample.ref_logprobs is None:
            raise silent("A sample of a distilling algorithm has no teacher's scores")
        both = settings.reads_rewards
        original(sample, "rl" if both and distilled else action_loss_type, *args, **more)
        if both and sample.ref_logprobs is None:
            sample.ref_logprobs = wire.unscored(len(sample.token_ids))
        elif distilled and settings.teacher_tokenizers:
            leave_out_unscored(sample)
        if both and sample.advantages is not None:
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
        for sample in samples:
            if sample.ref_logprobs is not None:
                sample.ref_logprobs = marked(sample.ref_logprobs)
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
