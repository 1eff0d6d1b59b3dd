"""What an answer of a teacher is on a tape: its key, and its tensors as bytes.

A key is a digest of what the answer is about. Scores have the tokens, the first scored one, and the
ids that were chosen; they are at temperature 1. A sampled answer has the prompt and how it was
sampled. K and hidden states are in the index, so that an answer with more is found too.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from safetensors.torch import load, save
from torch import Tensor

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.teachers.output_head import teacher_head
from prime_composer.teachers.tape.store import Note, Record
from prime_composer.teachers.watch import known_rollout

TOP_K, CHOSEN = "top K", "chosen ids"
KNOWN, HEAD, TEXT = "known request", "output head", "sampled answer"  # The kinds, in words

HEAD_KEY, KNOWN_KEY = "head", "known"  # Of what a tape has once


def answer_key(*parts: bytes) -> str:
    """Return a digest of byte strings, each with its length."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def ids_as_bytes(ids: Tensor | Sequence[int]) -> bytes:
    """Return ids in int32."""
    content = ids.numpy() if isinstance(ids, Tensor) else np.array(ids)
    return content.astype("<i4").tobytes()


class TeacherQuestion(NamedTuple):
    """What a teacher is asked about one rollout."""

    note: Note  # what the index says of its answer
    start: int  # position of the first scored token in what the teacher reads


def teacher_question(
    rollout: Rollout,
    k: int,
    prompt: Sequence[int] | None = None,
    candidates: Int[Tensor, "_ _k"] | None = None,
    hidden: bool = False,
) -> TeacherQuestion:
    """Return what a teacher is asked about a rollout. Arguments are those of ``Scorer.score``."""
    own = rollout.token_ids[rollout.start :]
    read = rollout.token_ids[: rollout.start] if prompt is None else prompt
    kind, parts = TOP_K, [ids_as_bytes(read), ids_as_bytes(own)]
    if candidates is not None:
        kind = CHOSEN
        parts.append(ids_as_bytes(candidates))
    if not rollout.trained.all():  # other rows may not have been read
        parts.append(rollout.trained.numpy().tobytes())
    key = answer_key(kind.encode(), *parts)
    return TeacherQuestion(Note(key, kind, k, hidden, len(own)), len(read))


def text_key(prompt: Sequence[int], params: SamplingParams, *of_call: bytes) -> str:
    """Return the key of what is sampled to a prompt; ``of_call``: what else it depends on."""
    return answer_key(TEXT.encode(), ids_as_bytes(prompt), repr(params).encode(), *of_call)


def scores_as_bytes(scores: Scores) -> bytes:
    """Return scores as bytes, each tensor in its own dtype: an id and its log-prob take 8 bytes.

    The output head is not among them, nor is a share's weight: one teacher has all of it.
    """
    return save(_tensors_of(scores))


def _tensors_of(scores: Scores) -> dict[str, Tensor]:
    tensors = {"own": scores.ref_logprobs}
    if scores.k:
        tensors |= {"ids": scores.token_ids.int(), "logprobs": scores.teacher_logprobs}
    if scores.known is not None:
        tensors["known"] = scores.known
    if scores.scored is not None:
        tensors["scored"] = scores.scored
    for share in scores.hidden:
        tensors["states"] = share.states
        if share.ref_logprobs is not None:
            tensors["own_of_states"] = share.ref_logprobs.clone()  # no two share memory
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def scores_of_bytes(content: bytes, start: int, head: TeacherHead | None) -> Scores:
    """Return scores of what ``scores_as_bytes`` returned; without a head no hidden states."""
    return _scores_of(load(content), start, head)


def _scores_of(tensors: Mapping[str, Tensor], start: int, head: TeacherHead | None) -> Scores:
    own = tensors["own"]
    shares: tuple[HiddenStates, ...] = ()
    if head is not None and "states" in tensors:
        of_states = tensors.get("own_of_states")
        shares = (HiddenStates(tensors["states"], head, ref_logprobs=of_states),)
    return Scores(
        own,
        tensors["ids"].long() if "ids" in tensors else torch.empty(len(own), 0, dtype=torch.long),
        tensors.get("logprobs", own.new_empty(len(own), 0)),
        shares,
        tensors.get("known"),
        start,
        tensors.get("scored"),
    )


def head_record(head: TeacherHead) -> Record:
    """Return a teacher's output head as a record."""
    tensors = {"weight": head.weight}
    if head.bias is not None:
        tensors["bias"] = head.bias
    for name in ("softcap", "scale", "tolerance"):
        if (value := getattr(head, name)) is not None:
            tensors[name] = torch.tensor(value, dtype=torch.float64)
    tensors["rounded"] = torch.tensor(head.rounded_to is not None)
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    return Record(Note(HEAD_KEY, HEAD, 0, False, 0), content)


def head_of_bytes(content: bytes, origin: str) -> TeacherHead:
    """Return a teacher's output head of its bytes, with its name for messages."""
    tensors = load(content)
    numbers = {
        name: tensors[name].item() for name in ("softcap", "scale", "tolerance") if name in tensors
    }
    weight = tensors["weight"]
    # The half-precision heads of older tapes, which do not say, all rounded.
    dtype = weight.dtype if tensors.get("rounded", True) else torch.float32
    return teacher_head(dtype, weight, tensors.get("bias"), **numbers, origin=origin)


def known_record(rollout: Rollout, scores: Scores) -> Record:
    """Return a request with its answer, by which a teacher is known again."""
    tensors = _tensors_of(scores)
    tensors |= {"tokens": rollout.token_ids.int(), "start": torch.tensor(rollout.start)}
    return Record(Note(KNOWN_KEY, KNOWN, scores.k, False, len(scores)), save(tensors))


def known_of_bytes(content: bytes) -> tuple[Rollout, Scores]:
    """Return a request and its answer of their bytes."""
    tensors = load(content)
    start = int(tensors["start"])
    return known_rollout(tensors["tokens"].long(), start), _scores_of(tensors, start, None)


def text_record(key: str, prompt: Sequence[int], rollouts: Sequence[Rollout]) -> Record:
    """Return the answers that were sampled to one prompt as a record."""
    parts = [one.token_ids[len(prompt) :] for one in rollouts]
    tensors: Mapping[str, Tensor] = {
        "ids": torch.cat(parts).int(),
        "logprobs": torch.cat([one.inference_logprobs[len(prompt) :] for one in rollouts]),
        "trained": torch.cat([one.loss_mask[len(prompt) :] for one in rollouts]),
        "lengths": torch.tensor([len(part) for part in parts]),
        "stopped": torch.tensor([one.finish_reason == "stop" for one in rollouts]),
    }
    rows = sum(map(len, parts))
    return Record(Note(key, TEXT, 0, False, rows), save(dict(tensors)))


def texts_of_bytes(content: bytes, prompt: Sequence[int], prompt_index: int) -> list[Rollout]:
    """Return the answers that were sampled to a prompt of their bytes."""
    tensors = load(content)
    lengths = tensors["lengths"].tolist()
    columns = (tensors[name].split(lengths) for name in ("ids", "logprobs", "trained"))
    rollouts = []
    for ids, logprobs, trained, stopped in zip(*columns, tensors["stopped"], strict=True):
        one = Rollout.not_sampled(
            torch.cat([torch.tensor(prompt, dtype=torch.long), ids.long()]),
            len(prompt),
            "stop" if stopped else "length",
            prompt_index,
        )
        mask, mu = one.loss_mask.clone(), one.inference_logprobs.to(logprobs.dtype)
        mask[len(prompt) :], mu[len(prompt) :] = trained, logprobs
        rollouts.append(replace(one, loss_mask=mask, inference_logprobs=mu))
    return rollouts
