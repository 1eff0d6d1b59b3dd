"""Teacher scores of a running vLLM server, with or without the scoring plugin."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.alignment import (
    check_sequence_lengths,
    check_support_size,
    sequences_to_score,
)
from prime_composer.backends.errors import RequestRefused, ServerError
from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.backends.server import Server, completion_request, plain_sampling
from prime_composer.contract import InvalidAnswer, Scores, TeacherHead
from prime_composer.recipe.backends import Served
from prime_composer.samplers.server import ServerSampler
from prime_composer.teachers.client import TeacherClient, support_kind
from prime_composer.teachers.compatibility import OwnLogprobs
from prime_composer.teachers.served_head import ServedHead

T = TypeVar("T")

MORE_THAN_ALL = 2**24  # Entries of a vocabulary


class ServerScorer(Server):
    """Teacher scores of a running vLLM server (``protocols.Scorer``), with ``Server``'s arguments.

    Output heads are kept in the folder ``heads``, by their hash; None: nowhere.
    """

    _head: TeacherHead | None

    def __init__(
        self,
        served: Served | str,
        model: str | Path | None = None,
        *,
        section: str = "[teacher]",
        max_logprobs: int | None = None,
        heads: Path | None = None,
        eos_token_ids: Sequence[int] | None = None,
        **connection: Any,
    ):
        self._heads, self._head = heads, None
        self._sampler: ServerSampler | None = None  # the base class may call close()
        self._asked_at: int | None = None
        super().__init__(served, model, section=section, max_logprobs=max_logprobs, **connection)
        self._client = TeacherClient(self, self.model)
        self._open_sampler = partial(
            ServerSampler,
            served,
            self.model,
            section=section,
            eos_token_ids=eos_token_ids,
            **connection,
        )

    @property
    def limits(self) -> Limits:
        """The sizes that the server can handle; its plugin knows the output head's."""
        if self._limits.vocab_size is None and (facts := self.client.facts) is not None:
            self._limits = replace(self._limits, vocab_size=facts.vocab_size)
        return self._limits

    @property
    def gives_any_ids(self) -> bool:
        """Whether the server has the scoring plugin."""
        return self.client.facts is not None

    @property
    def dtype(self) -> str | None:
        """What the plugin says that the model computes in; None without the plugin."""
        return None if self.client.facts is None else self.client.facts.dtype

    @property
    def head_dtype(self) -> str | None:
        """The dtype of the logits by the plugin; None where it does not say."""
        return None if self.client.facts is None else self.client.facts.head_dtype

    @property
    def starts(self) -> int | None:
        """How many starts of the server its responses have named; None where they name none."""
        return self._client.known.starts

    @property
    def sampler(self) -> ServerSampler:
        """A sampler of the same server, connected on first use."""
        if self._sampler is None:
            self._sampler = self._open_sampler()
        return self._sampler

    def largest_k(self) -> int | None:
        """Return the largest K of vLLM's JSON, by its refusal of a larger one; None: all ids."""
        if self._limits.max_logprobs is not None:
            return self._limits.max_logprobs
        (pair,) = sequences_to_score([Rollout.not_sampled(torch.tensor([1, 1]), 1, "length")])
        try:
            self._connection.run(self._client.score(pair, k=MORE_THAN_ALL, binary=False))
        except (ServerError, InvalidAnswer) as error:
            found = re.search(r"max allowed: (\d+)", str(error))
            if found is None:
                raise
            return int(found[1])
        return None

    def own_logprobs(self, prompt: Sequence[int]) -> OwnLogprobs | str:
        """Return log-probs of what the server samples and scores, or why it gives none."""
        return self._connection.run(self.client.own_logprobs(prompt))

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
        binary: bool = True,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says. Candidates and hidden states need the scoring plugin.

        ``binary = False`` asks in JSON although the server has the plugin.
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
        check_sequence_lengths([s.token_ids for s in sequences], 1, self.limits.max_model_len)

        client = self.client if binary else self._client
        client.check_can(support_kind(candidate_ids is not None), hidden, binary=binary)
        head = self._teacher_head() if hidden else None
        chosen: Sequence[Tensor | None] = candidate_ids or [None] * len(sequences)
        return self._connection.map(
            lambda one: client.score(*one, k=k, head=head, binary=binary),
            list(zip(sequences, chosen, strict=True)),
        )

    def _teacher_head(self) -> TeacherHead:
        if self._head is None:
            self._head = self.served_head().read(self._heads).of_teacher(self.origin)
        return self._head

    def served_head(self) -> ServedHead:
        """Return the reader of the teacher's output head. Needs the scoring plugin."""
        facts = self.client.facts
        assert facts is not None, "the server has the scoring plugin"
        return ServedHead(self._connection, facts)

    @property
    def client(self) -> TeacherClient:
        """The client, which has asked for the plugin, and asks a server that was lost again."""
        if self._connection.outages != self._asked_at:
            self._connection.run(self._client.discover())
            self._asked_at = self._connection.outages
        return self._client

    def check_room(
        self, tokens: int, support_size: int | Literal["full"], by_student: bool, hidden: bool
    ) -> None:
        """Check that the plugin answers for so long a rollout at once. JSON has no limit."""
        client = self.client
        if client.facts is not None:
            k = client.facts.vocab_size if support_size == "full" else support_size
            client.response_bytes(tokens, k, by_student, hidden)

    async def receive(self, path: str, body: Any, max_bytes: int, *, tail: int = 0) -> memoryview:
        """Send a request of the client (``client.Transport``)."""
        return await self._connection.request("POST", path, body, max_bytes=max_bytes, tail=tail)

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``. The connection's event loop has nothing else to do."""
        return function(*args)

    def json_request(self, model: str, token_ids: Sequence[int], k: int) -> tuple[str, Any]:
        """Return path and body of a request for the log-probs of a prompt."""
        settings = plain_sampling(temperature=0.0, max_tokens=1, prompt_logprobs=k)
        return "/v1/completions", completion_request(model, token_ids, settings)

    def refused(self, refusal: RequestRefused, path: str, k: int = 0) -> ServerError:
        return self._refusal(refusal, path)

    def error(self, message: str) -> ServerError:
        return self._connection.error(message)

    def show(self, message: str) -> None:
        self._connection.show(message)

    def close(self) -> None:
        """Close the connections, those of ``sampler`` too. Closing twice is harmless."""
        if self._sampler is not None:
            self._sampler.close()
        super().close()
