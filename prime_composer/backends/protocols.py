"""Rollouts, and the protocols of what makes them and their scores: ``Sampler`` and ``Scorer``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_composer.contract import Scores


class StudentTurn(NamedTuple):
    """An answer of the student within a conversation."""

    start: int  # index of its first token
    asked: str  # the messages before it and the conversation's tools, as JSON


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion of one prompt. All tensors are on the CPU.

    Attributes:
        token_ids: prompt and completion, including a sampled EOS, [seq].
        loss_mask: True at the completion's tokens, [seq].
        inference_logprobs: log mu of each completion token, [seq]; NaN at the prompt. mu is the
            distribution that the token was sampled from, after temperature and top-p.
        finish_reason: "stop" at EOS or a stop token, "length" at the end of the token budget.
        prompt_index: index of the prompt in the ``generate`` call; a group's rollouts share it.
        by_teacher: the teacher sampled it, and not the student.
        turns: of a conversation, each answer of the student in it.
    """

    token_ids: Int[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    finish_reason: Literal["stop", "length"]
    prompt_index: int
    by_teacher: bool = False
    turns: tuple[StudentTurn, ...] = ()

    @classmethod
    def not_sampled(
        cls,
        token_ids: Int[Tensor, " seq"],
        start: int,
        finish_reason: Literal["stop", "length"],
        prompt_index: int = 0,
    ) -> "Rollout":
        """Return a sequence that no policy of the run has sampled: log mu is NaN everywhere.

        The completion begins at ``start``.
        """
        return cls(
            token_ids,
            torch.arange(len(token_ids)) >= start,
            torch.full(token_ids.shape, torch.nan),
            finish_reason,
            prompt_index,
        )

    @cached_property
    def start(self) -> int:
        """Index of the first trained token; ``len(token_ids)`` where no token is trained."""
        mask = self.loss_mask.numpy()
        return int(mask.argmax()) if mask.any() else len(mask)

    @property
    def trained(self) -> Bool[Tensor, " n"]:
        """Which tokens from ``start`` on are trained."""
        return self.loss_mask[self.start :]

    @property
    def completion_ids(self) -> list[int]:
        """The trained tokens."""
        return self.token_ids[self.loss_mask].tolist()


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        n: completions per prompt (the group).
        temperature: 0 is greedy.
        top_p: probability mass of the nucleus; 1 keeps the whole vocabulary.
        max_tokens: longest completion.
        stop_token_ids: ids that end a completion, in addition to the engine's own EOS ids.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Sizes that a backend can handle. None means that the backend does not report the size.

    Attributes:
        max_model_len: longest sequence in tokens, prompt and completion together. A scorer on vLLM
            reads at most one token less.
        vocab_size: entries of the model's output head.
        max_logprobs: largest K that ``Scorer.score`` accepts.
    """

    max_model_len: int | None = None
    vocab_size: int | None = None
    max_logprobs: int | None = None


@runtime_checkable
class Sampler(Protocol):
    """Samples rollouts of one model."""

    @property
    def limits(self) -> Limits:
        """The sizes that this sampler can handle."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        """Return ``params.n`` rollouts per prompt of token ids, in prompt order.

        The same seed and weights give the same rollouts.
        """
        ...

    def update_weights(self, model: nn.Module) -> None:
        """Load ``lora.views.weights_of(model)``, and drop every prefix cached with the old ones.

        For a student without an adapter they are ``model.state_dict()``. Where a backend reads the
        names of checkpoints, ``lora.views.weights_to_load(model)`` has them.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory or connections."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores rollouts with one teacher."""

    @property
    def limits(self) -> Limits:
        """The sizes that this scorer can handle."""
        ...

    @property
    def gives_any_ids(self) -> bool:
        """Whether any K, ids of the caller's choice and hidden states can be asked for."""
        ...

    @property
    def sampler(self) -> Sampler | None:
        """A sampler of the teacher's own weights; None where this scorer has none.

        The scorer closes it. Its log mu is right at temperature 1 and top-p 1, or greedy.
        """
        ...

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Return one ``Scores`` per rollout, in order.

        Their rows are the tokens from ``Rollout.start`` on.

        Args:
            rollouts: what to score.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads instead of each rollout's own prompt.
            candidate_ids: ids to score instead of the teacher's own top K, one [n, K] tensor per
                rollout from ``Rollout.start`` on. They are returned in the order given.
            hidden: return hidden states too.

        Raises:
            ValueError: K above the limit or the vocabulary, candidates of another shape, or a
                sequence too long for the model.
            InvalidAnswer: the model's numbers are no log-probs.
            ServerError: the server is gone, or lacks what is asked for.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory or connections."""
        ...
