"""Teacher scores from a vLLM engine in this process."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor

from prime_composer.backends.alignment import (
    SequenceToScore,
    check_sequence_lengths,
    check_support_size,
    checked,
    sequences_to_score,
    spread,
)
from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.backends.vllm import VLLMEngine
from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.scoring.head import Head, find_head
from prime_composer.scoring.kinds import (
    GIVEN,
    HIDDEN,
    SAMPLED,
    TOP_K,
    KindRequest,
    SupportKind,
)
from prime_composer.scoring.worker import RowsRequest, read_payload
from prime_composer.teachers.output_head import teacher_head


class VLLMScorer:
    """Teacher scores from a vLLM engine in this process (``protocols.Scorer``).

    ``max_logprobs`` must be at least the K of the requests.
    """

    def __init__(self, model: str | Path, **arguments: Any):
        self._engine = VLLMEngine(model, **arguments)
        self.head_dtype = self._engine.head_dtype

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    gives_any_ids = True

    @property
    def sampler(self) -> VLLMEngine:
        """The engine itself, which generates with raw log-probs."""
        return self._engine

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        candidate_ids: Sequence[Int[Tensor, "_ _k"]] | None = None,
        hidden: bool = False,
    ) -> list[Scores]:
        """Score as ``protocols.Scorer`` says, with the engine's own head."""
        engine = self._engine
        vocab_size, limit = engine.limits.vocab_size, engine.limits.max_logprobs
        assert (
            vocab_size is not None and limit is not None
        )  # an engine in this process reports both
        k = check_support_size(support_size, vocab_size, limit, "max_logprobs")
        sequences = sequences_to_score(rollouts, prompts, vocab_size)
        if not sequences:
            return []
        check_sequence_lengths([s.token_ids for s in sequences], 1, engine.limits.max_model_len)
        kind: SupportKind = SAMPLED
        asked = [KindRequest(SAMPLED.name)] * len(sequences)
        if k and candidate_ids is not None:
            kind = GIVEN
            asked = [
                GIVEN.of(ids if one.read is None else ids[one.read])
                for one, ids in zip(sequences, candidate_ids, strict=True)
            ]
        elif k:
            kind, asked = TOP_K, [TOP_K.of(k)] * len(sequences)
        beside = [one for one in (SAMPLED, *[HIDDEN] * hidden) if one is not kind]
        new_params = engine._vllm.SamplingParams  # which looks the name up at each access
        requests = [
            new_params(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=0,
                detokenize=False,
                extra_args=RowsRequest(
                    sequence.ranges[0][0],
                    sequence.ranges[-1][1],
                    (request, *(KindRequest(one.name) for one in beside)),
                    tuple(sequence.skip),
                ).mark(),
            )
            for sequence, request in zip(sequences, asked, strict=True)
        ]
        outputs = engine._run([s.asked_ids for s in sequences], requests)
        head = self._head() if hidden else None
        read = [
            self._read(sequence, output.prompt_logprobs[-1], kind, request, head)
            for sequence, output, request in zip(sequences, outputs, asked, strict=True)
        ]
        scores: list[Scores] = []
        for columns, indices in groupby(range(len(asked)), lambda index: asked[index].k):
            alike = [*indices]
            scores += checked(
                [read[index] for index in alike],
                [sequences[index] for index in alike],
                k=columns,
                origin=f"The engine of {engine.model}",
                ranked=kind.ranked,
            )
        return scores

    def _head(self) -> TeacherHead:
        """Return the engine's output head, which shares its memory."""
        heads: list[Head] = self._engine.llm.collective_rpc(
            lambda worker: find_head(worker.get_model())
        )
        if len(heads) > 1:
            raise ValueError(
                f"The engine of {self._engine.model} has its output head in {len(heads)} parts; "
                'serve it with `prime-composer teacher`, or set k to a number instead of "full".'
            )
        (head,) = heads
        return teacher_head(
            head.computed_in,
            head.weight,
            head.bias,
            scale=head.scale,
            softcap=head.softcap,
            origin=f"The engine of {self._engine.model}",
        )

    def _read(
        self,
        sequence: SequenceToScore,
        payload: Any,
        kind: SupportKind,
        request: KindRequest,
        head: TeacherHead | None,
    ) -> Scores:
        """Return the scores of one sequence, which are not checked."""
        description, data = payload[:2]
        arrays = read_payload(description, data, sequence.count)
        shares = () if head is None else (HiddenStates(arrays.pop(HIDDEN.name), head),)
        numbers = {name: array.numpy() for name, array in arrays.items()}
        scores = kind.scores(numbers, request, sequence.start)
        return spread(replace(scores, hidden=shares), sequence.read)

    def close(self) -> None:
        """Close the engine. Closing twice is harmless."""
        self._engine.close()
