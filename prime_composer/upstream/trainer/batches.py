"""Micro-batches of prime-rl's trainer, with the teacher's support of their tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prime_composer.contract import Support
from prime_composer.scoring.shared_vocabulary import IN_TAIL, lacking
from prime_composer.two_heads import Logits, TwoHeads
from prime_composer.upstream.capabilities import HEADS
from prime_composer.upstream.settings import SET_SWITCH
from prime_composer.upstream.tally import DOCTOR, SilentHook
from prime_composer.upstream.trainer.validity import check_support
from prime_composer.upstream.wire import Payload, unpack

if TYPE_CHECKING:  # needs what the plain launcher's trainer may lack
    from prime_composer.upstream.trainer.teachers import Answer, Teachers

SAMPLING_MASKS = ("sampling_mask", "kept_tokens")
"""Names in a micro-batch, and of a head's parameter, of the ids that sampling had kept.

TODO(prime-rl): the second one is of d09488d5, which was not merged; remove it with that commit's
tests.
"""


class Aligned(NamedTuple):
    """What belongs to one sequence of a micro-batch beside prime-rl's own inputs.

    Attributes:
        token_ids: the tokens.
        support: log-probs at the teacher's top K.
        hidden_states: student and teachers over the whole vocabulary.
        ref_logprobs: log q of the tokens, where the trainer has asked for them.
    """

    token_ids: Int[Tensor, " seq"] | None = None
    support: Support | None = None
    hidden_states: TwoHeads | None = None
    ref_logprobs: Float[Tensor, " seq"] | None = None


class Questions(NamedTuple):
    """The answers that the trainer itself asked for, of one micro-batch.

    Attributes:
        teachers: who was asked.
        wait: waits for the answers, once.
    """

    teachers: "Teachers"
    wait: Callable[[], "list[Answer]"]


class MicroBatch:
    """One packed micro-batch.

    Everything but ``student`` is on the CPU, where prime-rl's data loader makes it, and is computed
    when it is first read. Checks of the support therefore cost the accelerator no synchronization.

    Args:
        tensors: prime-rl's micro-batch, a dict of tensors [1, seq].
        k: size of the support, 0 for none.
        on_rl_tokens: the loss compares rl tokens with a teacher, not distillation tokens.
        questions: what the trainer has asked; None where the orchestrator asks.

    Attributes:
        student: log p of the support's ids minus log p of the label, [seq, k], by token. None until
            the head has run.
        head: the student's logits, row t for token t + 1. None until the head has run.
        slices: place in the packed sequence of each tensor that ``compute_loss`` works on, by its
            ``id``.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        k: int,
        on_rl_tokens: bool = False,
        questions: Questions | None = None,
    ):
        self.k = k
        self.on_rl_tokens = on_rl_tokens
        self.questions = questions
        self.student: Tensor | None = None
        self.head: Logits | None = None
        self.slices: dict[int, slice] = {}
        self._tensors = tensors
        self._vocab_size: int | None = None

    def _row(self, name: str) -> Tensor | None:
        stream = self._tensors.get(name)
        return None if stream is None else stream[0]

    @cached_property
    def input_ids(self) -> Tensor:
        """Token ids, [seq]."""
        return self._tensors["input_ids"][0]

    @cached_property
    def temperatures(self) -> Tensor | None:
        """Sampling temperatures, [seq]; None where prime-rl has none."""
        return self._row("temperatures")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the loss compares whole vocabularies."""
        return self.questions is not None and self.questions.teachers.hidden

    @cached_property
    def answers(self) -> "dict[int, Answer]":
        """The trainer's answers, by the place where their sequence begins. Waits for them."""
        if self.questions is None:
            return {}
        return {answer.place.start: answer for answer in self.questions.wait()}

    @cached_property
    def ref_logprobs(self) -> Tensor | None:
        """log q of each token by the trainer's answers, NaN without one; None if it asks none."""
        if self.questions is None:
            return None
        whole = torch.full(self.input_ids.shape, torch.nan)
        for answer in self.answers.values():
            whole[answer.first : answer.last] = answer.scores.ref_logprobs.float()
        return whole

    @cached_property
    def payload(self) -> Payload | None:
        """The teacher's top-K of each token; None where there is none or none is read."""
        if not self.k:
            return None
        if self.questions is None:
            packed = self._row("routed_experts")
            return None if packed is None else unpack(packed, self.k)
        shape = (*self.input_ids.shape, self.k)
        token_ids, logprobs = torch.zeros(shape, dtype=torch.long), torch.full(shape, torch.nan)
        for answer in self.answers.values():
            part = slice(answer.first, answer.last)
            token_ids[part] = answer.scores.token_ids
            logprobs[part] = answer.scores.teacher_logprobs.float()
        return Payload(token_ids, logprobs)

    @cached_property
    def scored(self) -> Tensor:
        """Whether a token trains and has a support of the teacher, bool [seq]."""
        trained = self._tensors["loss_mask"][0]
        for stream in ("ref_kl_weights", "rl_weights"):
            weights = self._row(stream)
            trained = trained if weights is None else trained | (weights != 0)
        if self.payload is None:
            return torch.zeros_like(trained)
        return trained & ~self.payload.teacher_logprobs[:, 0].isnan()

    @cached_property
    def has_other_temperatures(self) -> bool:
        """Whether a token that is compared was sampled at another temperature than 1."""
        if self.temperatures is None:
            return False
        compared = self.scored
        if self.reads_hidden_states:
            compared = distilled_of(self._tensors, self.on_rl_tokens)
        return bool((self.temperatures[compared] != 1).any())

    @cached_property
    def lacks_scores(self) -> bool:
        """Whether a distilled token came without a teacher score."""
        if self.payload is None:
            return False
        distilled = distilled_of(self._tensors, self.on_rl_tokens)
        return bool(self.payload.teacher_logprobs[distilled].isnan().any())

    def check_support(self, vocab_size: int) -> None:
        """Check the supports of the scored tokens, once (``validity.check_support``).

        Args:
            vocab_size: entries of the student's head.

        Raises:
            ValueError: an id is neither the student's nor padding, or the numbers are no log-probs.
        """
        if self.payload is not None and self._vocab_size is None:
            token_ids, logprobs = self.payload
            check_support(token_ids[self.scored], logprobs[self.scored], vocab_size)
            self._vocab_size = vocab_size

    def place(self, sequences: Iterable[Tensor]) -> None:
        """Note which part of the packed sequence each of ``compute_loss``'s tensors is."""
        start = 0
        for sequence in sequences:
            self.slices[id(sequence)] = slice(start, start + sequence.shape[0])
            start += sequence.shape[0]

    def aligned(self, trainer_logprobs: Tensor, model: Any = None) -> Aligned:
        """Return what belongs to one of the sequences that ``place`` noted.

        Args:
            trainer_logprobs: prime-rl's log-probs of the sequence.
            model: the model that ran, for messages.

        Raises:
            ValueError: a support was expected and this micro-batch, or one of its distilled tokens,
                has none. Or a teacher's hidden states do not belong to its head.
            SilentHook: the student's side was not computed, or the sequence is none of
                ``compute_loss``'s.
        """
        part = self.slices.get(id(trainer_logprobs))
        if part is None:
            if not self.k and not self.reads_hidden_states:
                return Aligned()
            raise SilentHook(
                "prime_composer: prime-rl has called the loss with log-probs that compute_loss "
                f"did not get, so nothing tells which tokens they are of. {DOCTOR}"
            )
        device = trainer_logprobs.device
        own = self.ref_logprobs
        return Aligned(
            token_ids=self.input_ids[part].to(device),
            support=self._support(part, trainer_logprobs, model),
            hidden_states=self._two_heads(part, model),
            ref_logprobs=None if own is None else own[part].to(device),
        )

    def _two_heads(self, part: slice, model: Any) -> TwoHeads | None:
        """Return student and teachers of a sequence, where the loss compares heads."""
        if self.questions is None or not self.reads_hidden_states:
            return None
        if self.head is None:
            raise SilentHook(without_student(model))
        states = self.head.hidden
        before = states[part.start - 1 : part.stop - 1]
        if part.start == 0:  # nothing predicts the first token
            before = torch.cat([states.new_zeros(1, states.shape[1]), states[: part.stop - 1]])
        student = replace(self.head, hidden=before)
        answer = self.answers.get(part.start)
        if answer is None:  # none of its tokens trains, so that anything may be compared
            detached = replace(student, hidden=before.detach(), weight=student.weight.detach())
            return TwoHeads(student, (detached,))
        from prime_composer.upstream.trainer.teachers import two_heads_of

        return two_heads_of(answer, student, self.questions.teachers)

    def _support(self, part: slice, trainer_logprobs: Tensor, model: Any) -> Support | None:
        device = trainer_logprobs.device
        if self.payload is None:
            if self.k:
                raise ValueError(
                    f"No teacher support arrived with this batch (top-{self.k} was expected): the "
                    f"orchestrator runs without the adapter. {SET_SWITCH}"
                )
            return None
        if self.lacks_scores:
            raise ValueError(
                "A token that trains came without a teacher score: the loss has nothing to compare "
                "it to."
            )
        if self.student is None:
            raise SilentHook(without_student(model))
        token_ids = self.payload.token_ids[part].to(device)
        in_tail = lacking(token_ids, self._vocab_size)
        student = self.student[part] + trainer_logprobs.unsqueeze(1)
        teacher = self.payload.teacher_logprobs[part].to(device)
        return Support(
            token_ids=token_ids,
            teacher_logprobs=teacher.masked_fill(in_tail, IN_TAIL),
            student_logprobs=student.masked_fill(in_tail, IN_TAIL),
        )


def without_student(model: Any) -> str:
    """Say that no head of ours computed the student's side, and which head ran instead.

    Args:
        model: prime-rl's model; None where it was not seen.
    """
    head = getattr(model, "lm_head", None)
    ran = "a head that could not be seen"
    if head is not None:
        # FSDP makes a subclass of each class that it shards.
        cls = next(c for c in type(head).__mro__ if not c.__name__.startswith("FSDP"))
        ran = f"{cls.__module__}.{cls.__qualname__}"
    ours = ", ".join(head.places[0].attribute.removesuffix(".forward") for head in HEADS)
    return (
        "prime_composer: the student's log-probs for this loss were not computed. They are "
        f"computed in the forward of {ours}, called with labels and temperatures, and this "
        f"prime-rl's model ran {ran}. Use a loss of the sampled token (sampled_reverse_kl), or "
        f"another prime-rl. {DOCTOR}"
    )


def refuse_sampling_mask(given: Mapping[str, Any]) -> None:
    """Refuse ids that sampling had kept, where a loss compares more than the sampled token.

    prime-rl renormalizes its log-probs over these ids (top-p replay). Those of a support or of the
    whole vocabulary are normalized over all ids, as the teacher's are.

    Args:
        given: a micro-batch, or the arguments of an output head.

    Raises:
        ValueError: there are such ids.
    """
    for name in SAMPLING_MASKS:
        if given.get(name) is not None:
            raise ValueError(
                f"The batch carries {name}: the rollouts were sampled with top_p or top_k, and "
                "prime-rl's trainer renormalizes its log-probs over the ids that were kept. The "
                "teacher's log-probs are over the whole vocabulary, so that the loss would compare "
                "two kinds of distributions. Set top_p = 1 and no top_k in "
                "[orchestrator.train.sampling] and each environment's."
            )


def distilled_of(tensors: Mapping[str, Any], on_rl_tokens: bool) -> Bool[Tensor, " seq"]:
    """Return which tokens of a micro-batch the loss compares with a teacher.

    Args:
        tensors: prime-rl's micro-batch.
        on_rl_tokens: the loss is called on rl tokens.
    """
    trained: Tensor = tensors["loss_mask"][0]
    if not on_rl_tokens and "ref_kl_weights" not in tensors:
        return trained
    # From v0.7 on each loss has its own weights.
    weights = tensors.get("rl_weights" if on_rl_tokens else "ref_kl_weights")
    if on_rl_tokens:
        return trained if weights is None else trained & (weights[0] != 0)
    return torch.zeros_like(trained) if weights is None else weights[0] != 0


class TrackedBatches(list[dict[str, Any]]):
    """The micro-batches of one step; reports each one when a loop reaches it, and None at the end.

    prime-rl iterates twice, to count tokens and to train.

    Attributes:
        begun: how many loops have begun.
        ended: how many have reached their end.
    """

    def __init__(
        self, batches: Iterable[dict[str, Any]], report: Callable[[dict[str, Any] | None], None]
    ):
        super().__init__(batches)
        self._report = report
        self.begun = self.ended = 0

    @property
    def trained(self) -> bool:
        """Whether a step has trained on them, as far as its loops show."""
        return self.begun == self.ended >= 2

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        try:
            for batch in list.__iter__(self):
                self._report(batch)
                yield batch
        finally:  # a loop that an error ends, too: what comes next belongs to no micro-batch
            self._report(None)
        self.ended += 1
