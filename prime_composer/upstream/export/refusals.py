"""Refuse what a recipe says and no key of prime-rl's config can: rules that yield sentences.

What prime-rl's own keys say together is judged by ``upstream/refusals.py``, of which the launcher
reads the same.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prime_composer.problems.config import CHAT_KEYS
from prime_composer.recipe.schema import Recipe, RecipeError, RolloutConfig, TeacherConfig
from prime_composer.recipe.urls import has_credentials, two_credentials
from prime_composer.upstream.keys import SECTION
from prime_composer.upstream.settings import TEACHER_KEYS, AdapterSettings
from prime_composer.upstream.versions.records import Version
from prime_composer.upstream.versions.toml_shapes import at

RUN_LOCALLY = "or run the recipe with --engine local."


def refuse_recipe(recipe: Recipe) -> None:
    """Check that prime-rl has a place for all that a recipe asks for."""
    for rule in RULES:
        for sentence in rule(recipe):
            raise RecipeError(sentence)


def refuse_table(recipe: Recipe, version: Version, table: Any) -> None:
    """Check an exported TOML, in which prime-rl's own settings have won, as the launcher would."""
    try:
        settings = AdapterSettings.model_validate({"loss": at(table, SECTION)})
        settings.derived(recipe.loss, "loss", config=table, replays=version.replays_sampling)
    except ValueError as error:
        remedy = "" if RUN_LOCALLY in str(error) else f", {RUN_LOCALLY}"
        raise RecipeError(str(error).removesuffix("." if remedy else "") + remedy) from None


def student(recipe: Recipe) -> Iterator[str]:
    """prime-rl has one student, which trains as it is sampled."""
    if (quantize := recipe.student.quantize) is not None:
        yield (
            f"student.quantize = {dict(quantize)}: prime-rl's trainer sends its sampler the "
            "weights that its optimizer trains, and has no step between the two that would round "
            f"them. Leave it out, {RUN_LOCALLY}"
        )
    if recipe.student.load == "nf4":
        yield (
            "student.load = 'nf4': prime-rl has no key for a base in 4 bits. Leave it out, "
            f"{RUN_LOCALLY}"
        )
    if (lora := recipe.student.lora) is not None and lora.start is not None:
        yield (
            f"student.lora.start = {str(lora.start)!r}: prime-rl begins with a new adapter, and "
            "has no key for another one. Name a merged model in student.model (checkpoint.merge "
            f"writes one) and leave start out, {RUN_LOCALLY}"
        )
    if recipe.diloco is not None:
        yield (
            "[diloco]: prime-rl trains on one cluster with a fast network, and has no outer step "
            f"between several of its trainers. Leave the table out, {RUN_LOCALLY}"
        )


def rollouts(recipe: Recipe) -> Iterator[str]:
    """prime-rl trains on what the student samples.

    An environment of ``type = "sft"`` samples from a teacher. Its tokens are not scored (559b4477
    orchestrator/algo/sft.py:6), and ``compute_loss`` divides their loss by their own number
    (loss.py:394), while GKD's is one mean over the tokens of both kinds.
    """
    rollout = recipe.rollout
    if rollout.student_fraction != 1:
        why = "prime-rl trains on sampled sequences alone, not on the data's solutions"
        if rollout.teacher_samples:
            why = (
                "prime-rl asks no scores for sequences that a teacher samples, and averages their "
                'loss apart from the student\'s (algo.type = "sft"; compute_loss: ce_loss / '
                "ce_scale)"
            )
        yield (
            f"rollout.student_fraction = {rollout.student_fraction}: {why}. Set it to 1, "
            f"{RUN_LOCALLY}"
        )
    usual, longest = rollout.context(), rollout.max_tokens
    if rollout.max_model_len is None and longest >= usual:
        yield (
            "rollout.max_model_len = None: an export does not read the data, and the usual "
            f"{usual} has no room for rollout.max_tokens = {longest}. "
            "Set it to the tokens of the longest prompt and its completion."
        )


def teachers(recipe: Recipe) -> Iterator[str]:
    """prime-rl's processes ask servers, all alike, and know each by the name of its model."""
    if recipe.reference is not None:
        yield (
            "[reference]: prime-rl's orchestrator asks the teacher alone, and has no second model "
            f"to extrapolate it from. Leave the table out, {RUN_LOCALLY}"
        )
    prompts: dict[str, Any] = {}
    for table, teacher in recipe.teacher_tables.items():
        if teacher.tape_only:
            yield (
                f"{table}.tape_only = true: prime-rl's rollouts are new ones, and its orchestrator "
                "or trainer asks a teacher's server for their scores. Set it to false and name the "
                f"teacher, {RUN_LOCALLY}"
            )
        name = repr((teacher.model, teacher.prepare))
        if prompts.setdefault(name, teacher.prompt) != teacher.prompt:
            yield (
                f"[{table}.prompt]: prime-rl knows a teacher by the name that it is served by, and "
                f"another one has the same and other prompts: name one of them, {RUN_LOCALLY}"
            )
    for key in TEACHER_KEYS:
        values = asker_settings(recipe.teacher_tables, key)
        if len(values) > 1:
            yield (
                f"teachers: {key} is {' and '.join(map(repr, sorted(values)))}, and prime-rl's "
                "processes treat all teachers of a run alike. Set the same in each table."
            )


def credentials(recipe: Recipe) -> Iterator[str]:
    """Of a password and an API key prime-rl would drop the key."""
    servers: dict[str, RolloutConfig | TeacherConfig] = {"rollout": recipe.rollout}
    if recipe.policy_teacher is None:
        servers |= recipe.teacher_tables
    for table, server in servers.items():
        key = os.environ.get(server.api_key_var)
        if key and server.url is not None and has_credentials(server.url):
            yield two_credentials(f"The url in [{table}]", server.api_key_var)


def data(recipe: Recipe) -> Iterator[str]:
    """prime-rl's processes load the data themselves, and render it all alike."""
    if any(source.source == "rows" for source in recipe.problem_sources.values()):
        yield (
            "data.source = 'rows': prime-rl's processes load the data themselves. Write the "
            "rows to a JSONL or parquet file, and name it in data.path."
        )
    args = [source.template_args or {} for source in recipe.problem_sources.values()]
    args += [{} for _ in recipe.environments_by_id]
    if any(one != args[0] for one in args):
        yield (
            "template_args: prime-rl has one renderer for all environments, and they differ here: "
            "give all of them the same (environments by id: in rollout.renderer alone), "
            f"{RUN_LOCALLY}"
        )
    if args and args[0] and "name" not in recipe.rollout.renderer:
        yield (
            f"data.template_args = {args[0]}: prime-rl's renderers take variables where they are "
            'named: set rollout.renderer = { name = "qwen3" }, or "default" for any chat template, '
            f"{RUN_LOCALLY}"
        )


def policy_teacher(recipe: Recipe) -> Iterator[str]:
    """prime-rl's ``opsd`` scores with the live policy, which reads a hint in a system message."""
    policy = recipe.policy_teacher
    if policy is None:
        return
    for source in recipe.problem_sources.values():
        for key in CHAT_KEYS:
            if (value := getattr(source, key)) is not None:
                yield (
                    f"data.{key} = {value!r}: with [teacher.policy] prime-rl's opsd writes its "
                    "hint into a system message of its own, so that the two would differ. Leave it "
                    f"out, {RUN_LOCALLY}"
                )
    for name in recipe.environments_by_id if policy.hint == "feedback" else ():
        yield (
            "teacher.policy.hint = 'feedback': it quotes the right answer, and "
            f"environments.{name} has an id, and no answer that this package knows. Set it to "
            "'sibling' or 'reference'"
        )
    if policy.update != "live":
        yield (
            f"teacher.policy.update = {policy.update!r}: prime-rl cannot do that (its opsd scores "
            f"with the policy's current weights). Set it to 'live', {RUN_LOCALLY}"
        )
    if policy.template is not None:
        yield (
            f"teacher.policy.template = {policy.template!r}: prime-rl cannot do that (its opsd "
            "writes the hint into a system message before the question). Leave it out, "
            f"{RUN_LOCALLY}"
        )


def asker_settings(tables: Mapping[str, TeacherConfig], key: str) -> set[str]:
    """Return the values that the teachers' tables set for a key of ``TEACHER_KEYS``."""
    return {getattr(table, key) for table in tables.values()} - {None}


RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    *(rollouts, student, teachers, credentials, data, policy_teacher),
)
