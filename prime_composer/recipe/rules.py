"""What of a recipe's tables does not go together.

A rule is a generator over a recipe, one function per topic. It yields the sentence that refuses the
recipe: what clashes, why, and what to do instead. ``Recipe`` raises the first one of all. What a
single table shows is refused by that table's own class.

The guide's table of refused pairs is written from ``PAIRS`` by ``docs/reference.py``.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from prime_composer.losses import LOSS_TYPES
from prime_composer.losses.needs import OF_TEACHER, missing_inputs
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.schema import RULES, Recipe, Rule
from prime_composer.tables import reason_of

PAIRS: dict[str, str] = {}
"""What does not go together, and what to do instead, as the guide's table has it."""


def rule(pairs: Mapping[str, str] | None = None) -> Callable[[Rule], Rule]:
    """Return the decorator of a rule, with its rows of ``PAIRS``. Rules apply in their order."""

    def add(of_topic: Rule) -> Rule:
        RULES.append(of_topic)
        PAIRS.update(pairs or {})
        return of_topic

    return add


@rule()
def of_alternatives(recipe: Recipe) -> Iterator[str]:
    if recipe.teachers and recipe.teacher is not None:
        yield "[teacher] and [teachers.*]: keep one of them"
    if recipe.data is None and not recipe.environments:
        yield "data is missing: add a [data] table, or several [environments.*]"
    if recipe.data is not None and recipe.environments:
        yield "[data] and [environments.*]: keep one of them"
    for section, names in (("teachers", recipe.teachers), ("environments", recipe.environments)):
        for name in names:
            if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
                yield f"[{section}.{name!r}]: a name is made of letters, digits, - and _"


@rule()
def of_choices_among_teachers(recipe: Recipe) -> Iterator[str]:
    for table, data in recipe.source_tables.items():
        named = [data.teacher] if isinstance(data.teacher, str) else list(data.teacher or ())
        if isinstance(data, DataConfig) and data.teacher_key is not None and not recipe.teachers:
            yield f"{table}.teacher_key chooses among [teachers.*], and there are none: add them"
        for teacher in named:
            if teacher not in recipe.teachers:
                known = ", ".join(recipe.teachers) or "none"
                yield f"{table}.teacher names {teacher!r}; [teachers] has {known}"


@rule()
def of_uses(recipe: Recipe) -> Iterator[str]:
    """Something trains."""
    if not any(source.trains for source in recipe.sources.values()):
        yield (
            f"{', '.join(recipe.source_tables)}: use = 'eval', and none is left to train on; set "
            "it to 'both' or 'train'"
        )


@rule({"`student_fraction` below 1, `environments` by id": "`rollout.other_source = 'teacher'`"})
def of_environments_by_id(recipe: Recipe) -> Iterator[str]:
    """They have no solutions."""
    if recipe.environments_by_id and recipe.rollout.trains_on_data:
        table = f"environments.{next(iter(recipe.environments_by_id))}"
        yield (
            "rollout.student_fraction below 1 trains on the data's solutions, and "
            f"[{table}] has an id, and no solutions: set rollout.other_source = 'teacher', or "
            "student_fraction = 1"
        )


@rule()
def of_environments_of_models(recipe: Recipe) -> Iterator[str]:
    """Generated models learn from environments that there are, and that train."""
    known = ", ".join(recipe.environments) or "none"
    for model, prepare in recipe.generated_models():
        for name in prepare.environments or ():
            if name not in recipe.environments:
                yield f"{model}: prepare.environments names {name!r}; [environments] has {known}"
            elif not recipe.environments[name].trains:
                yield (
                    f"{model}: prepare.environments names {name!r}, which has use = 'eval', "
                    "and models learn from what is trained on: leave it out"
                )
        if prepare.hint_template is not None and recipe.teaching_environments:
            yield (
                f"{model}: prepare.hint_template writes a hint into a problem's question, and "
                f"[environments.{next(iter(recipe.environments_by_id))}] has an id, and tasks of "
                "its own: name others in prepare.environments"
            )


@rule(
    {
        "`student_fraction` below 1, a loss that reads the sampler's probabilities": (
            "a loss on a support, such as `generalized_jsd`"
        )
    }
)
def of_loss(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss
    yield from missing_inputs(loss, recipe.provided_inputs, "recipe")
    if recipe.rollout.student_fraction < 1 and loss.reads_sampler:
        others = "teacher's answers" if recipe.rollout.teacher_samples else "data's solutions"
        yield (
            f"[loss] type = {loss.type!r} reads the sampler's probabilities, and the "
            f"{others} have none: with rollout.student_fraction below 1 use a loss on a "
            "support, such as generalized_jsd (self_distillation with max_ratio = 'off'), or "
            "sft; in a sum, for every channel"
        )


@rule()
def of_balance(recipe: Recipe) -> Iterator[str]:
    """It is of the whole loss, and names what trains."""
    for section, (_, needs) in recipe.loss.needs_by_section().items():
        if "balance" in needs and section != "loss":
            yield (
                f"[{section}.balance]: a step has one balance for all of its losses: move it "
                "to [loss.balance]"
            )
    balance = recipe.loss.balance
    if balance is None:
        return
    trained = [name for name, source in recipe.sources.items() if source.trains]
    if others := sorted(balance.weights.keys() - set(trained)):
        yield (
            f"loss.balance.weights names {', '.join(others)}, and the environments that train "
            f"are {', '.join(trained)}: name one of these"
        )


def of_four_bits(recipe: Recipe) -> Iterator[str]:
    if recipe.student.lora is None:
        yield "student.load = 'nf4' keeps weights that cannot train: add [student.lora]"
    if recipe.checkpoint.merge:
        yield (
            "checkpoint.merge = true writes whole weights, and student.load = 'nf4' has 4 bits of "
            "them: leave merge out, and merge the adapter's directory with peft"
        )
    policy = None if recipe.teacher is None else recipe.teacher.policy
    if policy is not None and policy.update not in ("live", "base"):
        yield (
            f"teacher.policy.update = {policy.update!r} copies the student's weights, of which "
            "student.load = 'nf4' has 4 bits: choose 'live' or 'base'"
        )


@rule(
    {
        "`lora`, `quantize`": "`quantize` in `[student.prepare]`",
        "`student.lora.start`, `[reference] start = true`": "a merged model in `reference.model`",
        "`base = true`, `policy.update = 'base'` or `checkpoint.merge` without `[student.lora]`": (
            "`[student.lora]`"
        ),
        "`student.load = 'nf4'` without an adapter alone, or `checkpoint.merge`": "merge by peft",
    }
)
def of_adapter(recipe: Recipe) -> Iterator[str]:
    student, reference = recipe.student, recipe.reference
    if student.load == "nf4":
        yield from of_four_bits(recipe)
    if student.lora is not None:
        if student.quantize is not None:
            yield (
                "`lora` leaves the student's weights as they are, and `quantize` rounds them after "
                "every step: keep one of them. An adapter on a rounded model has its `quantize` in "
                "[student.prepare]"
            )
        if student.lora.start is not None and reference is not None and reference.start:
            yield (
                "[reference] start = true opens the student's weights as they are stored, and "
                "student.lora.start puts an adapter on them before the first step: name a merged "
                "model in reference.model"
            )
        return
    for table, teacher in recipe.teacher_tables.items():
        updates = teacher.policy is not None and teacher.policy.update == "base"
        if teacher.base or updates:
            key = f"{table}.base = true" if teacher.base else f"{table}.policy.update = 'base'"
            yield (
                f"{key} is the student with its adapter switched off, and this one has none, so "
                "that its own weights move: add [student.lora], or name a model"
            )
    if recipe.checkpoint.merge:
        yield (
            "checkpoint.merge = true merges the student's adapter into its weights, and it has "
            "none: add [student.lora], or leave merge out"
        )


@rule({"`other_source = 'teacher'`, `[teacher.policy]` or `on_overflow`": "`'error'`"})
def of_sampling_teachers(recipe: Recipe) -> Iterator[str]:
    if not recipe.rollout.teacher_samples:
        return
    if not recipe.teacher_tables:
        yield "rollout.other_source = 'teacher': there is none; add a [teacher] table"
    for table, teacher in recipe.teacher_tables.items():
        if teacher.policy is not None:
            yield (
                "rollout.other_source = 'teacher': [teacher.policy] is the student with a hint, "
                "which samples no answers; name a teacher of its own"
            )
        if teacher.on_overflow != "error":
            yield (
                f"{table}.on_overflow = {teacher.on_overflow!r}: a teacher that samples "
                "(rollout.other_source = 'teacher') needs room for every prompt with a full "
                "answer; set it to 'error'"
            )


@rule(
    {
        '`tokenizer = "own"`, `k = "full"` or `kl_support = "full"`': "a number",
        '`tokenizer = "own"`, `chosen_by = "student"`': '`chosen_by = "teacher"`',
        '`tokenizer = "own"`, a mixture of teachers': "one teacher by environment, `data.teacher`",
        '`tokenizer = "own"`, `[teacher.policy]` or `[reference]`': "leave one of them out",
    }
)
def of_own_tokenizers(recipe: Recipe) -> Iterator[str]:
    tables = {name: one for name, one in recipe.teacher_tables.items() if one.tokenizer == "own"}
    if not tables:
        return
    for table, teacher in tables.items():
        if teacher.policy is not None:
            yield (
                f'[{table}] tokenizer = "own": [{table}.policy] is the student itself; leave '
                "tokenizer out"
            )
    loss, own = recipe.loss, f'[{next(iter(tables))}] tokenizer = "own"'
    size, by_student = loss.asked_of_teacher
    if size == "full" or loss.reads_hidden_states:
        yield (
            f'[loss] type = {loss.type!r}, k = "full": a whole vocabulary has ids that one pass of '
            f"the teacher does not resolve, and {own}; set k to a number"
        )
    if by_student:
        yield (
            f'[loss] type = {loss.type!r}, chosen_by = "student": with {own} the ids are chosen '
            'among those that are resolved; set chosen_by = "teacher"'
        )
    if recipe.eval.kl_support == "full":
        yield (
            f'eval.kl_support = "full" needs every id of the vocabulary, and {own} does not '
            "resolve all; set it to a number"
        )
    if any(map(recipe.mixes, recipe.sources.values())):
        yield (
            f"{own}: its unresolved ids are missing from a mixture; route each environment to one "
            "teacher (data.teacher)"
        )
    if recipe.reference is not None:
        yield f"{own} does not go with [reference]; leave one of them out"


@rule(
    {
        "`[teacher.prompt]`, `[teacher.policy]`": "one of them",
        "`[teacher.prompt] prompt_template`, `environments` by id": "leave it out",
    }
)
def of_own_prompts(recipe: Recipe) -> Iterator[str]:
    for table, teacher in recipe.scorer_tables.items():
        if teacher.prompt is None:
            continue
        if teacher.policy is not None:
            yield (
                f"[{table}.prompt]: [{table}.policy] writes the teacher's prompt, from a hint; "
                "leave one of them out"
            )
        for source, data in recipe.source_tables.items():
            if isinstance(data, DataConfig):
                try:
                    teacher.prompt.of(data)
                except ValidationError as error:
                    reason = reason_of(error.errors()[0])
                    yield f"[{table}.prompt]: {reason}"
                continue
            plain = teacher.prompt.chat_template is False
            if plain or teacher.prompt.prompt_template is not None:
                key = "chat_template = false" if plain else "prompt_template"
                yield (
                    f"[{table}.prompt] {key}: [{source}] has an id, and messages of its own, "
                    "which go through a chat template: leave it out"
                )


@rule({"`tape` of two tables": "a folder for each"})
def of_tapes(recipe: Recipe) -> Iterator[str]:
    tapes: dict[object, str] = {}
    for table, scorer in recipe.scorer_tables.items():
        if scorer.tape is not None and (other := tapes.setdefault(scorer.tape, table)) != table:
            yield (
                f"[{other}] and [{table}] have the same tape, and a tape has one teacher: name a "
                "folder for each"
            )


@rule(
    {
        "`rollout.ahead`, a sampler or teacher that takes turns with training": (
            "a server in `rollout.url`, `teacher.url`"
        )
    }
)
def of_ahead(recipe: Recipe) -> Iterator[str]:
    sampler = recipe.rollout.backend
    if not recipe.rollout.ahead:
        return
    key = f"rollout.ahead = {recipe.rollout.ahead}"
    if not backend_of(sampler).serves:
        yield (
            f"{key} samples while the student trains, and rollout.backend = {sampler!r} is a part "
            "of the process that trains, and takes turns with it: start a server of the student "
            "and name it in rollout.url (backend = 'server'), or leave ahead out"
        )
    for table, scorer in recipe.scorer_tables.items():
        if scorer.policy is not None:
            yield (
                f"{key} scores while the student trains, and [{table}.policy] is the student, "
                "whose weights change meanwhile: name a teacher of its own, or leave ahead out"
            )
        elif not scorer.tape_only and not backend_of(scorer.runs_on(sampler)).any_thread:
            yield (
                f"{key} scores in another thread than training, and [{table}] backend = "
                f"{scorer.backend!r} answers in this process to one thread alone: start its "
                f"server and name it in {table}.url, or set {table}.backend = 'transformers'"
            )


@rule(
    {
        "`checks.collapse.end`, `[reference]` or a loss without a teacher": (
            "`checks.collapse.repeated` or `checks.collapse.truncated`"
        )
    }
)
def of_collapse(recipe: Recipe) -> Iterator[str]:
    end, without = recipe.checks.collapse.end, None
    if recipe.reference is not None:
        without = "the scores of a [reference] are extrapolated, and none of a distribution"
    elif not recipe.loss.compares_with_teacher:
        without = f"[loss] type = {recipe.loss.type!r} has no teacher score anything"
    if end is not None and without is not None:
        yield (
            f"checks.collapse.end = {end:g} limits the teacher's probability of the tokens "
            f"that end the student's answers, and {without}: leave it out, or limit "
            "checks.collapse.repeated or checks.collapse.truncated"
        )


@rule(
    {
        "`[reference]` without a `[teacher]` of its own": "a `[teacher]`",
        "`[reference] start = true`, `student.quantize`": "the same in `[student.prepare]`",
        "`[reference]`, a loss that reads more than the sampled token": "`sampled_reverse_kl`",
    }
)
def of_reference(recipe: Recipe) -> Iterator[str]:
    reference, student, loss = recipe.reference, recipe.student, recipe.loss
    if reference is None:
        return
    if all(teacher.policy is not None for teacher in recipe.teacher_tables.values()):
        yield (
            "[reference] extrapolates a teacher that is a model of its own: add a [teacher] "
            "with model, prepare or url"
        )
    if reference.start and (quantize := student.quantize) is not None:
        prepared = getattr(student.prepare, "quantize", None)
        if prepared is None or dict(prepared) != dict(quantize):
            yield (
                "[reference] start = true opens the student's weights as they are stored, and "
                "student.quantize rounds them before the first step: round them in "
                "[student.prepare] too, with the same `quantize`"
            )
    able = " or ".join(repr(name) for name, one in LOSS_TYPES.items() if one.takes_reference)
    if not loss.compares_with_teacher:
        yield f"[reference] goes with a loss of type {able}"
    for section, (part, needs) in loss.needs_by_section().items():
        read = needs & OF_TEACHER
        if read and (not part.takes_reference or read != {"ref_logprobs"}):
            yield (
                f"[reference] changes the teacher's log-prob of the sampled token, which is "
                f"then none of a distribution, and [{section}] type = {part.type!r} reads more "
                f"than that: use type = {able} without stops"
            )


@rule({"`hint = 'sibling'`, a loss that reads rewards": "`'reference'` or `'feedback'`"})
def of_hints(recipe: Recipe) -> Iterator[str]:
    if recipe.policy_teacher is None or recipe.policy_teacher.hint != "sibling":
        return
    if recipe.rollout.group_size < 2:
        yield (
            "teacher.policy.hint = 'sibling' compares a group: set rollout.group_size to 2 or more"
        )
    for section, (part, needs) in recipe.loss.needs_by_section().items():
        if "advantages" in needs:
            yield (
                f"[{section}] type = {part.type!r} needs the advantages of whole groups, and "
                "teacher.policy.hint = 'sibling' leaves the only correct rollout of a group "
                "out, so that its wrong ones alone would train: set hint to 'reference' or "
                "'feedback'"
            )


@rule()
def of_sizes(recipe: Recipe) -> Iterator[str]:
    rollout, batch_size = recipe.rollout, recipe.trainer.batch_size
    if batch_size % rollout.group_size:
        yield (
            f"trainer.batch_size = {batch_size} is not a multiple of "
            f"rollout.group_size = {rollout.group_size}"
        )
    if rollout.max_model_len is not None and rollout.max_tokens >= rollout.max_model_len:
        yield (
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in "
            f"rollout.max_model_len = {rollout.max_model_len}"
        )


@rule()
def of_until(recipe: Recipe) -> Iterator[str]:
    """Evaluations measure what decides the end."""
    until, measured = recipe.trainer.until, comparable_metrics(recipe)
    if until is not None and until.metric not in measured:
        yield (
            f"trainer.until.metric = {until.metric!r} is not what evaluations of this recipe "
            f"measure: choose one of {', '.join(measured) or 'none'}"
        )


def comparable_metrics(recipe: Recipe) -> list[str]:
    """Return what an evaluation measures of which more or less is better: scores, KLs, cuts."""
    metrics: dict[str, None] = {}
    has_kl = recipe.asks_teacher and recipe.policy_teacher is None and recipe.eval.kl_size
    evaluated = {name: source for name, source in recipe.sources.items() if source.evaluates}
    for name, source in evaluated.items():
        own = ["eval/accuracy"]
        if isinstance(source, DataConfig):
            own = [f"eval/{source.score_name}"] if source.scored else []
        own += ["eval/reverse_kl"] if has_kl else []
        metrics |= dict.fromkeys(own)
        if len(recipe.sources) > 1:
            metrics |= dict.fromkeys(f"{metric}/{name}" for metric in own)
    more = ["eval/forward_kl"] if "eval/reverse_kl" in metrics else []
    return [*metrics, *more, "eval/truncated"] if evaluated else []


@rule(
    {
        "`[diloco]`, what one run decides: `[trainer.until]`, `rollout.ahead`, `tape`, "
        "a `[teacher.policy]` that moves": "leave one out; `tape_only`, `update = 'live'`",
        "`[diloco]`, weights that have no mean: `student.lora`, `student.quantize`": (
            "leave one out"
        ),
    }
)
def of_islands(recipe: Recipe) -> Iterator[str]:
    if recipe.diloco is None:
        return
    policy, scorers = recipe.policy_teacher, recipe.scorer_tables.values()
    clashes = {
        "[teacher.policy] moves with the policy of each island, and the islands would have "
        "different teachers: set teacher.policy.update = 'live'": (
            policy is not None and policy.update != "live"
        ),
        "student.quantize trains latent weights, and the mean of rounded weights is not rounded: "
        "leave student.quantize out": recipe.student.quantize is not None,
        "student.lora trains the factors of a product, and the product of their means is not the "
        "mean of the products: leave student.lora out": recipe.student.lora is not None,
        "[trainer.until] is decided by evaluations, which island 0 alone has: leave "
        "[trainer.until] out": recipe.trainer.until is not None,
        "rollout.ahead samples by weights that an island may have to take back: leave "
        "rollout.ahead out": recipe.rollout.ahead > 0,
        "a tape is written by one run: leave `tape` out, let it answer alone with tape_only = "
        "true": any(one.tape is not None and not one.tape_only for one in scorers),
    }
    for words, clash in clashes.items():
        if clash:
            yield f"[diloco] and {words}, or leave [diloco] out"


@rule()
def of_steps_of_islands(recipe: Recipe) -> Iterator[str]:
    islands = recipe.diloco
    if islands is None:
        return
    for key, steps in (
        ("trainer.steps", recipe.trainer.steps),
        ("eval.every", recipe.eval.every),
        ("checkpoint.every", recipe.checkpoint.every),
    ):
        if steps % islands.every:
            larger = steps + islands.every - steps % islands.every
            yield (
                f"{key} = {steps} is no multiple of diloco.every = {islands.every}, and only outer "
                f"steps are evaluated and saved: the next one is {larger}"
            )


@rule(
    {
        'a graded metric, `hint = "feedback"`': '`"exact"`',
        '`metric = "none"`, a loss or hint that reads rewards': 'another metric, `"contains"`',
    }
)
def of_rewards(recipe: Recipe) -> Iterator[str]:
    """What reads rewards has some, and what reads right and wrong no other value."""
    policy = recipe.policy_teacher
    trained = {
        name: data for name, data in recipe.source_tables.items()
        if isinstance(data, DataConfig) and data.trains
    }  # fmt: skip
    hint = None if policy is None else f'teacher.policy.hint = "{policy.hint}"'
    by_loss = f'[loss] type = "{recipe.loss.type}"' if "advantages" in recipe.loss.needs else None
    of_verdicts = hint if policy is not None and policy.hint != "reference" else None
    for table, data in trained.items():
        if of_verdicts and data.graded:
            yield (
                f"{of_verdicts} needs answers that are right or wrong, and {table}"
                f'.metric = "{data.metric}" gives any value from 0 to 1: set it to "exact" or a '
                "math metric"
            )
    for table, data in trained.items():
        if (reader := hint or by_loss) and not data.scored:
            yield (
                f"{reader} needs answers or their rewards, and {table}"
                '.metric = "none" grades nothing: choose another metric, such as "contains"'
            )
