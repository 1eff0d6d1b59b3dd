"""Load the problems of a recipe: generated, from files, from the hub, or given as rows."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from prime_composer.problems.config import MATH, DataConfig, Problem
from prime_composer.problems.files import files_at, read_files
from prime_composer.problems.generated import generate_problems
from prime_composer.problems.generated_facts import generate_facts
from prime_composer.problems.generated_tasks import generate_lookups, generate_reversals
from prime_composer.problems.generated_text import generate_summaries, generate_translations
from prime_composer.problems.hub import load_hub
from prime_composer.problems.prompts import message_of, prompt_messages
from prime_composer.problems.rows import parse_rows, problem_or_none

GENERATORS = {
    "summary": generate_summaries,
    "translation": generate_translations,
    "reversal": generate_reversals,
    "lookup": generate_lookups,
}
"""``kind`` of generated problems without operations -> what makes ``size`` of them from a seed."""


Rows = Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]]
"""Rows from Python: all of them, or those of "train" and "test"."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a recipe, loaded once per command."""

    practice: list[Problem]  # to train on, one environment after the other
    held_out: list[Problem]  # the environments in turn, so that any first part has all
    sources: Mapping[str, DataConfig]  # the recipe's environments by name
    # rows that ``clean`` left out, by environment
    left_out: Mapping[str, int] = field(default_factory=dict)

    def config_of(self, problem: Problem) -> DataConfig:
        """Return the table that says how the problem is asked and checked."""
        return self.sources[problem.environment]

    def is_scored(self, problem: Problem) -> bool:
        """Return whether answers to the problem are graded. Those of tasks are."""
        source = self.sources.get(problem.environment)
        return source is None or source.scored

    def transcript(self, problem: Problem) -> str | None:
        """Return what small models learn from as JSON; None for question and answer."""
        config = self.sources.get(problem.environment)
        if problem.transcript is not None or config is None or not config.chat_template:
            return problem.transcript
        answer = message_of("assistant", problem.answer, problem.reasoning)
        return json.dumps([*prompt_messages(problem, config), answer])

    @property
    def worked(self) -> list[Problem]:
        """The problems to train on that have answers or transcripts."""
        return [problem for problem in self.practice if problem.answer or problem.transcript]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of problems to train on, by environment that has any."""
        return dict(Counter(problem.environment for problem in self.practice))

    @property
    def names(self) -> list[str]:
        return list(self.sources)

    def ratio(self, name: str) -> float:
        """Return an environment's share of the prompts, relative to the others."""
        return self.sources[name].ratio


def load_problem_set(sources: Mapping[str, DataConfig], rows: Rows | None = None) -> ProblemSet:
    """Load the problems of all environments; ``rows`` are those of the source "rows"."""
    practice: list[Problem] = []
    left_out: dict[str, int] = {}
    held_out_by_environment: list[list[Problem]] = []
    for name, config in sources.items():
        train, test, dropped = _load_split(config, rows)
        if dropped:
            left_out[name] = dropped
        practice += [replace(problem, environment=name) for problem in train]
        held_out_by_environment.append([replace(problem, environment=name) for problem in test])
    held_out = in_turn(held_out_by_environment)
    _refuse_overlap_of_environments(practice, held_out)
    return ProblemSet(practice, held_out, sources, left_out)


def in_turn(by_environment: Iterable[Sequence[Problem]]) -> list[Problem]:
    """Return the problems of all environments, one of each in turn."""
    turns = zip_longest(*by_environment)
    return [problem for turn in turns for problem in turn if problem is not None]


def load_problems(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and those held out, in a fixed order, none in both."""
    train, held_out, _ = _load_split(config, None)
    return train, held_out


def _load_split(config: DataConfig, rows: Rows | None) -> tuple[list[Problem], list[Problem], int]:
    """Return what ``load_problems`` does, and the number of rows that were left out."""
    train, held_out, origin, left_out = _load_source(config, rows)
    if config.metric in MATH and not config.calculator_annotations:
        train = [_without_annotations(problem) for problem in train]
        held_out = [_without_annotations(problem) for problem in held_out]
    if config.clean:
        asked = {problem.asked for problem in held_out}
        kept = [problem for problem in train if problem.asked not in asked]
        train, left_out = kept, left_out + len(train) - len(kept)
    for name, wanted, problems in (
        ("training", config.trains, train),
        ("held-out", config.evaluates, held_out),
    ):
        if wanted and not problems:
            raise ValueError(
                f"{origin} leaves no {name} problems; "
                + (
                    "raise [data] size or change hold_out"
                    if config.source == "generated"
                    else "add rows, or change [data] hold_out, limit or clean"
                )
            )
    _refuse_overlap(train, held_out, origin)
    if config.teacher_key is not None and all(one.teacher is None for one in train or held_out):
        raise ValueError(
            f"{origin}: no row has the key {config.teacher_key!r}; "
            "correct teacher_key, or leave it out to have all rows go where `teacher` says"
        )
    return train, held_out, left_out


def _load_source(
    config: DataConfig, rows: Rows | None
) -> tuple[list[Problem], list[Problem], str, int]:
    """Return what to train on, what is held out, the source's name, and the rows left out."""
    if config.source == "generated":
        return *_generated(config), "the generated problems", 0
    train, test, origin = _rows_of(config, rows)
    (problems, left_out), (held_out, more) = _kept(train), _kept(test or [])
    if test is None:
        problems, held_out = _split(problems, config)
    return problems, held_out, origin, left_out + more


def _generated(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    if config.kind == "arithmetic":
        return _split(generate_problems(config.size, config.seed, config.operations), config)
    if config.kind != "facts":
        return _split(GENERATORS[config.kind](config.size, config.seed), config)
    share = {"train": 0.0, "both": config.hold_out, "eval": 1.0}[config.use]
    aside = round(share * config.size)
    train, held_out = (
        generate_facts(size, config.seed, config.topics, apart)
        for size, apart in ((config.size - aside, False), (aside, True))
    )
    return train, held_out


def _split(problems: list[Problem], config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """Return which problems of a source without splits are trained on, and which are held out."""
    if config.use == "both":
        return split_by_question(problems, config.hold_out, config.seed)
    return (problems, []) if config.trains else ([], problems)


Parsed = list[Problem | None]  # Rows as problems, None for those that are left out


def _rows_of(config: DataConfig, rows: Rows | None) -> tuple[Parsed, Parsed | None, str]:
    """Return the rows to train on, those held out (None: to be set aside), and their origin."""
    if config.source == "hub":
        return *load_hub(config), config.hub_id
    if config.source == "rows":
        return *_given_rows(config, rows), "the given rows"
    assert config.path is not None  # [data] is refused without it
    path = config.path.expanduser()
    train, test = files_at(path, config.trains)
    if not test:
        return read_files(train, config), None, str(path)
    return (
        read_files(train, config) if config.trains else [],
        read_files(test, config) if config.evaluates else [],
        str(path),
    )


def _given_rows(config: DataConfig, rows: Rows | None) -> tuple[Parsed, Parsed | None]:
    if rows is None:
        raise ValueError(
            '[data] source = "rows": the rows come from Python, prime_composer.distill(recipe, '
            "rows=...). For a command, write them to a JSONL or parquet file, and name it in path"
        )

    def parsed(rows: Iterable[Any], name: str) -> Parsed:
        places = ((f"{name} {number}", row) for number, row in enumerate(rows, start=1))
        return parse_rows(places, lambda row: problem_or_none(row, config), config.limit)

    if not isinstance(rows, Mapping):
        return parsed(rows, "row"), None
    if "train" not in rows:
        raise ValueError(
            f"the rows are a mapping of {sorted(map(str, rows))}; give a list of rows, or a "
            'mapping of "train" and maybe "test"'
        )
    if "test" not in rows:
        return parsed(rows["train"], "train row"), None
    return (
        parsed(rows["train"], "train row") if config.trains else [],
        parsed(rows["test"], "test row") if config.evaluates else [],
    )


def _kept(rows: Sequence[Problem | None]) -> tuple[list[Problem], int]:
    """Return the problems among rows, and the number of rows that were left out."""
    problems = [problem for problem in rows if problem is not None]
    return problems, len(rows) - len(problems)


def split_by_question(
    problems: list[Problem], hold_out: float, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Set aside the share ``hold_out`` of the distinct questions, equal ones on the same side."""
    questions = sorted({problem.asked for problem in problems})
    random.Random(f"hold-out {seed}").shuffle(questions)
    aside = set(questions[: max(1, round(hold_out * len(questions)))])
    train = [problem for problem in problems if problem.asked not in aside]
    held_out = [problem for problem in problems if problem.asked in aside]
    return train, held_out


def _refuse_overlap_of_environments(
    practice: Sequence[Problem], held_out: Sequence[Problem]
) -> None:
    trained = {problem.asked: problem.environment for problem in practice}
    for problem in held_out:
        if problem.asked in trained:
            names = trained[problem.asked], problem.environment
            origin = "environments.{} trains on what environments.{} holds out".format(*names)
            _refuse_overlap(practice, held_out, origin)


def _refuse_overlap(train: Sequence[Problem], held_out: Sequence[Problem], origin: str) -> None:
    shared = {problem.asked for problem in train} & {problem.asked for problem in held_out}
    if shared:
        raise ValueError(
            f"{origin}: {len(shared)} question(s) are both trained on and held out, "
            "so accuracy would be flattered. Remove them from one side; give generated problems "
            "`operations` or `topics` without one in common, or the same ones with the same "
            f"`size`, `seed` and `hold_out`. The first: {min(shared)[1]!r}"
        )


def _without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))
