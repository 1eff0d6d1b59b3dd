"""Student rollouts and teacher scores of running vLLM servers, by ``/v1/completions``.

Start the servers so (GPU). On a CPU machine replace ``vllm serve DIR`` by ``python -m
prime_composer.backends.vllm_serve --model DIR``, with ``--kv-cache-memory-bytes 1073741824`` and
one ``VLLM_CPU_OMP_THREADS_BIND`` core each:

    teacher:  vllm serve TEACHER --port 8001 --max-logprobs 64
    student:  VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --port 8000 \
                  --logprobs-mode processed_logprobs

``--max-logprobs`` must be at least the loss's K (vLLM's default is 20). ``--logprobs-mode
processed_logprobs`` makes mu the distribution that was sampled from; it matters at temperature != 1
or top_p < 1. ``VLLM_SERVER_DEV_MODE=1`` opens the endpoints that reload weights and reset the
prefix cache. Weights are passed in a directory that both sides can read.

A server answers in JSON, about 1 MB for 256 tokens at K = 64: several times slower than an engine
in this process.

A teacher served in bfloat16 rounds its logits to 8 significant bits: up to 0.016 nat off for logits
of 4 to 8, 0.06 for 16 to 32. ``--hf-overrides '{"head_dtype": "float32"}'``, which ``prime-rl
teacher`` adds, keeps float32 sums. Weights and hidden states stay bfloat16.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import ValidationError

from prime_composer.backends.http import (
    SHORT_ANSWER,
    Connection,
    RequestRefused,
    ServerError,
    excerpt,
)
from prime_composer.backends.protocols import Limits
from prime_composer.recipe.backends import Served
from prime_composer.scoring.shared_vocabulary import out_of_vocabulary
from prime_composer.tables import reason_of

T = TypeVar("T")


class Card(msgspec.Struct):
    """A model of ``/v1/models``; other fields are skipped."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """An answer of ``/v1/models``."""

    data: Annotated[list[Card], msgspec.Meta(min_length=1)]


class TokenizeAnswer(msgspec.Struct):
    """An answer of ``/tokenize``."""

    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct):
    """An answer of ``/detokenize``."""

    prompt: str


def _table_of(url: str, section: str) -> Served:
    """Return the table of a URL alone."""
    try:
        return Served(url=url)
    except ValidationError as error:
        reason = reason_of(error.errors()[0])
        raise ServerError(f"url in {section}: {reason}.", section=section) from None


class Server:
    """A running vLLM server: what sampler and scorer share.

    ``served`` is its table, or a URL alone. ``model`` is what it should serve, by path, hub id or
    served name; None accepts any. ``section`` names the table in messages. A server that has never
    answered is waited for in full where it may be ``starting``. ``status`` is shown for whom the
    run waits, and ``concurrency`` requests are sent at once. A ``ServerError`` says that nothing
    answers, that another model is served, or that URL, key or environment cannot be used.
    """

    def __init__(
        self,
        served: Served | str,
        model: str | Path | None = None,
        *,
        section: str,
        starting: bool = False,
        status: Callable[[str], None] | None = None,
        concurrency: int = 32,
        max_logprobs: int | None = None,  # the server's --max-logprobs, where known
    ):
        table = _table_of(served, section) if isinstance(served, str) else served
        self._connection = Connection(
            table, section, starting=starting, status=status, concurrency=concurrency
        )
        self.section = section
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
        return self._limits

    @property
    def origin(self) -> str:
        return f"{self._connection.name[0].upper()}{self._connection.name[1:]}"

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's tokens of a text, without special ones; None where it cannot say."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self._answer_if_any("/tokenize", body, TokenizeAnswer, 64 * len(text.encode()))
        return None if answer is None else answer.tokens

    def detokenize(self, ids: Sequence[int]) -> str | None:
        """Return the server's text of tokens; None where it cannot say."""
        body = {"model": self.model, "tokens": list(ids)}
        answer = self._answer_if_any("/detokenize", body, DetokenizeAnswer, 1024 * len(ids))
        return None if answer is None else answer.prompt

    def close(self) -> None:
        """Close the connections. Closing twice is harmless."""
        self._connection.close()

    def _find(self, model: str | None) -> Card:
        """Return the server's own description of the model that it should serve."""
        path = "/v1/models"
        try:
            content = self._connection.run(self._connection.request("GET", path))
        except RequestRefused as refusal:
            raise self._refusal(refusal, path) from refusal
        served = self._decode(content, Models, "a list of models", path).data
        if model is None:
            return served[0]
        cards = {name: card for card in served for name in (card.id, card.root) if name}
        if model not in cards:
            raise self._connection.error(
                f"the server at {self._connection.url} serves {', '.join(sorted(cards))}, and the "
                f"recipe names {model}; set model in {self.section} to what it serves, or start it "
                "with that model.",
                key="model",
            )
        return cards[model]

    async def _complete(
        self, prompt: Sequence[int], max_bytes: int, seconds: float = 0.0, **settings: Any
    ) -> memoryview:
        path, body = "/v1/completions", completion_request(self.model, prompt, settings)
        try:
            return await self._connection.request(
                "POST", path, body, max_bytes=max_bytes, seconds=seconds
            )
        except RequestRefused as refusal:
            raise self._refusal(refusal, path) from refusal

    def _answer_if_any(self, path: str, body: Any, kind: type[T], max_bytes: int) -> T | None:
        """Return an answer of an endpoint that a server may lack; None without it."""
        request = self._connection.request("POST", path, body, max_bytes=SHORT_ANSWER + max_bytes)
        try:
            return msgspec.json.decode(self._connection.run(request), type=kind)
        except (RequestRefused, msgspec.MsgspecError, RecursionError):
            return None

    def _decode(self, content: memoryview, kind: type[T], expected: str, path: str) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (ValueError, RecursionError) as error:
            raise self._connection.error(
                f"{self._connection.name} answered {path} with something else than {expected} "
                f"({error}); the answer begins {excerpt(content)}."
            ) from error

    def _refusal(self, refusal: RequestRefused, path: str) -> ServerError:
        if "prompt logprobs" in refusal.reason and "max allowed" in refusal.reason:
            return self._connection.error(
                f"{self._connection.name} refuses that K ({refusal.reason}); start it with a "
                "larger --max-logprobs, or lower the loss's k."
            )
        if "out of vocabulary" in refusal.reason:
            return self._connection.error(out_of_vocabulary(self.origin, refusal.reason))
        if refusal.status == 401:
            table = self._connection.served
            got = "another" if table.api_key else "none"
            return self._connection.error(
                f"{self._connection.name} asks for an API key and got {got}: put it into the "
                f"environment variable that api_key_var in {self.section} names "
                f"({table.api_key_var}).",
                key="api_key_var",
            )
        return self._connection.error(
            f"{self._connection.name} answered {refusal.status} to {path}: {refusal.reason}"
        )


def completion_request(
    model: str, prompt: Sequence[int], settings: dict[str, Any]
) -> dict[str, Any]:
    return {"model": model, "prompt": list(prompt), "return_token_ids": True, **settings}


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


def read_vocab_size(model: str) -> int | None:
    """Return the vocabulary size of a model directory on this machine; None for any other model."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
