"""Compare ways to train a student on a teacher with another tokenizer.

    python -m tests.studies.another_tokenizer VARIANT ... [--seeds 0 1 2 3 4] [--output DIR]
        [--set KEY=VALUE ...]

Every variant trains the student of ``recipes/methods/gsm8k_cross_tokenizer.toml`` on as many
sequences and steps, with the same optimizer. The runs of one seed ask the same problems. A run goes
to DIR/VARIANT-seedN, and is kept where it is finished. The table has all that are there.

    own      the recipe: reverse KL on 16 ids of the student and the tail, on its rollouts
    sft      cross-entropy on the teacher's answers, encoded for the student
    uld      distance of sorted probabilities where tokens begin together, on the student's rollouts
    uld-ce   cross-entropy and 1.5 of that distance, on the teacher's answers
    bpm      reverse KL on 16 ids and the tail, where tokens begin together: each teacher token
             counts for the longest student token that is a byte prefix of it, on its rollouts
    shared   reverse KL from a teacher that was trained alike with the student's tokenizer

``uld``, ``uld-ce`` and ``bpm`` are crude (``another_tokenizer_baselines``), and say nothing of
their authors' versions where those differ. recipes/results.md has what came out.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prime_composer.cli.machine import set_environment

set_environment()

from prime_composer import distill  # noqa: E402
from prime_composer.backends.hf_model import read_config  # noqa: E402
from prime_composer.local.engine import Engine  # noqa: E402
from prime_composer.local.tracker import METRICS_FILE, read_metrics  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.step.batch import Sample  # noqa: E402
from prime_composer.teachers.own_tokenizer import ByRows, OwnTokenizerScorer  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402
from tests.studies.another_tokenizer_baselines import ByLongestPrefix, ByRank  # noqa: E402

RECIPE = Path(__file__).parents[2] / "recipes" / "methods" / "gsm8k_cross_tokenizer.toml"
COMMON = (
    "rollout.backend=transformers",
    "checkpoint.every=0",
    "logging.tensorboard=false",
)
TEACHERS_ANSWERS = (
    "rollout.student_fraction=0.0",
    "rollout.other_source=teacher",
    "teacher.on_overflow=error",
)
ULD = "tests.studies.another_tokenizer_baselines:uld"
VARIANTS: dict[str, tuple[str, ...]] = {
    "own": (),
    "sft": ('loss={type = "sft"}', *TEACHERS_ANSWERS),
    "uld": (f'loss={{type = "{ULD}", k = VOCABULARY}}',),
    "uld-ce": (
        f'loss={{type = "{ULD}", k = VOCABULARY, distance = 1.5, cross_entropy = 1.0}}',
        *TEACHERS_ANSWERS,
    ),
    "bpm": (),
    "shared": (
        "teacher.tokenizer=shared",
        "teacher.prepare={layers = 3, sft_steps = 1300}",
    ),
}
SCORES: dict[str, type[ByRows]] = {"uld": ByRank, "uld-ce": ByRank, "bpm": ByLongestPrefix}
"""What makes scores of the teacher's rows in training, instead of the package's own."""

COLUMNS = ("eval/accuracy", "eval/reverse_kl")


@contextmanager
def scores_in_training(kind: type[ByRows] | None) -> Iterator[None]:
    """Exchange what makes scores of a teacher's rows in training, and not in evaluations."""
    as_it_is = Engine.score

    def score(engine: Engine, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        assert kind is not None and engine.teachers is not None
        (scorer,) = engine.teachers.scorers.values()
        assert isinstance(scorer, OwnTokenizerScorer)
        kept, scorer._by_rows = scorer._by_rows, kind(scorer.pair)
        try:
            return as_it_is(engine, samples)
        finally:
            scorer._by_rows = kept

    if kind is not None:
        Engine.score = score  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.score = as_it_is  # type: ignore[method-assign]


def run(variant: str, seed: int, folder: Path, more: Sequence[str] = ()) -> None:
    """Train one variant in a new folder."""
    overrides = [*COMMON, *VARIANTS[variant], f"trainer.seed={seed}", *more]
    # The vocabulary of the student is known once it is prepared.
    recipe = load_recipe(RECIPE, [item for item in overrides if "VOCABULARY" not in item])
    student = prepare_models(recipe, load_problem_set(recipe.sources))["student"]
    size = str(read_config(student).vocab_size)
    recipe = load_recipe(RECIPE, [item.replace("VOCABULARY", size) for item in overrides])
    with scores_in_training(SCORES.get(variant)):
        distill(recipe, output_dir=folder)


def measured(folder: Path) -> list[dict[str, float]]:
    """Return the evaluations of a run; none where it has not begun."""
    if not (folder / METRICS_FILE).exists():
        return []
    return [record for record in read_metrics(folder) if COLUMNS[0] in record]


def table(output: Path) -> str:
    """Return the rows of a table of all runs: mean (least to greatest) over the seeds."""
    lines = [f"{'':8} {'seeds':>5} {'step':>4}  " + "  ".join(f"{name:>24}" for name in COLUMNS)]
    for variant in VARIANTS:
        records = [one for run in sorted(output.glob(f"{variant}-seed*")) for one in measured(run)]
        for step in sorted({int(record["step"]) for record in records}):
            at = [record for record in records if record["step"] == step]
            cells = (mean_and_range([r[name] for r in at if name in r]) for name in COLUMNS)
            lines.append(f"{variant:8} {len(at):5} {step:4}  " + "  ".join(cells))
    return "\n".join(lines)


def mean_and_range(values: Sequence[float]) -> str:
    if not values:
        return f"{'-':>24}"
    mean = sum(values) / len(values)
    return f"{f'{mean:.3f} ({min(values):.3f} to {max(values):.3f})':>24}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", choices=[*VARIANTS, []], metavar="VARIANT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("outputs/another_tokenizer"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    steps = load_recipe(RECIPE, args.overrides).trainer.steps
    for seed in args.seeds:  # seed by seed: a study that is stopped has whole seeds
        for variant in args.variants:
            folder = args.output / f"{variant}-seed{seed}"
            if any(record["step"] == steps for record in measured(folder)):
                continue
            print(folder.name, flush=True)
            run(variant, seed, folder, args.overrides)
    print(table(args.output))


if __name__ == "__main__":
    main()
