"""A random teacher with a tokenizer of its own, and tiny runs with one."""

from collections.abc import Callable
from typing import Any

import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.tokenizer_pair import PromptsAndTexts, make_pair
from tests.cross_tokenizer.toys import END, byte_level
from tests.tiny_qwen import make_model


def wrapped(merges: list[tuple[str, str]], end: str | None = END) -> Any:
    from prime_composer.backends.hf_model import import_transformers

    transformers = import_transformers()
    tokenizer = byte_level(merges, words=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


TEACHER = [("a", "b"), ("ab", "c"), (" ", "a"), (" ", "b"), (" a", "b")]
STUDENT = [("b", "c"), (" ", "c")]


class Prompts(PromptsAndTexts):
    """A teacher's prompts as a function of the student's."""

    def __init__(self, read: Callable[[Any], list[int]]):
        self._read = read

    def __call__(self, prompt: Any) -> list[int]:
        return self._read(prompt)


def scorer_of(
    student_merges: list[tuple[str, str]], shift: int = 0, **options: Any
) -> tuple[OwnTokenizerScorer, Any]:
    """Return the scorer of a random teacher; ``shift`` marks before the prompt are its own."""
    from prime_composer.teachers.transformers import TransformersScorer

    teacher, student = wrapped(TEACHER), wrapped(student_merges)
    model = make_model(True, 3, vocab_size=len(teacher), eos_token_id=teacher.eos_token_id)
    pair = make_pair(teacher, student, [teacher.eos_token_id], [], "teacher")

    def read(ids: Any) -> list[int]:
        return [*teacher.encode("!" * shift), *teacher.encode(student.decode(ids))]

    prompts = Prompts(read)
    inner = TransformersScorer(model)
    return OwnTokenizerScorer(inner, pair, prompts, len(student), **options), student


def rollout_of(student: Any, prompt: str, text: str, ended: bool = True) -> Rollout:
    start = len(student.encode(prompt))
    ids = student.encode(prompt) + student.encode(text) + [student.eos_token_id] * ended
    token_ids = torch.tensor(ids)
    mask = torch.arange(len(ids)) >= start
    return Rollout(token_ids, mask, torch.full(token_ids.shape, torch.nan), "stop", 0)


def own_recipe(tiny_recipe: Callable[..., dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return the tables of a tiny run whose teacher has GPT-2's pieces."""
    raw = tiny_recipe(eval__kl_support=8, loss__k=8, **changes)
    raw["teacher"]["tokenizer"] = "own"
    raw["teacher"]["prepare"] |= {"pieces": "gpt2", "vocab_size": 320}
    raw["student"]["prepare"]["sft_steps"] = 60  # one that writes characters
    return raw
