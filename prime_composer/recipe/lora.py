"""Check that ``[student.lora]`` fits the other tables, and that what needs it has it."""

from collections.abc import Mapping

from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.teacher import ReferenceConfig, TeacherConfig


def check_adapter(
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    reference: ReferenceConfig | None,
    merge: bool,
) -> None:
    """Refuse what reads a student's adapter where it has none.

    Args:
        student: the recipe's.
        teachers: by table.
        reference: the recipe's.
        merge: ``checkpoint.merge``.
    """
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
