"""Refuse recipes that ask for what no field of prime-rl's config can express."""

import os
from collections.abc import Mapping
from typing import Any

from prime_composer.losses import LossConfig, require
from prime_composer.problems.config import CHAT_KEYS, DataConfig
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.schema import (
    PolicyTeacherConfig,
    Recipe,
    RecipeError,
    RolloutConfig,
    TeacherConfig,
)
from prime_composer.recipe.urls import has_credentials, two_credentials
from prime_composer.upstream.settings import TEACHER_KEYS, wire_support_size
from prime_composer.upstream.versions.records import LOSS_V0_7, Version
from prime_composer.upstream.versions.toml_shapes import ENVIRONMENTS

RUN_LOCALLY = "or run the recipe with --engine local."


def refuse(recipe: Recipe, version: Version) -> None:
    """Check that a version of prime-rl can run the recipe."""
    fraction = recipe.rollout.student_fraction
    if fraction != 1:
        raise RecipeError(
            f"rollout.student_fraction = {fraction}: {of_other_sources(recipe.rollout)}. "
            f"Set it to 1, {RUN_LOCALLY}"
        )
    if (quantize := recipe.student.quantize) is not None:
        raise RecipeError(
            f"student.quantize = {dict(quantize)}: prime-rl's trainer sends its sampler the "
            "weights that its optimizer trains, and has no step between the two that would round "
            f"them. Leave it out, {RUN_LOCALLY}"
        )
    if (lora := recipe.student.lora) is not None and lora.start is not None:
        raise RecipeError(
            f"student.lora.start = {str(lora.start)!r}: prime-rl begins with a new adapter, and "
            "has no key for another one. Name a merged model in student.model (checkpoint.merge "
            f"writes one) and leave start out, {RUN_LOCALLY}"
        )
    if recipe.diloco is not None:
        raise RecipeError(
            "[diloco]: prime-rl trains on one cluster with a fast network, and has no outer step "
            f"between several of its trainers. Leave the table out, {RUN_LOCALLY}"
        )
    if recipe.reference is not None:
        raise RecipeError(
            "[reference]: prime-rl's orchestrator asks the teacher alone, and has no second model "
            f"to extrapolate it from. Leave the table out, {RUN_LOCALLY}"
        )
    for table, teacher in recipe.teacher_tables.items():
        if teacher.tape_only:
            raise RecipeError(
                f"{table}.tape_only = true: prime-rl's rollouts are new ones, and its orchestrator "
                "or trainer asks a teacher's server for their scores. Set it to false and name the "
                f"teacher, {RUN_LOCALLY}"
            )
    usual, longest = recipe.rollout.context(), recipe.rollout.max_tokens
    if recipe.rollout.max_model_len is None and longest >= usual:
        raise RecipeError(
            "rollout.max_model_len = None: an export does not read the data, and the usual "
            f"{usual} has no room for rollout.max_tokens = {longest}. "
            "Set it to the tokens of the longest prompt and its completion."
        )
    refuse_tokenizers(recipe.teacher_tables, recipe.loss)
    refuse_prompts(recipe)
    policy = recipe.policy_teacher
    servers = {} if policy is not None else recipe.teacher_tables
    refuse_two_credentials({"rollout": recipe.rollout, **servers})
    refuse_environments(recipe.environments_by_id, policy)
    refuse_data(recipe.problem_sources, policy)
    try:
        wire_support_size(recipe.loss, "loss")
    except ValueError as error:
        raise RecipeError(f"{str(error).removesuffix('.')}, {RUN_LOCALLY}") from None
    if policy is not None:
        refuse_policy_teacher(policy)
    refuse_asker(recipe.loss, recipe.teacher_tables, policy is not None)
    provided = LOSS_V0_7.provides(recipe.loss, adapter=True)
    try:
        require(recipe.loss, provided, "prime_rl", provider=f"prime-rl {version.name}")
    except ValueError as error:
        raise RecipeError(str(error)) from None


def refuse_native(
    loss: LossConfig, rollout: RolloutConfig, version: Version, table: Mapping[str, Any]
) -> None:
    """Check the rollouts of an exported TOML, in which prime-rl's own settings have won.

    From September 2026 on, the trainer's log-probs are those among the ids that top-p or top-k has
    kept, and a sampler replays them. A teacher's are of the whole vocabulary, so that a difference
    of the two is none of one distribution. prime-rl refuses opd and opsd then. Before, both are of
    the whole vocabulary, and top-p decides only which tokens are compared.

    Tokens of an advantage below ``min_abs_advantage`` have no rl loss, and with it no teacher.
    """
    if not loss.compares_with_teacher:
        return
    train, key = table["orchestrator"]["train"], ENVIRONMENTS
    entries = {"orchestrator.train.": train}
    listed = train.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise RecipeError(f"orchestrator.train.{key} is no list of tables: write one")
    for entry in listed:
        entries[f"orchestrator.train.{key} {entry.get('name')}: "] = entry
    for place, entry in entries.items():
        sampling = _table_at(entry, "sampling", place)
        extra_body = _table_at(sampling, "extra_body", f"{place}sampling.")
        cut = truncations(sampling, extra_body) if version.replays_sampling else {}
        for name, value in cut.items():
            of_recipe = entry is train and name == "top_p" and value == rollout.top_p
            raise RecipeError(
                f"{'rollout.top_p' if of_recipe else f'{place}sampling.{name}'} = {value}: "
                f"prime-rl {version.name} takes the student's log-probs among the ids that the "
                "sampler kept, and a teacher's are of the whole vocabulary. Leave it out, "
                f"{RUN_LOCALLY}"
            )
        least = entry.get("min_abs_advantage")
        if least and loss.reads_rewards_and_teacher:
            raise RecipeError(
                f"{place}min_abs_advantage = {least}: prime-rl leaves tokens of a small advantage "
                "out of the loss, which would compare them with a teacher too. Leave it out, "
                f"{RUN_LOCALLY}"
            )


def _table_at(table: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    below = table.get(key, {})
    if not isinstance(below, Mapping):
        raise RecipeError(f"{place}{key} is no table: write one")
    return below


def truncations(sampling: Mapping[str, Any], extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that cut the sampled distribution, typed or in the request body."""
    off = {"top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0)}
    return {
        f"{prefix}{key}": settings[key]
        for prefix, settings in (("", sampling), ("extra_body.", extra_body))
        for key, values in off.items()
        if settings.get(key) not in values
    }


def refuse_data(sources: Mapping[str, DataConfig], policy: PolicyTeacherConfig | None) -> None:
    """Check that prime-rl's environment can load the problems, and give a policy its hints."""
    for data in sources.values():
        if data.source == "rows":
            raise RecipeError(
                "data.source = 'rows': prime-rl's processes load the data themselves. Write the "
                "rows to a JSONL or parquet file, and name it in data.path."
            )
        chat = [key for key in CHAT_KEYS if getattr(data, key) is not None]
        if policy is not None and chat:
            raise RecipeError(
                f"data.{chat[0]} = {getattr(data, chat[0])!r}: with [teacher.policy] prime-rl's "
                "opsd writes its hint into a system message of its own, so that the two would "
                f"differ. Leave it out, {RUN_LOCALLY}"
            )


def refuse_environments(
    environments: Mapping[str, EnvironmentConfig],
    policy: PolicyTeacherConfig | None,
) -> None:
    """Check that a policy has a hint in every environment by id."""
    for name in environments:
        if policy is not None and policy.hint == "feedback":
            raise RecipeError(
                "teacher.policy.hint = 'feedback': it quotes the right answer, and "
                f"environments.{name} has an id, and no answer that this package knows. Set it to "
                "'sibling' or 'reference'"
            )


def refuse_asker(
    loss: LossConfig, teachers: Mapping[str, TeacherConfig], with_policy: bool
) -> None:
    """Check that the process that has to ask the teachers can ask all of them."""
    reads_states = loss.reads_hidden_states
    for key in TEACHER_KEYS:
        values = asker_settings(teachers, key)
        if len(values) > 1:
            raise RecipeError(
                f"teachers: {key} is {' and '.join(map(repr, sorted(values)))}, and prime-rl's "
                "processes treat all teachers of a run alike. Set the same in each table."
            )
    asked_by = next(iter(asker_settings(teachers, "asked_by")), None)
    if reads_states and asked_by == "orchestrator":
        raise RecipeError(
            'teacher.asked_by = "orchestrator": the loss reads the teacher\'s hidden states, which '
            'prime-rl has no room for in a sample. Leave it out, or set it to "trainer".'
        )
    if with_policy and (reads_states or asked_by == "trainer"):
        what = 'loss.k = "full"' if reads_states else 'teacher.asked_by = "trainer"'
        raise RecipeError(
            f"{what}: with [teacher.policy] prime-rl's orchestrator asks, which alone has the "
            f"hints. Leave asked_by out and set k to a number, {RUN_LOCALLY}"
        )


def refuse_tokenizers(teachers: Mapping[str, TeacherConfig], loss: LossConfig) -> None:
    """Check that teachers with tokenizers of their own can be asked."""
    table = next((table for table, one in teachers.items() if one.tokenizer == "own"), None)
    if table is None:
        return
    own = f"{table}.tokenizer = 'own'"
    if teachers[table].asked_by == "trainer":
        raise RecipeError(
            f'{own} and {table}.asked_by = "trainer": the trainer has no messages to render the '
            "teacher's prompt from; leave asked_by out."
        )
    if loss.reads_rewards_and_teacher:
        raise RecipeError(
            f"{own}: loss.type = {loss.type!r} reads rewards and a teacher for the same token, and "
            f"inside prime-rl this teacher has no score of some. Use a loss of the teacher alone, "
            f"{RUN_LOCALLY}"
        )


def refuse_prompts(recipe: Recipe) -> None:
    """Check that prime-rl's processes can write the prompts of teachers and students."""
    by_name: dict[str, Any] = {}
    for table, teacher in recipe.teacher_tables.items():
        asked_there = teacher.asked_by == "trainer" or recipe.loss.reads_hidden_states
        if teacher.prompt is not None and asked_there:
            raise RecipeError(
                f"[{table}.prompt]: prime-rl's trainer asks this teacher, and has no messages to "
                f'write its prompts from: leave asked_by out, and k = "full", {RUN_LOCALLY}'
            )
        name = repr((teacher.model, teacher.prepare))
        if by_name.setdefault(name, teacher.prompt) != teacher.prompt:
            raise RecipeError(
                f"[{table}.prompt]: prime-rl knows a teacher by the name that it is served by, and "
                f"another one has the same and other prompts: name one of them, {RUN_LOCALLY}"
            )
    args = [data.template_args or {} for data in recipe.problem_sources.values()]
    args += [{} for _ in recipe.environments_by_id]
    if any(one != args[0] for one in args):
        raise RecipeError(
            "template_args: prime-rl has one renderer for all environments, and they differ here: "
            "give all of them the same (environments by id: in rollout.renderer alone), "
            f"{RUN_LOCALLY}"
        )
    if args and args[0] and "name" not in recipe.rollout.renderer:
        raise RecipeError(
            f"data.template_args = {args[0]}: prime-rl's renderers take variables where they are "
            'named: set rollout.renderer = { name = "qwen3" }, or "default" for any chat template, '
            f"{RUN_LOCALLY}"
        )


def asker_settings(teachers: Mapping[str, TeacherConfig], key: str) -> set[str]:
    """Return the values that the teachers' tables set for a key of ``TEACHER_KEYS``."""
    return {getattr(table, key) for table in teachers.values()} - {None}


def refuse_two_credentials(servers: Mapping[str, RolloutConfig | TeacherConfig]) -> None:
    """Check that no server has both a password and an API key; prime-rl would drop the key."""
    for table, server in servers.items():
        key = os.environ.get(server.api_key_var)
        if key and server.url is not None and has_credentials(server.url):
            raise RecipeError(two_credentials(f"The url in [{table}]", server.api_key_var))


def refuse_policy_teacher(policy: PolicyTeacherConfig) -> None:
    """Check that prime-rl's algorithm ``opsd`` covers a hint-conditioned teacher.

    ``opsd`` scores with the live policy, which reads a hint in a system message.
    """
    template = "its opsd writes the hint into a system message before the question"
    for key, value, supported, why in (
        ("update", policy.update, "live", "its opsd scores with the policy's current weights"),
        ("template", policy.template, None, template),
    ):
        if value != supported:
            remedy = "Leave it out" if supported is None else f"Set it to {supported!r}"
            raise RecipeError(
                f"teacher.policy.{key} = {value!r}: prime-rl cannot do that ({why}). {remedy}, "
                f"{RUN_LOCALLY}"
            )


def of_other_sources(rollout: RolloutConfig) -> str:
    """Return why prime-rl cannot train on sequences that the student did not sample.

    An environment of ``type = "sft"`` samples from a teacher. Its tokens are not scored (559b4477
    orchestrator/algo/sft.py:6), and ``compute_loss`` divides their loss by their own number
    (loss.py:394), while GKD's is one mean over the tokens of both kinds.
    """
    if not rollout.teacher_samples:
        return "prime-rl trains on sampled sequences alone, not on the data's solutions"
    return (
        "prime-rl asks no scores for sequences that a teacher samples, and averages their loss "
        'apart from the student\'s (algo.type = "sft"; compute_loss: ce_loss / ce_scale)'
    )
