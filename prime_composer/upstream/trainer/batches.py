"""Micro-batches of prime-rl's trainer, with the teacher's support of their tokens."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import Support
from prime_composer.upstream.settings import SET_SWITCH
from prime_composer.upstream.trainer.validity import check_support
from prime_composer.upstream.wire import Payload, unpack


class MicroBatch:
    """One packed micro-batch.

    Everything but ``student`` is on the CPU, where prime-rl's data loader makes it, and is computed
    when it is first read. Checks of the support therefore cost the accelerator no synchronization.

    Args:
        tensors: prime-rl's micro-batch, a dict of tensors [1, seq].
        k: size of the support, 0 for none.
        on_rl_tokens: the loss compares rl tokens with a teacher, not distillation tokens.

    Attributes:
        student: log p of the support's ids minus log p of the label, [seq, k], by token. None until
            the head has run.
        slices: place in the packed sequence of each tensor that ``compute_loss`` works on, by its
            ``id``.
    """

    def __init__(self, tensors: dict[str, Any], k: int, on_rl_tokens: bool = False):
        self.k = k
        self.on_rl_tokens = on_rl_tokens
        self.student: Tensor | None = None
        self.slices: dict[int, slice] = {}
        self._tensors = tensors
        self._checked = False

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

    @cached_property
    def payload(self) -> Payload | None:
        """The teacher's top-K of each token; None where none was sent or none is read."""
        packed = self._row("routed_experts") if self.k else None
        return None if packed is None else unpack(packed, self.k)

    @cached_property
    def scored(self) -> Tensor:
        """Whether a token trains and has a teacher score, bool [seq]."""
        trained = self._tensors["loss_mask"][0]
        for stream in ("ref_kl_weights", "rl_weights"):
            weights = self._row(stream)
            trained = trained if weights is None else trained | (weights != 0)
        if self.payload is None:
            return torch.zeros_like(trained)
        return trained & ~self.payload.teacher_logprobs[:, 0].isnan()

    @cached_property
    def has_other_temperatures(self) -> bool:
        """Whether a scored token was sampled at another temperature than 1."""
        if self.temperatures is None:
            return False
        return bool((self.temperatures[self.scored] != 1).any())

    @cached_property
    def lacks_scores(self) -> bool:
        """Whether a distilled token came without a teacher score."""
        if self.payload is None:
            return False
        distilled = self._tensors["loss_mask"][0]
        if self.on_rl_tokens:  # from v0.7 on each loss has its own weights
            weights = self._row("rl_weights")
            distilled = distilled if weights is None else distilled & (weights != 0)
        elif "ref_kl_weights" in self._tensors:
            weights = self._row("ref_kl_weights")
            distilled = torch.zeros_like(distilled) if weights is None else weights != 0
        return bool(self.payload.teacher_logprobs[distilled].isnan().any())

    def check_support(self, vocab_size: int) -> None:
        """Check the supports of the scored tokens, once (``validity.check_support``).

        Args:
            vocab_size: entries of the student's head.

        Raises:
            ValueError: an id is not the student's, or the numbers are no log-probs.
        """
        if self.payload is not None and not self._checked:
            token_ids, logprobs = self.payload
            check_support(token_ids[self.scored], logprobs[self.scored], vocab_size)
            self._checked = True

    def place(self, sequences: Iterable[Tensor]) -> None:
        """Note which part of the packed sequence each of ``compute_loss``'s tensors is."""
        start = 0
        for sequence in sequences:
            self.slices[id(sequence)] = slice(start, start + sequence.shape[0])
            start += sequence.shape[0]

    def aligned(self, trainer_logprobs: Tensor) -> tuple[Tensor | None, Support | None]:
        """Return token ids and support of one of the sequences that ``place`` noted.

        Raises:
            ValueError: a support was expected and this micro-batch, or one of its distilled tokens,
                has none.
        """
        part = self.slices.get(id(trainer_logprobs))
        if part is None:
            return None, None
        device = trainer_logprobs.device
        token_ids = self.input_ids[part].to(device)
        if self.payload is None:
            if self.k:
                raise ValueError(
                    f"No teacher support arrived with this batch (top-{self.k} was expected): the "
                    f"orchestrator runs without the adapter. {SET_SWITCH}"
                )
            return token_ids, None
        if self.lacks_scores:
            raise ValueError(
                "A token that trains came without a teacher score: the loss has nothing to compare "
                "it to."
            )
        if self.student is None:
            student = trainer_logprobs.new_zeros((token_ids.shape[0], self.k))
        else:
            student = self.student[part]
        return token_ids, Support(
            token_ids=self.payload.token_ids[part].to(device),
            teacher_logprobs=self.payload.teacher_logprobs[part].to(device),
            student_logprobs=student + trainer_logprobs.unsqueeze(1),
        )


class TrackedBatches(list[dict[str, Any]]):
    """The micro-batches of one step; reports each one when a loop reaches it.

    prime-rl iterates twice, to count tokens and to train.
    """

    def __init__(self, batches: Iterable[dict[str, Any]], report: Callable[[dict[str, Any]], None]):
        super().__init__(batches)
        self._report = report

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in list.__iter__(self):
            self._report(batch)
            yield batch
