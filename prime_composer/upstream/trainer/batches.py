"""Micro-batches of prime-rl's trainer, with the teacher's support of their tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from prime_composer.contract import Logits, Scores, StopLogprobs, Support, TwoHeads
from prime_composer.full_vocabulary import compare
from prime_composer.losses.shared.stops import is_in
from prime_composer.scoring.shared_vocabulary import lacking
from prime_composer.upstream.settings import SET_SWITCH
from prime_composer.upstream.silent_hook import DOCTOR, SilentHook
from prime_composer.upstream.trainer.questions import TeacherConnections, two_heads_of
from prime_composer.upstream.trainer.validity import check_support
from prime_composer.upstream.versions.capabilities import HEADS
from prime_composer.upstream.wire import unpack


class Questions(NamedTuple):
    """The answers that the trainer itself asked for, of one micro-batch."""

    teachers: TeacherConnections  # who was asked
    wait: Callable[[], list[Scores]]  # waits, once; places are those in the packed micro-batch


class PackedMicroBatch:
    """One packed micro-batch.

    Everything but ``student`` is on the CPU, where prime-rl's data loader makes it, and is computed
    when it is first read. Checks of the support therefore cost the accelerator no synchronization.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        k: int,
        on_rl_tokens: bool = False,
        questions: Questions | None = None,
        stop_ids: tuple[int, ...] = (),
    ):
        self.k = k  # size of the support, 0 for none
        self.on_rl_tokens = on_rl_tokens  # compared with a teacher, not distillation tokens
        self.questions = questions  # the trainer's; None where the orchestrator asks
        self.stop_ids = stop_ids  # of the loss's stops
        # log p(id) - log p(label), [seq, k + stops]; by the head
        self.student: Tensor | None = None
        self.head: Logits | None = None  # the student's, row t for token t + 1; by the head
        self.sequences: Sequence[Tensor] = ()  # of ``compute_loss``, in their packed order
        self._tensors = tensors  # prime-rl's micro-batch, each [1, seq]
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
    def answers(self) -> list[Scores]:
        """The scores that the trainer has asked for, of each sequence. Waits for them."""
        return [] if self.questions is None else self.questions.wait()

    @cached_property
    def scores(self) -> Scores | None:
        """The teacher's scores, unknown where none has scored a token; None without any to read."""
        if self.questions is None:
            packed = self._row("routed_experts") if self.k else None
            return None if packed is None else unpack(packed, self.k)
        shape = (*self.input_ids.shape, self.k)
        own, logprobs = torch.full(self.input_ids.shape, torch.nan), torch.zeros(shape)
        token_ids, known = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).bool()
        for answer in self.answers:
            part = slice(answer.start, answer.start + len(answer))
            own[part] = answer.ref_logprobs.float()
            token_ids[part] = answer.token_ids
            logprobs[part] = answer.teacher_logprobs.float()
            known[part] = answer.all_known & answer.all_scored[:, None]
        return Scores(own, token_ids, logprobs, known=known)

    @property
    def support(self) -> Scores | None:
        """The scores, where they have a support."""
        return self.scores if self.k else None

    @property
    def has_support(self) -> Tensor:
        """Whether a token has a support of the teacher, bool [seq]."""
        if self.support is None:
            return torch.zeros(self.input_ids.shape, dtype=torch.bool)
        if self.support.known is None:
            return torch.ones(self.input_ids.shape, dtype=torch.bool)
        return self.support.known.any(dim=1)

    @cached_property
    def scored(self) -> Tensor:
        """Whether a token trains and has a support of the teacher, bool [seq]."""
        trained = self._tensors["loss_mask"][0]
        for stream in ("ref_kl_weights", "rl_weights"):
            weights = self._row(stream)
            trained = trained if weights is None else trained | (weights != 0)
        return trained & self.has_support

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
        """Whether a distilled token came without a support, in a batch that has supports."""
        if self.support is None:
            return False
        return bool((distilled_of(self._tensors, self.on_rl_tokens) & ~self.has_support).any())

    def check_support(self, vocab_size: int) -> None:
        """Check the supports of the scored tokens, once (``validity.check_support``)."""
        if self.support is not None and self._vocab_size is None:
            check_support(self.support.rows(self.scored), vocab_size)
            self._vocab_size = vocab_size

    def place(self, sequences: Sequence[Tensor]) -> None:
        """Note the tensors of ``compute_loss``, which are one after the other."""
        self.sequences = sequences

    def _part_of(self, trainer_logprobs: Tensor) -> slice | None:
        """Return the place of one of ``compute_loss``'s tensors; None for any other tensor."""
        start = 0
        for sequence in self.sequences:
            end = start + sequence.shape[0]
            if sequence is trainer_logprobs:
                return slice(start, end)
            start = end
        return None

    def aligned(self, trainer_logprobs: Tensor, model: Any = None) -> dict[str, Any]:
        """Return what prime-rl's ``LossInputs`` lack for a sequence that ``place`` noted.

        These are fields of ours by name, and ``environment``, its name. ``ref_logprobs`` are among
        them where the trainer has asked the teachers. ``model`` is for messages.
        """
        part = self._part_of(trainer_logprobs)
        if part is None:
            if not self.k and not self.reads_hidden_states:
                return {}
            raise SilentHook(
                "prime_composer: prime-rl has called the loss with log-probs that compute_loss "
                f"did not get, so nothing tells which tokens they are of. {DOCTOR}"
            )
        device = trainer_logprobs.device
        fields = {
            "environment": self._tensors["env_names"][part.start],
            "token_ids": self.input_ids[part].to(device),
            "support": self._support(part, trainer_logprobs, model),
            "hidden_states": self._two_heads(part, model),
        }
        fields["stops"] = self._stops(part, trainer_logprobs, fields["hidden_states"])
        if self.questions is not None and self.scores is not None:
            fields["ref_logprobs"] = self.scores.ref_logprobs[part].to(device)
        return fields

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
        answers = [one for one in self.answers if part.start <= one.start < part.stop]
        if not answers:  # none of its tokens trains, so that anything may be compared
            detached = replace(student, hidden=before.detach(), weight=student.weight.detach())
            return TwoHeads(student, (detached,))
        return two_heads_of(answers[0], part, self.input_ids, student, self.questions.teachers)

    def _support(self, part: slice, trainer_logprobs: Tensor, model: Any) -> Support | None:
        device = trainer_logprobs.device
        if self.support is None:
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
        scores = self.support.rows(part)
        known = ~lacking(scores.token_ids, self._vocab_size)
        if scores.known is not None:
            known &= scores.known
        return Support(
            token_ids=scores.token_ids.to(device),
            teacher_logprobs=scores.teacher_logprobs.to(device),
            student_logprobs=self.student[part, : self.k] + trainer_logprobs.unsqueeze(1),
            known=None if known.all() else known.to(device),
        )

    def _stops(
        self, part: slice, trainer_logprobs: Tensor, heads: TwoHeads | None
    ) -> StopLogprobs | None:
        """Return log p of a sequence at the loss's stops; with two heads of sampled ones alone."""
        if not self.stop_ids:
            return None
        if heads is None:
            assert self.student is not None
            own = self.student[part, self.k :] + trainer_logprobs.unsqueeze(1)
            return StopLogprobs(self.stop_ids, own)
        trained, columns = self._tensors["loss_mask"][0][part], [*self.stop_ids]
        sampled = (trained & is_in(self.input_ids[part], self.stop_ids)).to(trainer_logprobs.device)
        own = compare(heads.masked(sampled), lambda log_p, _, **__: log_p[:, columns])
        return StopLogprobs(self.stop_ids, own)


def without_student(model: Any) -> str:
    """Say that no head of ours computed the student's side, and which head ran instead."""
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
    """
    if given.get("sampling_mask") is not None:
        raise ValueError(
            "The batch carries sampling_mask: prime-rl's trainer renormalizes its log-probs over "
            "the ids that sampling kept, and the teacher's are over the whole vocabulary. Set "
            "top_p = 1 and no top_k in [orchestrator.train.sampling] and each environment's."
        )


def distilled_of(tensors: Mapping[str, Any], on_rl_tokens: bool) -> Bool[Tensor, " seq"]:
    """Return which tokens of a micro-batch the loss compares with a teacher."""
    trained: Tensor = tensors["loss_mask"][0]
    if not on_rl_tokens and "ref_kl_weights" not in tensors:
        return trained
    # Each loss has its own weights, but in v0.6, where a batch has tokens of one kind.
    weights = tensors.get("rl_weights" if on_rl_tokens else "ref_kl_weights")
    if on_rl_tokens:
        return trained if weights is None else trained & (weights[0] != 0)
    return torch.zeros_like(trained) if weights is None else weights[0] != 0


class TrackedBatches(list[dict[str, Any]]):
    """The micro-batches of one step; reports each one when a loop reaches it, and None at the end.

    prime-rl iterates twice, to count tokens and to train.
    """

    def __init__(
        self, batches: Iterable[dict[str, Any]], report: Callable[[dict[str, Any] | None], None]
    ):
        super().__init__(batches)
        self._report = report
        self.begun = self.ended = 0  # loops

    def number_of(self, tensors: dict[str, Any]) -> int | None:
        """Return which one of the micro-batches this is; None for any other one."""
        batches = enumerate(list.__iter__(self))
        return next((number for number, one in batches if one is tensors), None)

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
