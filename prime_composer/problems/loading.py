"""Load the problems of a recipe: generated, from JSONL files, or from the hub."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from prime_composer.problems.config import MATH, DataConfig, Problem
from prime_composer.problems.generated import generate_problems
from prime_composer.problems.generated_facts import generate_facts
from prime_composer.problems.generated_tasks import generate_lookups, generate_reversals
from prime_composer.problems.generated_text import generate_summaries, generate_translations
from prime_composer.problems.hub import load_hub
from prime_composer.problems.rows import read_jsonl

GENERATORS = {
    "summary": generate_summaries,
    "translation": generate_translations,
    "reversal": generate_reversals,
    "lookup": generate_lookups,
}
"""``kind`` of generated problems without operations -> what makes ``size`` of them from a seed."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a recipe, loaded once per command.

    Attributes:
        practice: the problems to train on, one environment after the other.
        held_out: the held-out problems, the environments in turn, so that any first part has all of
            them.
        sources: the recipe's environments by name.
        left_out: rows that ``clean`` left out, by environment, where there are any.
    """

    practice: list[Problem]
    held_out: list[Problem]
    sources: Mapping[str, DataConfig]
    left_out: Mapping[str, int] = field(default_factory=dict)

    def config_of(self, problem: Problem) -> DataConfig:
        """Return the table that says how the problem is asked and checked."""
        return self.sources[problem.environment]

    @property
    def worked(self) -> list[Problem]:
        """The problems to train on that have worked answers."""
        return self.practice

    @property
    def names(self) -> list[str]:
        """The environments."""
        return list(self.sources)

    def ratio(self, name: str) -> float:
        """Return an environment's share of the prompts, relative to the others."""
        return self.sources[name].ratio


def load_problem_set(sources: Mapping[str, DataConfig]) -> ProblemSet:
    """Load the problems of all environments.

    Raises:
        ValueError: as ``load_problems``, or one environment trains on what another one holds out.
    """
    practice: list[Problem] = []
    left_out: dict[str, int] = {}
    held_out_by_environment: list[list[Problem]] = []
    for name, config in sources.items():
        train, test, dropped = _load_split(config)
        if dropped:
            left_out[name] = dropped
        practice += [replace(problem, environment=name) for problem in train]
        held_out_by_environment.append([replace(problem, environment=name) for problem in test])
    held_out = [
        problem
        for turn in zip_longest(*held_out_by_environment)
        for problem in turn
        if problem is not None
    ]
    _refuse_overlap_of_environments(practice, held_out)
    return ProblemSet(practice, held_out, sources, left_out)


def load_problems(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and the held-out ones, in a fixed order, no question in both.

    Raises:
        ValueError: a file is missing or malformed (with file and line number), a library is
            missing, the hub is out of reach, training and held-out questions overlap, or no row
            names a teacher under ``teacher_key``.
    """
    train, held_out, _ = _load_split(config)
    return train, held_out


def _load_split(config: DataConfig) -> tuple[list[Problem], list[Problem], int]:
    """Return what ``load_problems`` does, and the number of rows that were left out."""
    train, held_out, origin, left_out = _load_source(config)
    if config.metric in MATH and not config.calculator_annotations:
        train = [_without_annotations(problem) for problem in train]
        held_out = [_without_annotations(problem) for problem in held_out]
    if config.clean:
        asked = {problem.question for problem in held_out}
        kept = [problem for problem in train if problem.question not in asked]
        train, left_out = kept, left_out + len(train) - len(kept)
    for name, wanted, problems in (
        ("training", config.trains, train),
        ("held-out", config.evaluates, held_out),
    ):
        if wanted and not problems:
            raise ValueError(
                f"{origin} leaves no {name} problems; raise [data] size or change hold_out"
            )
    _refuse_overlap(train, held_out, origin)
    if config.teacher_key is not None and all(one.teacher is None for one in train or held_out):
        raise ValueError(
            f"{origin}: no row has the key {config.teacher_key!r}; "
            "correct teacher_key, or leave it out to have all rows go where `teacher` says"
        )
    return train, held_out, left_out


def _load_source(config: DataConfig) -> tuple[list[Problem], list[Problem], str, int]:
    """Return what to train on, what is held out, the source's name, and the rows left out."""
    if config.source == "generated":
        return *_generated(config), "the generated problems", 0
    if config.source == "hub":
        (train, left_out), (held_out, more) = map(_kept, load_hub(config))
        return train, held_out, config.hub_id, left_out + more
    assert config.path is not None  # [data] is refused without it
    path = config.path.expanduser()
    if path.is_dir():
        (train, left_out), (held_out, more) = (
            _kept(read_jsonl(path / f"{split}.jsonl", config) if wanted else [])
            for split, wanted in (("train", config.trains), ("test", config.evaluates))
        )
        return train, held_out, str(path), left_out + more
    problems, left_out = _kept(read_jsonl(path, config))
    return *_split(problems, config), str(path), left_out


def _generated(config: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """Return generated problems to train on, and held-out ones."""
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


def _kept(rows: Sequence[Problem | None]) -> tuple[list[Problem], int]:
    """Return the problems among rows, and the number of rows that were left out."""
    problems = [problem for problem in rows if problem is not None]
    return problems, len(rows) - len(problems)


def split_by_question(
    problems: list[Problem], hold_out: float, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Set aside the share ``hold_out`` of the distinct questions.

    Problems with the same question stay on the same side.
    """
    questions = sorted({problem.question for problem in problems})
    random.Random(f"hold-out {seed}").shuffle(questions)
    aside = set(questions[: max(1, round(hold_out * len(questions)))])
    train = [problem for problem in problems if problem.question not in aside]
    held_out = [problem for problem in problems if problem.question in aside]
    return train, held_out


def _refuse_overlap_of_environments(
    practice: Sequence[Problem], held_out: Sequence[Problem]
) -> None:
    trained = {problem.question: problem.environment for problem in practice}
    shared = (problem for problem in held_out if problem.question in trained)
    clash = min(shared, key=lambda problem: problem.question, default=None)
    if clash is None:
        return
    trains = f"environments.{trained[clash.question]}"
    holds_out = f"environments.{clash.environment}"
    _refuse_overlap(
        practice,
        held_out,
        f"{trains} trains on what {holds_out} holds out",
        "Remove them from one of the two. Generated environments need `operations` without one in "
        "common, or all the same `size`, `seed`, `operations` and `hold_out`.",
    )


def _refuse_overlap(
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    origin: str,
    remedy: str = "Remove them from one side.",
) -> None:
    shared = {problem.question for problem in train} & {problem.question for problem in held_out}
    if shared:
        raise ValueError(
            f"{origin}: {len(shared)} question(s) are both trained on and held out, "
            f"so accuracy would be flattered. {remedy} The first: {min(shared)!r}"
        )


def _without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))
