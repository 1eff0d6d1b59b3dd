"""Check that the tables of teachers, of the reference and of an adapter fit the other tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_composer.losses import LOSS_TYPES, LossConfig
from prime_composer.losses.needs import OF_TEACHER
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.teacher import PolicyTeacherConfig, ReferenceConfig, TeacherConfig


def check_tapes(teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse two teachers, given by table, with one tape."""
    tables: dict[Path, str] = {}
    for table, teacher in teachers.items():
        if teacher.tape is None:
            continue
        other = tables.setdefault(teacher.tape, table)
        if other != table:
            raise ValueError(
                f"[{other}] and [{table}] have the same tape, and a tape has one teacher: name a "
                "folder for each"
            )


def check_ahead(ahead: int, sampler: str, teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse batches ahead of their steps where training and sampling or scoring take turns."""
    if not ahead:
        return
    key = f"rollout.ahead = {ahead}"
    if not backend_of(sampler).serves:
        raise ValueError(
            f"{key} samples while the student trains, and rollout.backend = {sampler!r} is a part "
            "of the process that trains, and takes turns with it: start a server of the student "
            "and name it in rollout.url (backend = 'server'), or leave ahead out"
        )
    for table, teacher in teachers.items():
        if teacher.policy is not None:
            raise ValueError(
                f"{key} scores while the student trains, and [{table}.policy] is the student, "
                "whose weights change meanwhile: name a teacher of its own, or leave ahead out"
            )
        if not teacher.tape_only and not backend_of(teacher.runs_on(sampler)).any_thread:
            raise ValueError(
                f"{key} scores in another thread than training, and [{table}] backend = "
                f"{teacher.backend!r} answers in this process to one thread alone: start its "
                f"server and name it in {table}.url, or set {table}.backend = 'transformers'"
            )


def check_choice_of_teachers(
    sources: Mapping[str, DataConfig | EnvironmentConfig], teachers: Mapping[str, TeacherConfig]
) -> None:
    """Refuse sources, given by table, that name teachers that there are not."""
    for table, data in sources.items():
        named = [data.teacher] if isinstance(data.teacher, str) else list(data.teacher or ())
        by_row = isinstance(data, DataConfig) and data.teacher_key is not None
        if not teachers and (named or by_row):
            key = "teacher" if named else "teacher_key"
            raise ValueError(f"{table}.{key} chooses among [teachers.*], and there are none")
        for teacher in named:
            if teacher not in teachers:
                raise ValueError(
                    f"{table}.teacher names {teacher!r}; [teachers] has {', '.join(teachers)}"
                )


def check_sampling_teachers(teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse teachers, given by table, that cannot write what the student does not."""
    if not teachers:
        raise ValueError("rollout.other_source = 'teacher': there is none; add a [teacher] table")
    for table, teacher in teachers.items():
        if teacher.policy is not None:
            raise ValueError(
                "rollout.other_source = 'teacher': [teacher.policy] is the student with a hint, "
                "which samples no answers; name a teacher of its own"
            )
        if teacher.on_overflow != "error":
            raise ValueError(
                f"{table}.on_overflow = {teacher.on_overflow!r}: a teacher that samples "
                "(rollout.other_source) needs room for every prompt with a full answer; set "
                "it to 'error'"
            )


def check_reference_model(
    reference: ReferenceConfig, student: StudentConfig, teachers: Mapping[str, TeacherConfig]
) -> None:
    """Refuse a reference without a teacher to extrapolate, or which is the same model."""
    models = {
        table: teacher.resolved(student)
        for table, teacher in teachers.items()
        if teacher.policy is None
    }
    if not models:
        raise ValueError(
            "[reference] extrapolates a teacher that is a model of its own: add a [teacher] "
            "with model, prepare or url"
        )
    if reference.start and (quantize := student.quantize) is not None:
        prepared = getattr(student.prepare, "quantize", None)
        if prepared is None or dict(prepared) != dict(quantize):
            raise ValueError(
                "[reference] start = true opens the student's weights as they are stored, and "
                "student.quantize rounds them before the first step: round them in "
                "[student.prepare] too, with the same `quantize`"
            )
    resolved = reference.resolved(student)
    for table, teacher in models.items():
        if resolved.is_model_of(teacher):
            raise ValueError(
                f"[reference] is the model of [{table}], and lambda log q + (1 - lambda) log q "
                "is log q for every lambda: name the teacher's base or a third model, set "
                "start = true, or leave [reference] out"
            )


def check_own_tokenizers(
    teachers: Mapping[str, TeacherConfig],
    loss: LossConfig,
    *,
    mixed: bool,
    has_reference: bool,
    kl_support: Any,
) -> None:
    """Refuse what a teacher with a tokenizer of its own cannot give."""
    tables = [table for table, one in teachers.items() if one.tokenizer == "own"]
    if not tables:
        return
    for table in tables:
        if teachers[table].policy is not None:
            raise ValueError(
                f'[{table}] tokenizer = "own": [{table}.policy] is the student itself; leave '
                "tokenizer out"
            )
    own = f'[{tables[0]}] tokenizer = "own"'
    size, by_student = loss.asked_of_teacher
    if size == "full" or loss.reads_hidden_states:
        raise ValueError(
            f'[loss] type = {loss.type!r}, k = "full": a whole vocabulary has ids that one pass of '
            f"the teacher does not resolve, and {own}; set k to a number"
        )
    if by_student:
        raise ValueError(
            f'[loss] type = {loss.type!r}, chosen_by = "student": with {own} the ids are chosen '
            'among those that are resolved; set chosen_by = "teacher"'
        )
    if kl_support == "full":
        raise ValueError(
            f'eval.kl_support = "full" needs every id of the vocabulary, and {own} does not '
            "resolve all; set it to a number"
        )
    if mixed:
        raise ValueError(
            f"{own}: its unresolved ids are missing from a mixture; route each environment to one "
            "teacher (data.teacher)"
        )
    if has_reference:
        raise ValueError(f"{own} does not go with [reference]; leave one of them out")


def check_own_prompts(
    teachers: Mapping[str, TeacherConfig], sources: Mapping[str, DataConfig | EnvironmentConfig]
) -> None:
    """Refuse prompts of teachers, both given by table, that cannot be written."""
    for table, teacher in teachers.items():
        if teacher.prompt is None:
            continue
        if teacher.policy is not None:
            raise ValueError(
                f"[{table}.prompt]: [{table}.policy] writes the teacher's prompt, from a hint; "
                "leave one of them out"
            )
        for source, data in sources.items():
            if not isinstance(data, DataConfig):
                plain = teacher.prompt.chat_template is False
                if plain or teacher.prompt.prompt_template is not None:
                    key = "chat_template = false" if plain else "prompt_template"
                    raise ValueError(
                        f"[{table}.prompt] {key}: [{source}] has an id, and messages of its own, "
                        "which go through a chat template: leave it out"
                    )
            else:
                try:
                    teacher.prompt.of(data)
                except ValidationError as error:
                    reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                    raise ValueError(f"[{table}.prompt]: {reason}") from None


def check_hint(policy: PolicyTeacherConfig, group_size: int, loss: LossConfig) -> None:
    """Refuse a hint that a group does not have, or that leaves out what the loss needs."""
    if policy.hint != "sibling":
        return
    if group_size < 2:
        raise ValueError(
            "teacher.policy.hint = 'sibling' compares a group: set rollout.group_size to 2 or more"
        )
    for section, (part, needs) in loss.needs_by_section().items():
        if "advantages" in needs:
            raise ValueError(
                f"[{section}] type = {part.type!r} needs the advantages of whole groups, and "
                "teacher.policy.hint = 'sibling' leaves the only correct rollout of a group "
                "out, so that its wrong ones alone would train: set hint to 'reference' or "
                "'feedback'"
            )


def check_adapter(
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    reference: ReferenceConfig | None,
    merge: bool,
) -> None:
    """Refuse what reads a student's adapter where it has none."""
    lora = student.lora
    if lora is not None:
        if lora.start is not None and reference is not None and reference.start:
            raise ValueError(
                "[reference] start = true opens the student's weights as they are stored, and "
                "student.lora.start puts an adapter on them before the first step: name a merged "
                "model in reference.model"
            )
        return
    off = [f"{table}.base = true" for table, teacher in teachers.items() if teacher.base]
    off += [
        f"{table}.policy.update = 'base'"
        for table, teacher in teachers.items()
        if teacher.policy is not None and teacher.policy.update == "base"
    ]
    if off:
        raise ValueError(
            f"{off[0]} is the student with its adapter switched off, and this one has none, so "
            "that its own weights move: add [student.lora], or name a model"
        )
    if merge:
        raise ValueError(
            "checkpoint.merge = true merges the student's adapter into its weights, and it has "
            "none: add [student.lora], or leave merge out"
        )


def check_reference_loss(loss: LossConfig) -> None:
    """Refuse a loss that reads more of the teacher than a reference can change."""
    able = " or ".join(repr(name) for name, one in LOSS_TYPES.items() if one.takes_reference)
    if not loss.compares_with_teacher:
        raise ValueError(f"[reference] goes with a loss of type {able}")
    for section, (part, needs) in loss.needs_by_section().items():
        read = needs & OF_TEACHER
        if read and (not part.takes_reference or read != {"ref_logprobs"}):
            raise ValueError(
                f"[reference] changes the teacher's log-prob of the sampled token, which is "
                f"then none of a distribution, and [{section}] type = {part.type!r} reads more "
                f"than that: use type = {able} without a baseline"
            )
