"""Open a teacher, and check that it fits the student and the loss."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from prime_composer.backends.hf_model import (
    ids_of,
    import_transformers,
    load_tokenizer,
    read_eos_token_ids,
)
from prime_composer.backends.model_files import cache_root
from prime_composer.backends.protocols import Rollout, Scorer
from prime_composer.losses import LossConfig
from prime_composer.problems.prompts import ends_of_chat
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.teachers.compatibility import (
    check_served_tokenizer,
    check_tokenizers,
    check_vocabularies,
    common_ends,
)
from prime_composer.teachers.own_prompt import prompt_of_messages, with_template
from prime_composer.teachers.server import ServerScorer
from prime_composer.teachers.transformers import TransformersScorer

Teacher = str | Path | nn.Module | Scorer  # A URL, a directory or hub id, or one in memory


def is_url(teacher: Teacher) -> bool:
    return isinstance(teacher, str) and teacher.startswith(("http://", "https://"))


def is_folder_or_hub_id(teacher: Teacher) -> TypeGuard[str | Path]:
    """Return whether a teacher is a model to load."""
    return isinstance(teacher, (str, Path)) and not is_url(teacher)


def open_teacher(
    teacher: Teacher | None, args: Any, device: torch.device, status: Callable[[str], None]
) -> Scorer:
    if teacher is None:
        raise ValueError(
            "teacher_model is missing: pass a model, its directory or hub id, the URL of a vLLM "
            "server, or a prime_composer.teachers.server.ServerScorer."
        )
    if args.teacher_model_init_kwargs and not is_folder_or_hub_id(teacher):
        raise ValueError(
            "args.teacher_model_init_kwargs is for a teacher that is loaded here: leave it out, or "
            "pass a directory or hub id as teacher_model."
        )
    if isinstance(teacher, nn.Module):
        return TransformersScorer(teacher.to(device).eval())
    if not isinstance(teacher, (str, Path)):
        return teacher
    if is_url(teacher):
        return ServerScorer(
            str(teacher),
            section="teacher_model",
            heads=cache_root() / "heads",
            status=status,
        )
    settings = {
        "dtype": "float32",
        "device_map": {"": device},
        "trust_remote_code": args.trust_remote_code,
        **(args.teacher_model_init_kwargs or {}),
    }
    if args.teacher_model_revision is not None:
        settings.setdefault("revision", args.teacher_model_revision)
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(teacher), **settings)
    return TransformersScorer(model.eval())


def check_teacher(
    teacher: Teacher, scorer: Scorer, tokenizer: Any, vocab_size: int, config: LossConfig
) -> list[str]:
    """Check vocabularies and tokenizers, and ask the teacher one question as the loss will."""
    size, by_student = config.asked_of_teacher
    warnings = check_vocabularies(vocab_size, scorer.limits, len(tokenizer), size)
    own = load_tokenizer(teacher) if is_folder_or_hub_id(teacher) else None
    if own is not None:
        check_tokenizers(tokenizer, own)
    elif not check_served_tokenizer(tokenizer, scorer):
        warnings.append(
            "The teacher's tokenizer is not known, so its token ids were not compared with the "
            "student's."
        )
    question = Rollout.not_sampled(torch.tensor([0, 1]), 1, "length")
    candidates = [torch.arange(size).unsqueeze(0)] if by_student and size != "full" else None
    scorer.score([question], size, candidate_ids=candidates, hidden=config.reads_hidden_states)
    return warnings


def ends_with(
    teacher: Teacher, tokenizer: Any, own: Collection[int]
) -> tuple[tuple[int, ...], list[str]]:
    """Return what ends a text for the student and its teacher, and what to say of it."""
    of_teacher: dict[str, set[int]] = {}
    if isinstance(teacher, nn.Module):
        model: Any = teacher
        of_teacher["teacher_model"] = ids_of(model.generation_config) or {*own}
    elif is_folder_or_hub_id(teacher):
        turns = ends_of_chat(load_tokenizer(teacher) or tokenizer)
        of_teacher["teacher_model"] = {*read_eos_token_ids(teacher)} | turns
    ends, lines = common_ends(tokenizer, {*own}, ends_of_chat(tokenizer), of_teacher)
    return ends.ids, lines


def read_prompts(
    table: Mapping[str, Any] | None, teacher: Teacher, tokenizer: Any
) -> Callable[[Any], list[int]] | None:
    """Return what makes a teacher's prompt of a row's ``prompt``, a text or a list of messages.

    None: the teacher reads the student's.
    """
    if table is None:
        return None
    asks = TeacherPromptConfig.model_validate(dict(table))
    if tokenizer is None and is_folder_or_hub_id(teacher):
        tokenizer = load_tokenizer(teacher)
    if tokenizer is None:
        raise ValueError("teacher_prompt needs the teacher's tokenizer: pass teacher_tokenizer.")
    own = with_template(tokenizer, asks, "teacher")
    chats = asks.chat_template or asks.system or asks.template_args

    def prompt(asked: Any) -> list[int]:
        is_text = isinstance(asked, str)
        messages = [{"role": "user", "content": asked}] if is_text else asked
        plain = asks.model_copy(update={"chat_template": False})
        return prompt_of_messages(messages, plain if is_text and not chats else asks, own)

    return prompt
