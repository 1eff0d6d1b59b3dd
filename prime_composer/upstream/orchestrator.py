"""The orchestrator's half of teacher top-K: ask for ``prompt_logprobs = K``, carry the answer on the wire.

Three versions score in three places; the request and its answer are the same everywhere.

    v0.6        compute_teacher_logprobs is replaced; it holds the samples that go on the wire
    v0.7, v0.8  prefill_logprobs is replaced; score_rollout copies the support to each sample after the scores
    newest      prefill_logprobs is replaced; assign_reference_logprobs copies it to the nodes of the episode's graph

K is read from the environment (``switch.SWITCH``) when the first score is asked for, never at import: the
launcher loads some of these modules too, before it has read its config.
"""

import asyncio
import functools
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from prime_composer.upstream import wire
from prime_composer.upstream.hooks import wanted_support, wants_mark
from prime_composer.upstream.versions import UnknownSurface, expect


class Scores(list):
    """log q of each token, 0.0 for the first (prime-rl's convention), with the top-K support on the side.

    A slice keeps its part of the support, so that prime-rl's self-distillation can cut the hint off.

    Attributes:
        token_ids: numpy int32 [n, k], most probable first.
        logprobs: numpy float32 [n, k]; NaN where nothing was scored.
    """

    def __init__(self, values: Sequence[float], token_ids: Any, logprobs: Any):
        super().__init__(values)
        self.token_ids = token_ids
        self.logprobs = logprobs

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return Scores(super().__getitem__(index), self.token_ids[index], self.logprobs[index])


@functools.cache
def answer_type() -> Any:
    """What is read of an answer of ``/inference/v1/generate``; every other field is skipped, not decoded.

    msgspec is there wherever this runs: prime-rl's own transport is written with it, in every version.
    """
    import msgspec

    entry = msgspec.defstruct("Entry", [("logprob", float), ("rank", int)], gc=False)
    return msgspec.defstruct(
        "Answer", [("prompt_logprobs", list[dict[int, entry] | None] | None, None)]
    )


def decode(content: bytes) -> list[dict[int, Any] | None]:
    """The rows of an answer: id -> (logprob, rank).

    vLLM writes no infinities (it clamps them to -9999, and its JSON refuses the rest), but other servers may write the
    ``-Infinity`` that Python's json does, which is not JSON: what msgspec cannot read is read by json.

    Raises:
        ValueError: this is no such answer.
    """
    import msgspec

    try:
        answer = msgspec.json.decode(content, type=answer_type())
    except msgspec.DecodeError:
        try:
            answer = msgspec.convert(json.loads(content), answer_type(), str_keys=True)
        except ValueError as error:
            raise ValueError(
                f"The teacher's server answered something else than prompt_logprobs: {error}"
            ) from error
    return answer.prompt_logprobs or []


def parse(token_ids: Sequence[int], content: bytes, k: int) -> Scores:
    """The ``prompt_logprobs`` in vLLM's answer, which is JSON, as ``Scores``.

    Row t maps ids to {logprob, rank} and is None for the first token. The token itself always stands in it, top-K or
    not, so a row has K or K + 1 entries: the top-K are taken by rank, never by order, and by log-prob where ranks are
    equal. This runs in the orchestrator's process, next to its event loop: Python touches rows, only C touches entries.

    Raises:
        ValueError: rows and tokens do not match, a row lacks its own token, or it has fewer than K entries.
    """
    import numpy as np

    rows = decode(content)
    n = len(token_ids)
    if len(rows) != n:
        raise ValueError(
            f"The teacher's server scored {len(rows)} tokens of {n}; is its context long enough?"
        )
    values = []
    for t, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        if not row:
            if t > 0:
                raise ValueError(f"The teacher's server left token {t} of {n} without a score.")
            values.append(0.0)
            continue
        own = row.get(token)
        if own is None:
            raise ValueError(
                f"The teacher's prompt_logprobs at position {t} do not hold the token {token} that stands there: "
                "student and teacher do not share a tokenizer, or the server scored another sequence."
            )
        if len(row) < k:
            raise ValueError(
                f"The teacher's server returned {len(row)} of the top {k} log-probs at position {t}: start it with "
                f"--max-logprobs {k} or more (vLLM's default is 20)."
            )
        values.append(own.logprob)
    ids = np.zeros((n, k), np.int32)
    logprobs = np.full((n, k), math.nan, np.float32)
    scored = [t for t, row in enumerate(rows) if row]
    if k and scored:
        given = [row for row in rows if row]
        entries = list(chain.from_iterable(map(dict.values, given)))
        held = np.array([len(row) for row in given])
        filled = np.arange(held.max()) < held[:, None]

        def table(flat: Any, dtype: type, empty: int) -> Any:
            cells = np.full(filled.shape, empty, dtype)
            cells[filled] = np.fromiter(flat, dtype, len(entries))
            return cells

        candidates = table(chain.from_iterable(given), np.int32, 0)
        scores = table(map(attrgetter("logprob"), entries), np.float64, 0)
        ranks = table(map(attrgetter("rank"), entries), np.int64, np.iinfo(np.int64).max)
        best = np.lexsort((-scores, ranks), axis=-1)[:, :k]
        ids[scored] = np.take_along_axis(candidates, best, axis=1)
        logprobs[scored] = np.take_along_axis(scores, best, axis=1)
    return Scores(values, ids, logprobs)


IN_FLIGHT = 32
"""Most requests of this process between being sent and being parsed. v0.6 scores all samples of a batch at once (later
versions one rollout at a time), and an answer weighs some 80 bytes x tokens x K: at 2,048 tokens and K = 32 this many are
0.17 GB, where a batch of 256 is 1.4 GB. They still are 65,000 tokens, several of a vLLM's prefill steps of 8,192 or 16,384,
so that servers do not run dry."""

_flights: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()

_parser = ThreadPoolExecutor(1, "prime_composer_parse")
"""Answers are parsed one at a time, off the event loop: parsing holds the GIL, so more threads would not be faster, but the
loop would have to wait for each of them in turn."""


def flight() -> asyncio.Semaphore:
    """The ``IN_FLIGHT`` places of the running event loop; a semaphore belongs to one loop."""
    return _flights.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(IN_FLIGHT))


async def ask(client: Any, model: str, token_ids: Sequence[int], k: int) -> Scores:
    """Score ``token_ids`` under ``model`` with prime-rl's own endpoint, ``/inference/v1/generate``, K per token.

    The client is the openai client that prime-rl made: its authentication, retries and timeouts stay. At most
    ``IN_FLIGHT`` are asked at a time.

    Raises:
        ValueError: the server refuses K, or answers something else than scores of these tokens.
    """
    import httpx

    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    body = {
        "model": model,
        "token_ids": list(token_ids),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "prompt_logprobs": max(k, 1),
            # Else vLLM's API server decodes each of the tokens x (K + 1) ids by itself, for a decoded_token that nobody reads.
            "detokenize": False,
        },
    }
    async with flight():
        try:
            response = await client.post(
                f"{base}/inference/v1/generate", cast_to=httpx.Response, body=body
            )
        except Exception as error:
            if getattr(error, "status_code", None) == 400 and "logprobs" in str(error):
                raise ValueError(
                    f"The teacher at {base} refuses prompt_logprobs = {k}: start it with --max-logprobs {k} or more "
                    f"(vLLM's default is 20). It said: {error}"
                ) from error
            raise
        return await asyncio.get_running_loop().run_in_executor(
            _parser, parse, token_ids, response.content, k
        )


API_KEY_VAR = "VLLM_API_KEY"
"""prime-rl's default for the environment variable with a server's API key."""


class Teacher(NamedTuple):
    """One teacher of a mixture."""

    url: str
    model: str
    weight: float
    api_key_var: str = API_KEY_VAR


HEADER = "X-Prime-Composer-Teachers"
"""A header of the teacher's client in prime-rl's config. It says in JSON which teachers score in the place of the one that
prime-rl knows: a list of {url, model, weight} (and api_key_var, where it is not prime-rl's default), or such lists by
environment, for v0.6, which has one teacher for all."""


def teachers_of(header: str, environment: str | None = None) -> list[Teacher]:
    """The teachers that a header names for an environment, with weights that add up to 1.

    Raises:
        ValueError: the header is no such JSON, or its table does not know the environment.
    """
    try:
        entries = json.loads(header)
        if isinstance(entries, dict):
            entries = entries[environment]
        teachers = [
            Teacher(
                str(e["url"]),
                str(e["model"]),
                float(e["weight"]),
                str(e.get("api_key_var", API_KEY_VAR)),
            )
            for e in entries
        ]
        total = sum(teacher.weight for teacher in teachers)
        if not teachers or not all(0 < teacher.weight < math.inf for teacher in teachers):
            raise ValueError("weights are above 0")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"The header {HEADER} of the teacher's client must be a JSON list of {{url, model, weight}}, or a table of such "
            f"lists with one for the environment {environment!r}, not {header!r} ({error!r})."
        ) from None
    return [teacher._replace(weight=teacher.weight / total) for teacher in teachers]


def mix(token_ids: Sequence[int], scores: Sequence[Scores], weights: Sequence[float]) -> Scores:
    """Several teachers as one, in probability space; see ``prime_composer.backends.mixture.mix``."""
    if len(scores) == 1:
        return scores[0]
    import torch

    from prime_composer.backends.mixture import mix as mix_scores
    from prime_composer.backends.protocols import TeacherScores

    given = [
        TeacherScores(
            torch.tensor(score),
            torch.from_numpy(score.token_ids).long(),
            torch.from_numpy(score.logprobs),
        )
        for score in scores
    ]
    mixed = mix_scores(torch.tensor(token_ids), given, weights)
    ids, logprobs = mixed.token_ids.int().numpy(), mixed.teacher_logprobs.numpy()
    ids[:1], logprobs[:1] = 0, math.nan  # nothing stands before the first token
    return Scores([0.0, *mixed.ref_logprobs[1:].tolist()], ids, logprobs)


_clients: dict[tuple[str, str], Any] = {}


def client_of(teacher: Teacher) -> Any:
    from openai import AsyncOpenAI

    server = teacher.url, teacher.api_key_var
    if server not in _clients:
        key = os.environ.get(teacher.api_key_var) or "EMPTY"
        _clients[server] = AsyncOpenAI(base_url=teacher.url, api_key=key, max_retries=5)
    return _clients[server]


async def ask_each(teachers: Sequence[Teacher], token_ids: Sequence[int], k: int) -> Scores:
    """``ask`` every teacher, and mix what they say.

    Raises:
        ValueError: one of them did not answer; says which. prime-rl has only waited for the first one to come up.
    """

    async def one(teacher: Teacher) -> Scores:
        try:
            return await ask(client_of(teacher), teacher.model, token_ids, k)
        except Exception as error:
            remedy = "Start its server before the run, or correct its [teachers] table."
            if getattr(error, "status_code", None) == 401:
                remedy = f"It wants an API key: put it into the environment variable {teacher.api_key_var}, its api_key_var."
            raise ValueError(
                f"The teacher {teacher.model} at {teacher.url} did not score: {error} {remedy}"
            ) from error

    scores = await asyncio.gather(*map(one, teachers))
    return await asyncio.to_thread(mix, token_ids, scores, [teacher.weight for teacher in teachers])


def hook_v0_6(module: ModuleType) -> None:
    """``compute_teacher_logprobs`` (38494ccb, orchestrator/utils.py:110) asks for K and puts the support on the samples.
    To go when prime-rl has a sample field for it."""
    original = expect(
        module,
        "compute_teacher_logprobs",
        ("clients", "model_name", "samples"),
        "prime_rl/orchestrator/utils.py",
    )

    @functools.wraps(original)
    async def compute_teacher_logprobs(clients: Any, model_name: str, samples: Any) -> Any:
        k = wanted_support()
        if k == 0 and not any(HEADER in config.extra_headers for config in clients):
            return [marked(scores) for scores in await original(clients, model_name, samples)]

        async def score(config: Any, sample: Any) -> list[float]:
            token_ids = list(sample.prompt_ids) + list(sample.completion_ids)
            header = config.extra_headers.get(HEADER)
            if header is None:
                scores = await ask(module.setup_openai_client(config), model_name, token_ids, k)
            else:
                scores = await ask_each(teachers_of(header, sample.env_name), token_ids, k)
            put(sample, scores)
            return marked(list(scores))

        pairs = zip(cycle(clients), samples, strict=False)
        return await asyncio.gather(*(score(config, sample) for config, sample in pairs))

    if not hasattr(module, "setup_openai_client"):
        raise UnknownSurface(
            "prime_rl.orchestrator.utils lost setup_openai_client, which makes the teacher's client."
        )
    module.compute_teacher_logprobs = compute_teacher_logprobs


def hook_client(module: ModuleType) -> None:
    """``prefill_logprobs`` (d334ea52 utils/client.py:571, 559b4477 utils/client.py:479), looked up by the scorer at
    every call, asks for K. To go with ``hook_v0_6``."""
    original = expect(
        module, "prefill_logprobs", ("openai", "model", "token_ids"), "prime_rl/utils/client.py"
    )

    @functools.wraps(original)
    async def prefill_logprobs(openai: Any, model: str, token_ids: list[int]) -> list[float]:
        k = wanted_support()
        header = openai.default_headers.get(HEADER)
        if header is not None:
            return marked(await ask_each(teachers_of(header), token_ids, k))
        if k == 0:
            return marked(await original(openai, model, token_ids))
        return marked(await ask(openai, model, token_ids, k))

    module.prefill_logprobs = prefill_logprobs


def hook_algorithm(module: ModuleType) -> None:
    """``score_rollout`` of the distilling algorithms (d334ea52 and 60bc2954: orchestrator/algo/opd.py:44, opsd.py:72)
    copies the support to each sample. The newest versions have no such method; ``hook_routing`` serves them."""
    for name in ("OPDAlgorithm", "OPSDAlgorithm"):
        cls = module.__dict__.get(name)
        if cls is None or not hasattr(cls, "score_rollout"):
            continue
        cls.score_rollout = _and_put(
            expect(
                cls, "score_rollout", ("self", "rollout"), f"prime_rl/orchestrator/algo of {name}"
            )
        )


def _and_put(original: Any) -> Any:
    @functools.wraps(original)
    async def score_rollout(self: Any, rollout: Any) -> None:
        await original(self, rollout)
        for sample in rollout.samples:
            if isinstance(sample.ref_logprobs, Scores):
                put(sample, sample.ref_logprobs)
                sample.ref_logprobs = list(sample.ref_logprobs)

    return score_rollout


def hook_routing(module: ModuleType) -> None:
    """``assign_reference_logprobs`` (559b4477, orchestrator/algo/routing.py:37), which opd and opsd copy by name after
    this, also puts the support on the branch's nodes, prompt nodes too: a branch has a wire payload only if all its
    nodes have. To go with ``hook_v0_6``."""
    original = expect(
        module,
        "assign_reference_logprobs",
        ("branch", "values"),
        "prime_rl/orchestrator/algo/routing.py",
    )

    @functools.wraps(original)
    def assign_reference_logprobs(branch: Any, values: Any) -> None:
        original(branch, list(values) if isinstance(values, Scores) else values)
        if not isinstance(values, Scores) or not values.token_ids.shape[1]:
            return
        payload = wire.pack(values.token_ids, values.logprobs)
        start = 0
        for node in branch.nodes:
            end = start + len(node.token_ids)
            if node.routed_experts is None:
                node.routed_experts = payload[start:end].copy()
            elif node.routed_experts.shape[1:] != payload.shape[1:]:
                refuse_router_replay()
            start = end

    module.assign_reference_logprobs = assign_reference_logprobs


def hook_samples(module: ModuleType) -> None:
    """``trace_to_samples`` (559b4477, orchestrator/trajectories.py:111) marks the samples that have teacher scores: the
    newest versions keep scores of sampled tokens only, and the mark of ``prefill_logprobs`` is none. In v0.7 and v0.8
    samples are made before they are scored, and this does nothing. To go with ``hook_routing``."""
    original = expect(
        module,
        "trace_to_samples",
        ("trace", "env_name", "mm_token_type_ids_mapping"),
        "prime_rl/orchestrator/trajectories.py",
    )

    @functools.wraps(original)
    def trace_to_samples(*args: Any, **kwargs: Any) -> Any:
        samples = original(*args, **kwargs)
        for sample in samples:
            if sample.ref_logprobs is not None:
                sample.ref_logprobs = marked(sample.ref_logprobs)
        return samples

    module.trace_to_samples = trace_to_samples


def marked(scores: list[float]) -> list[float]:
    """``scores`` of a sequence, with the mark for a trainer that expects it."""
    if wants_mark():
        scores[0] = wire.MARK
    return scores


def put(sample: Any, scores: Scores) -> None:
    """The support, if there is one, on a sample's ``routed_experts``.

    Raises:
        ValueError: router replay is already there.
    """
    if not scores.token_ids.shape[1]:
        return
    if sample.routed_experts is not None:
        refuse_router_replay()
    payload = wire.pack(scores.token_ids, scores.logprobs)
    kind = type(sample).__module__
    routed = __import__(kind, fromlist=["RoutedExperts"]).RoutedExperts
    sample.routed_experts = routed(data=payload.tobytes(), shape=list(payload.shape), dtype="int32")


def refuse_router_replay() -> None:
    raise ValueError(
        "The rollouts carry router-replay data where the teacher's top-K support travels. Start the inference server "
        "without enable_return_routed_experts, or use a loss without a support (sampled_reverse_kl)."
    )
