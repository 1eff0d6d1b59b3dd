"""Rollouts, teacher scores, and the protocols of what makes them: ``Sampler`` and ``Scorer``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.two_heads import Logits


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
    """

    token_ids: Int[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    finish_reason: Literal["stop", "length"]
    prompt_index: int
    by_teacher: bool = False

    @property
    def start(self) -> int:
        """Index of the first trained token; ``len(token_ids)`` where no token is trained."""
        trained = self.loss_mask.nonzero()
        return int(trained[0]) if len(trained) else len(self.token_ids)

    @property
    def trained(self) -> Bool[Tensor, " n"]:
        """Which tokens from ``start`` on are trained."""
        return self.loss_mask[self.start :]

    @property
    def completion_ids(self) -> list[int]:
        """The trained tokens."""
        return self.token_ids[self.loss_mask].tolist()


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A teacher's output head, in the dtype that the teacher multiplies in.

    Attributes:
        weight: [V, d].
        bias: [V], of finite numbers; None without one.
        scale: factor of the logits.
        softcap: bound of the logits; None for none.
        tolerance: how far log q of a sampled token, computed from hidden state and head, may be
            from the teacher's own number, in nats. None: the numbers are not compared, since both
            come from one model in this process.
        origin: the teacher in words, for messages.
    """

    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, " v"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    tolerance: float | None = None
    origin: str = "The teacher"

    def __post_init__(self) -> None:
        """Refuse a bias that is not finite, which every road to a teacher's head passes.

        With -inf an id has no probability, and a KL is NaN or infinite.

        Raises:
            InvalidAnswer: an entry is NaN or infinite.
        """
        if self.bias is not None:
            self.refuse_non_finite("bias", self.bias)

    def refuse_non_finite(self, name: str, rows: Float[Tensor, "v ..."]) -> None:
        """Refuse NaN and infinite numbers in a part of the head.

        Args:
            name: of the part.
            rows: its rows.

        Raises:
            InvalidAnswer: there is one.
        """
        if torch.stack(rows.aminmax()).isfinite().all():
            return
        wrong = ~rows.isfinite().reshape(len(rows), -1).all(1)
        row = int(wrong.nonzero()[0])
        raise InvalidAnswer(
            f"{self.origin} has an output head whose {name} is NaN or infinite for id {row} (and "
            f"{int(wrong.sum()) - 1} other ids), so that no divergence is defined there. Use a "
            "checkpoint whose head is finite."
        )

    def over(self, hidden: Float[Tensor, "n d"]) -> Logits:
        """Return the teacher's logits over hidden states, as the teacher rounds them.

        A head in half precision rounds each logit to its dtype, as vLLM's does.
        """
        dtype = self.weight.dtype
        half = dtype in (torch.bfloat16, torch.float16)
        return Logits(
            hidden.to(dtype),
            self.weight,
            self.bias,
            self.softcap,
            self.scale,
            dtype if half else None,
        )


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The last hidden states of one teacher for one rollout, after the final norm.

    Attributes:
        states: row i predicts ``token_ids[start + i]`` of the rollout, [n, d], on the CPU.
        head: turns them into logits. One object for all answers of a teacher.
        weight: the teacher's share in a mixture.
    """

    states: Float[Tensor, "n d"]
    head: TeacherHead
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher's log-probs for one rollout from ``Rollout.start`` on. All tensors are on the CPU.

    Row i refers to ``token_ids[start + i]`` of the rollout, conditioned on the tokens before it;
    n = ``len(rollout.token_ids) - rollout.start``. Log-probs are in nats, of the full-vocabulary
    distribution at temperature 1.

    Attributes:
        ref_logprobs: log q of the sampled token, [n].
        token_ids: the teacher's top-K ids, distinct, most probable first, [n, k]; k may be 0.
        teacher_logprobs: log q of these ids, [n, k].
        hidden: the hidden states of each teacher, where they were asked for.
    """

    ref_logprobs: Float[Tensor, " n"]
    token_ids: Int[Tensor, "n k"]
    teacher_logprobs: Float[Tensor, "n k"]
    hidden: tuple[HiddenStates, ...] = ()


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
        """Load the weights of ``model``, and drop every prefix cached with the old ones."""
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
    ) -> list[TeacherScores]:
        """Return one ``TeacherScores`` per rollout, in order.

        Args:
            rollouts: what to score.
            support_size: K; 0 for the sampled token only, "full" for the whole vocabulary (K = V).
            prompts: token ids that the teacher reads instead of each rollout's own prompt.
            candidate_ids: ids to score instead of the teacher's own top K, one [n, K] tensor per
                rollout from ``Rollout.start`` on. They are returned in the order given.
            hidden: return hidden states too.
        """
        ...

    def close(self) -> None:
        """Free the engine's memory or connections."""
        ...


@runtime_checkable
class PluginServer(Protocol):
    """A scorer whose server may have the scoring plugin (``vllm_server.ServerScorer``)."""

    score: Any

    def plugin(self) -> Any:
        """Return the plugin's client; None without a plugin."""
