"""Student rollouts and teacher scores of running vLLM servers, by ``/v1/completions``.

Start the servers so (GPU). On a CPU machine replace ``vllm serve DIR`` by
``python -m prime_composer.backends.vllm_serve --model DIR``, with
``--kv-cache-memory-bytes 1073741824`` and one ``VLLM_CPU_OMP_THREADS_BIND`` core each:

    teacher:  vllm serve TEACHER --port 8001 --max-logprobs 64
    student:  VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --port 8000 \\
                  --logprobs-mode processed_logprobs

``--max-logprobs`` must be at least the loss's K (vLLM's default is 20). ``--logprobs-mode
processed_logprobs`` makes mu the distribution that was sampled from; it matters at temperature != 1
or top_p < 1. ``VLLM_SERVER_DEV_MODE=1`` opens the endpoints that reload weights and reset the
prefix cache. Weights are passed in a directory that both sides can read.

A server that is away for a moment is waited for (``backends.http``). A student's server that was
restarted has lost the weights that it was sent: it gets them again.

A server answers in JSON, about 1 MB for 256 tokens at K = 64: several times slower than an engine
in this process.

A teacher served in bfloat16 also computes its logits in bfloat16, rounded to 8 significant bits: up
to 0.016 nat off for logits of 4 to 8, 0.06 for 16 to 32, and likewise its log-probs. Start it with
``--hf-overrides '{"head_dtype": "float32"}'`` to multiply with the head in float32. Run with vLLM
0.32 on a CPU with ``dtype="bfloat16"``: without the option every logit is a bfloat16 number, with
it they are float32 numbers within half a unit in the last place of those. Weights and hidden states
stay bfloat16.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Unpack

import msgspec
import torch
from jaxtyping import Int
from torch import Tensor, nn

from prime_composer.backends.alignment import (
    SequenceToScore,
    check_lengths,
    check_support_size,
    make_rollout,
    make_scores,
    sequences_to_score,
)
from prime_composer.backends.answers import InvalidAnswer, check_choices
from prime_composer.backends.http import (
    RETRIED,
    SHORT_ANSWER,
    Connection,
    ConnectionOptions,
    Refused,
    ServerError,
    excerpt,
)
from prime_composer.backends.protocols import (
    HiddenStates,
    Limits,
    Rollout,
    SamplingParams,
    TeacherHead,
    TeacherScores,
)
from prime_composer.backends.scoring_client import PluginGone, ScoringClient
from prime_composer.backends.vllm_logprobs import (
    answer_bytes,
    asked_for,
    read_answer,
    read_completions,
    top_k_of,
)
from prime_composer.scoring.shared_vocabulary import out_of_vocabulary
from prime_composer.scoring.wire import SCORE_PATH, WITHOUT_PLUGIN

T = TypeVar("T")

SLOW_COMPLETION = 10
"""Tokens per second of one completion on a slow server."""

SLOW_SERVER = 200
"""Tokens per second of a slow server, all completions together."""

FINGERPRINT_TOKENS = 16

ROUNDS = 3
"""How often weights or rollouts are sent or sampled again when the server was lost meanwhile."""


class Card(msgspec.Struct):
    """A model of ``/v1/models``; other fields are skipped."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """An answer of ``/v1/models``."""

    data: Annotated[list[Card], msgspec.Meta(min_length=1)]


class Tokens(msgspec.Struct):
    """An answer of ``/tokenize``."""

    tokens: list[int]


class Text(msgspec.Struct):
    """An answer of ``/detokenize``."""

    prompt: str


class Reset(msgspec.Struct):
    """An answer of ``/reset_prefix_cache``."""

    success: bool


class TopLogprobs(msgspec.Struct):
    """Log-probs of the most probable tokens at each position of a completion."""

    top_logprobs: Annotated[list[dict[str, float]], msgspec.Meta(min_length=1)]


class TopChoice(msgspec.Struct):
    """A completion with the most probable tokens."""

    logprobs: TopLogprobs


class TopChoices(msgspec.Struct):
    """An answer of ``/v1/completions`` with the most probable tokens."""

    choices: Annotated[list[TopChoice], msgspec.Meta(min_length=1, max_length=1)]


class Server:
    """A running vLLM server: what sampler and scorer share.

    Args:
        url: base URL, with or without ``/v1``. A user and a password in it are sent as Basic
            authentication.
        model: the model that the server should serve (its path, hub id or served name). None
            accepts any model.
        section: the recipe's table that describes this server, for messages.
        max_logprobs: the server's --max-logprobs, where known; otherwise the server refuses a
            larger K.
        connection: how it is asked. Without ``starting``, a server that has never answered is
            waited for during two seconds. Completions get more time than ``timeout``, by their
            number and length.

    Attributes:
        url: base URL without credentials.
        model: the name that the server knows the model by.
        concurrency: requests sent at once.

    Raises:
        ServerError: nothing answers at the URL, it serves another model, or URL, key or environment
            cannot be used.
        ImportError: httpx or tenacity is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str,
        max_logprobs: int | None = None,
        **connection: Unpack[ConnectionOptions],
    ):
        self._connection = Connection(url, section=section, **connection)
        self.url = self._connection.url
        self.section = section
        self.concurrency = self._connection.concurrency
        try:
            card = self._find(None if model is None else str(model))
        except BaseException:
            self.close()
            raise
        self.model: str = card.id
        self._limits = Limits(
            max_model_len=card.max_model_len,
            vocab_size=read_vocab_size(card.root or self.model),
            max_logprobs=max_logprobs,
        )

    @property
    def limits(self) -> Limits:
        """The sizes that the server can handle."""
        return self._limits

    @property
    def reconnections(self) -> int:
        """How often contact was lost and made again; the server may be another one since."""
        return self._connection.reconnections

    @property
    def origin(self) -> str:
        """The server in words, for messages."""
        return f"{self._connection.name[0].upper()}{self._connection.name[1:]}"

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's tokens of a text, without special ones; None where it cannot say."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self._answer_if_any("/tokenize", body, Tokens, 64 * len(text.encode()))
        return None if answer is None else answer.tokens

    def detokenize(self, ids: Sequence[int]) -> str | None:
        """Return the server's text of tokens; None where it cannot say."""
        body = {"model": self.model, "tokens": list(ids)}
        answer = self._answer_if_any("/detokenize", body, Text, 1024 * len(ids))
        return None if answer is None else answer.prompt

    def close(self) -> None:
        """Close the connections. Closing twice is harmless."""
        self._connection.close()

    def _find(self, model: str | None) -> Card:
        """Return the server's own description of the model that it should serve."""
        path = "/v1/models"
        try:
            content = self._connection.run(self._connection.request("GET", path))
        except Refused as refusal:
            raise self._refusal(refusal, path) from refusal
        served = self._decode(content, Models, "a list of models", path).data
        if model is None:
            return served[0]
        cards = {name: card for card in served for name in (card.id, card.root) if name}
        if model not in cards:
            raise self._connection.error(
                f"the server at {self.url} serves {', '.join(sorted(cards))}, and the recipe names "
                f"{model}; set model in {self.section} to what it serves, or start it with that "
                "model.",
                key=f"{self.section.strip('[]')}.model",
            )
        return cards[model]

    async def _complete(
        self, prompt: Sequence[int], max_bytes: int, seconds: float = 0.0, **settings: Any
    ) -> bytes:
        """Return the answer's body.

        Raises:
            ServerError: as ``Connection.request``, or the server refuses; the message quotes it.
        """
        try:
            return await self._request_completion(prompt, max_bytes, seconds, **settings)
        except Refused as refusal:
            raise self._refusal(refusal, "/v1/completions") from refusal

    async def _request_completion(
        self, prompt: Sequence[int], max_bytes: int, seconds: float = 0.0, **settings: Any
    ) -> bytes:
        """Return the answer's body. Raises as ``Connection.request``."""
        body = {"model": self.model, "prompt": list(prompt), "return_token_ids": True, **settings}
        return await self._connection.request(
            "POST", "/v1/completions", body, max_bytes=max_bytes, seconds=seconds
        )

    def _answer_if_any(self, path: str, body: Any, kind: type[T], max_bytes: int) -> T | None:
        """Return an answer of an endpoint that a server may lack; None without it."""
        request = self._connection.request("POST", path, body, max_bytes=SHORT_ANSWER + max_bytes)
        try:
            return msgspec.json.decode(self._connection.run(request), type=kind)
        except (Refused, msgspec.MsgspecError, RecursionError):
            return None

    def _decode(self, content: bytes, kind: type[T], expected: str, path: str) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (ValueError, RecursionError) as error:
            raise self._connection.error(
                f"{self._connection.name} answered {path} with something else than {expected} "
                f"({error}); the answer begins {excerpt(content)}."
            ) from error

    def _refusal(self, refusal: Refused, path: str) -> ServerError:
        if "prompt logprobs" in refusal.reason and "max allowed" in refusal.reason:
            return self._connection.error(
                f"{self._connection.name} refuses that K ({refusal.reason}); start it with a "
                "larger --max-logprobs, or lower the loss's k."
            )
        if "out of vocabulary" in refusal.reason:
            return self._connection.error(out_of_vocabulary(self.origin, refusal.reason))
        if refusal.status == 401:
            got = "another" if self._connection.has_key else "none"
            return self._connection.error(
                f"{self._connection.name} asks for an API key and got {got}: put it into the "
                f"environment variable that api_key_var in {self.section} names "
                f"({self._connection.api_key_var}).",
                key=f"{self.section.strip('[]')}.api_key_var",
            )
        return self._connection.error(
            f"{self._connection.name} answered {refusal.status} to {path}: {refusal.reason}"
        )


class ServerSampler(Server):
    """Rollouts of a running vLLM server (``protocols.Sampler``), with ``Server``'s arguments.

    Args:
        weights_dir: a directory that this process can write and the server can read, for
            ``update_weights``. None is the system's temporary directory, for a server on this
            machine.
        eos_token_ids: ids that end a completion, in addition to the server's own EOS and
            ``SamplingParams.stop_token_ids``.
        seeded: send a seed with each request, which makes rollouts reproducible. A CPU server needs
            ``--no-enable-chunked-prefill`` for that (``vllm_serve`` sets it), or its engine
            crashes.
    """

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str = "[rollout]",
        weights_dir: str | Path | None = None,
        eos_token_ids: Sequence[int] = (),
        seeded: bool = True,
        **connection: Unpack[ConnectionOptions],
    ):
        super().__init__(url, model, section=section, **connection)
        self.weights_dir = weights_dir
        self.eos_token_ids = tuple(eos_token_ids)
        self.seeded = seeded
        self._student: nn.Module | None = None
        self._fingerprint: list[float] | None = None
        self._verified = (0, 0)
        self._processed_at: int | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt, in prompt order; reproducible where seeded.

        mu is the distribution that each token was drawn from. Greedy tokens have log mu = 0. A
        server that lost the weights of ``update_weights`` gets them again, as the model has them
        now. What it sampled with others is thrown away and sampled again.

        Raises:
            ServerError: the server is gone, or returns raw log-probs where they are not log mu.
            InvalidAnswer: an answer that no model can have given.
            ValueError: a prompt and ``max_tokens`` do not fit into ``limits.max_model_len``, or a
                prompt is empty.
        """
        check_lengths(prompts, params.max_tokens, self.limits.max_model_len)
        for _ in range(ROUNDS):
            if self._has_lost_weights():
                self._connection.show(
                    f"{self._connection.name} came back without the run's weights; they are sent "
                    "again"
                )
                self._send_weights()
            outages = self._connection.outages
            rollouts = self._sample(prompts, params, seed)
            if self._connection.outages == outages or not self._has_lost_weights():
                return rollouts
        raise self._unsteady("sampling")

    def update_weights(self, model: nn.Module) -> None:
        """Write the weights to a directory, reload them in the server, and reset its prefix cache.

        Writes every entry of ``state_dict()``, including a tied ``lm_head.weight``.
        ``save_pretrained`` would leave it out, and the CPU engine would silently keep its old head.

        Args:
            model: the student. It is kept, for a server that is restarted later.

        Raises:
            ServerError: the server has no reload endpoint (start it with VLLM_SERVER_DEV_MODE=1),
                or cannot read the directory.
        """
        self._student = model
        self._send_weights()

    def forget_prefixes(self) -> None:
        """Reset the server's prefix cache.

        Raises:
            ServerError: other requests are running on the server, or it has no such endpoint.
        """
        content = self._dev_request("/reset_prefix_cache", None)
        if not self._decode(content, Reset, "success or failure", "/reset_prefix_cache").success:
            raise self._connection.error(
                f"{self._connection.name} did not reset its prefix cache: other requests are "
                "running on it."
            )

    def _sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        greedy = params.temperature == 0
        count = 1 if greedy else params.n
        at_once = count * min(len(prompts), self.concurrency)
        if not greedy and (params.temperature != 1 or params.top_p < 1):
            self._check_processed(prompts[0])

        async def sample(index: int) -> list[Rollout]:
            prompt = prompts[index]
            settings = plain_sampling(
                n=count,
                temperature=params.temperature,
                top_p=params.top_p,
                max_tokens=params.max_tokens,
                stop_token_ids=sorted({*self.eos_token_ids, *params.stop_token_ids}),
                logprobs=0,
            )
            if self.seeded and not greedy:
                # One stream per prompt; vLLM adds 1 for each further completion of a group.
                settings["seed"] = (seed * 2_654_435_761 + index * 65_537) % 2**31
            content = await self._complete(
                prompt,
                max_bytes=answer_bytes(count * (len(prompt) + params.max_tokens), 1),
                seconds=sampling_seconds(at_once, params.max_tokens),
                **settings,
            )
            choices = read_completions(content, self.origin)
            check_choices(
                len({choice.index for choice in choices} & {*range(count)}),
                count,
                origin=self.origin,
                prompt=index,
            )
            check_choices(len(choices), count, origin=self.origin, prompt=index)
            rollouts = []
            for choice in choices:
                logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
                rollouts.append(
                    make_rollout(
                        prompt,
                        choice.token_ids,
                        [0.0] * len(choice.token_ids) if greedy else logprobs,
                        choice.finish_reason,
                        index,
                        max_tokens=params.max_tokens,
                        vocab_size=self.limits.vocab_size,
                        origin=self.origin,
                    )
                )
            return rollouts * (params.n if greedy else 1)

        groups = self._connection.map(sample, range(len(prompts)))
        return [rollout for group in groups for rollout in group]

    def _has_lost_weights(self) -> bool:
        """Return whether the server may have lost the weights that it was sent.

        It may after a lost connection or a pause. It has not if it still gives the very same
        log-probs as right after it got them. A different rounding costs an update too many, and
        nothing else.
        """
        seen = self._contacts()
        if self._student is None or seen == self._verified:
            return False
        if self._fingerprint is None:
            return True
        if self._ask_fingerprint() != self._fingerprint:
            if self.reconnections == self._verified[0]:
                self._connection.restarts += 1
            return True
        self._verified = seen
        return False

    def _contacts(self) -> tuple[int, int]:
        """Return how often contact was lost, and how often there was a pause."""
        return self.reconnections, self._connection.pauses

    def _ask_fingerprint(self) -> list[float] | None:
        """Return the log-probs of a few fixed tokens; None where the server gives none."""
        vocab_size = self.limits.vocab_size or FINGERPRINT_TOKENS + 1
        length = min(FINGERPRINT_TOKENS, (self.limits.max_model_len or 1024) - 1)
        tokens = [index % vocab_size for index in range(1, length + 1)]
        settings = plain_sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        request = self._request_completion(tokens, answer_bytes(length, 0), **settings)
        try:
            answer = read_answer(self._connection.run(request), self.origin)
            return top_k_of(tokens, answer, 0, self.origin).own
        except (InvalidAnswer, Refused):
            return None

    def _send_weights(self) -> None:
        """Send the student's weights, again where the server was lost before it had them all."""
        assert self._student is not None
        for _ in range(ROUNDS):
            self._reload(self._student)
            outages = self._connection.outages
            self.forget_prefixes()
            self._fingerprint = self._ask_fingerprint()
            if self._connection.outages == outages:
                self._verified = self._contacts()
                return
        raise self._unsteady("a weight update")

    def _reload(self, model: nn.Module) -> None:
        from safetensors.torch import save_file

        directory = Path(tempfile.mkdtemp(prefix="prime_composer_weights_", dir=self.weights_dir))
        try:
            directory.chmod(0o755)
            weights = {
                name: value.detach().cpu().contiguous().clone()
                for name, value in model.state_dict().items()
            }
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self._dev_request("/collective_rpc", call)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _dev_request(self, path: str, body: Any) -> bytes:
        # vLLM answers 500 where it cannot read the weights, which waiting does not change.
        request = self._connection.request("POST", path, body, retried=RETRIED - {500})
        try:
            return self._connection.run(request)
        except Refused as refusal:
            if refusal.status == 404:
                raise self._connection.error(
                    f"{self._connection.name} has no {path}, so its weights cannot be updated; "
                    "start it with VLLM_SERVER_DEV_MODE=1 in its environment."
                ) from refusal
            raise self._refusal(refusal, path) from refusal

    def _check_processed(self, prompt: Sequence[int]) -> None:
        """Refuse raw log-probs. They ignore the temperature: at 2 the two best must come closer.

        A server that was restarted is asked again.

        Raises:
            ServerError: the server returns raw log-probs.
        """
        seen = self.reconnections
        if seen == self._processed_at:
            return
        gaps = []
        for temperature in (1.0, 2.0):
            settings = plain_sampling(temperature=temperature, max_tokens=1, logprobs=2)
            work = self._complete(prompt, answer_bytes(len(prompt) + 1, 3), **settings)
            content, path = self._connection.run(work), "/v1/completions"
            answer = self._decode(content, TopChoices, "a completion with log-probs", path)
            gaps.append(sorted(answer.choices[0].logprobs.top_logprobs[0].values())[-2:])
        if max(abs(a - b) for a, b in zip(*gaps, strict=True)) <= 1e-3:
            raise self._connection.error(
                f"{self._connection.name} returns log-probs before temperature and top_p, which "
                "are not those that it samples from; start it with --logprobs-mode "
                "processed_logprobs, or sample at temperature 1 and top_p 1."
            )
        self._processed_at = seen

    def _unsteady(self, work: str) -> ServerError:
        return self._connection.error(
            f"{self._connection.name} was lost {ROUNDS} times during {work}; it does not stay up "
            "long enough. Its own log should say why."
        )


class ServerScorer(Server):
    """Teacher scores of a running vLLM server (``protocols.Scorer``); see ``Server``.

    Args:
        heads: folder where output heads are kept, by their hash. None: nowhere.
        head: folder of a checkpoint whose output head is read instead of the server's. It has to be
            the same.
    """

    _head: TeacherHead | None

    def __init__(
        self,
        url: str,
        model: str | Path | None = None,
        *,
        section: str = "[teacher]",
        max_logprobs: int | None = None,
        heads: Path | None = None,
        head: Path | None = None,
        **connection: Unpack[ConnectionOptions],
    ):
        self._heads, self._head_files, self._head = heads, head, None
        self._sampler: ServerSampler | None = None  # the base class may call close()
        self._client: ScoringClient | None = None
        self._first: ScoringClient | None = None
        self._asked_at: int | None = None
        super().__init__(url, model, section=section, max_logprobs=max_logprobs, **connection)
        self._open_sampler = partial(ServerSampler, url, self.model, section=section, **connection)

    @property
    def limits(self) -> Limits:
        """The sizes that the server can handle; its plugin knows the output head's."""
        if self._limits.vocab_size is None and (client := self.plugin()) is not None:
            self._limits = replace(self._limits, vocab_size=client.facts.vocab_size)
        return self._limits

    @property
    def sampler(self) -> ServerSampler:
        """A sampler of the same server, connected on first use."""
        if self._sampler is None:
            self._sampler = self._open_sampler()
        return self._sampler

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
        binary: bool = True,
    ) -> list[TeacherScores]:
        """Return one ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads instead of each rollout's own prompt.
            candidate_ids: ids to score instead of the teacher's own top K, one [n, K] tensor per
                rollout from ``Rollout.start`` on. Needs the scoring plugin.
            hidden: return hidden states too. Needs the scoring plugin.
            binary: use the scoring plugin where the server has it. False: always JSON.

        Raises:
            ServerError: the server is gone or serves another model than before, or K is above its
                --max-logprobs.
            InvalidAnswer: an answer that no model can have given.
            ValueError: K above the vocabulary, or a sequence too long for the server.
        """
        vocab_size, limit = self.limits.vocab_size, self.limits.max_logprobs
        if vocab_size is not None:
            k = check_support_size(
                support_size,
                vocab_size,
                vocab_size if limit is None or limit == -1 else limit,
                "the server's --max-logprobs",
            )
        elif support_size == "full":
            raise self._connection.error(
                f"the size of the vocabulary of {self.model} is not known on this machine, so K "
                "cannot be 'full'; set k to a number."
            )
        else:
            k = support_size
        sequences = sequences_to_score(rollouts, prompts, vocab_size)
        check_lengths([s.token_ids for s in sequences], 1, self.limits.max_model_len)

        client = self.plugin() if binary else None
        needs_plugin = hidden or candidate_ids is not None
        if client is None and needs_plugin:
            what = "hidden states" if hidden else "log-probs of given ids"
            raise self._connection.error(
                f"{self._connection.name} has no scoring plugin, which {what} need; start it with "
                'prime-rl teacher, or set k to a number and chosen_by = "teacher".'
            )
        if client is not None:
            plugin = client
            head = self._teacher_head(plugin) if hidden else None

            async def ask(index: int, sequence: SequenceToScore) -> TeacherScores:
                candidates = None if candidate_ids is None else candidate_ids[index]
                if head is None:
                    return await plugin.score(index, sequence, k, candidates)
                scores, states = await plugin.score_with_hidden(index, sequence, k, candidates)
                return replace(scores, hidden=(HiddenStates(states, head),))

            try:
                return self._connection.map(
                    lambda numbered: ask(*numbered), list(enumerate(sequences))
                )
            except PluginGone:
                if needs_plugin:
                    raise
                self._without_plugin()  # JSON has the same numbers

        async def score_one(numbered: tuple[int, SequenceToScore]) -> TeacherScores:
            index, sequence = numbered
            tokens, start = sequence.token_ids, sequence.start
            asked = asked_for(k)
            settings = plain_sampling(temperature=0.0, max_tokens=1, prompt_logprobs=asked)
            content = await self._complete(tokens, answer_bytes(len(tokens), asked), **settings)
            top = top_k_of(tokens, read_answer(content, self.origin), asked, self.origin)
            scores = make_scores(
                torch.tensor(top.own[start:], dtype=torch.float32),
                torch.from_numpy(top.token_ids[start:]).long(),
                torch.from_numpy(top.logprobs[start:]),
                sampled=sequence.sampled,
                k=asked,
                vocab_size=vocab_size,
                origin=self.origin,
                sequence=index,
                start=start,
                lacks=sequence.lacks,
            )
            return replace(
                scores,
                token_ids=scores.token_ids[:, :k],
                teacher_logprobs=scores.teacher_logprobs[:, :k],
            )

        return self._connection.map(score_one, list(enumerate(sequences)))

    def _teacher_head(self, client: ScoringClient) -> TeacherHead:
        """Return the teacher's output head, from the server or from a checkpoint's files."""
        if self._head is None:
            if self._head_files is None:
                head = client.head(self._heads)
            else:
                head = client.head_of_files(self._head_files)
            self._head = head.of_teacher(self.origin)
        return self._head

    def plugin(self) -> ScoringClient | None:
        """Return the client of the scoring plugin; None where the server has none.

        A server that was lost meanwhile is asked again.

        Raises:
            ServerError: the plugin is of another version, or another model's than before.
        """
        seen = self.reconnections
        if seen != self._asked_at:
            known = self._client
            try:
                found = ScoringClient.discover(self._connection, self.model)
            except Refused as refusal:
                raise self._refusal(refusal, SCORE_PATH) from refusal
            if found is None:
                if known is not None or self._asked_at is None:
                    self._without_plugin()
            else:
                self._first = self._first or found
                self._first.check_same_model(found.facts)
                self._client = found
            self._asked_at = self.reconnections
        return self._client

    def check_room(
        self, tokens: int, support_size: int | Literal["full"], by_student: bool, hidden: bool
    ) -> None:
        """Check that the scoring plugin answers for so long a rollout at once. JSON has no limit.

        Args:
            tokens: the rollout's own.
            support_size: K.
            by_student: its ids are the student's choice.
            hidden: with hidden states.

        Raises:
            ServerError: it does not.
        """
        client = self.plugin()
        if client is not None:
            k = client.facts.vocab_size if support_size == "full" else support_size
            client.answer_bytes(tokens, k, by_student, hidden)

    def _without_plugin(self) -> None:
        """Ask in JSON from now on, until the server is lost and back again."""
        lost = "lost its" if self._client is not None else "has no"
        self._client = None
        self._connection.show(f"{self._connection.name} {lost} {WITHOUT_PLUGIN}")

    def close(self) -> None:
        """Close the connections, those of ``sampler`` too. Closing twice is harmless."""
        if self._sampler is not None:
            self._sampler.close()
        super().close()


def plain_sampling(**settings: Any) -> dict[str, Any]:
    """Return sampling settings that override the model's own generation config, top_k included."""
    neutral = {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return neutral | settings


def sampling_seconds(completions: int, max_tokens: int) -> float:
    """Return how long a slow server may sample completions that it was asked for at once.

    They come in addition to the time-out of a request.
    """
    return max(max_tokens / SLOW_COMPLETION, completions * max_tokens / SLOW_SERVER)


def read_vocab_size(model: str) -> int | None:
    """Return the vocabulary size of a model directory on this machine; None for any other model."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
