"""Bias and noise of each loss's gradient against that of the full-vocabulary reverse KL, on real
rollouts of a recipe.

    python -m tests.studies.gradient_bias RECIPE [--set KEY=VALUE ...] [--batches 8]

Every loss gets the same rollouts, batch by batch; g is the gradient of one batch, and h that of the
full KL on it. Printed:

    bias    |mean (g - h)| / |mean h|, what no larger batch takes away, and the error of that number
    cosine  between mean g and mean h: a bias along h is a learning rate, one across it is not
    length  |mean g| / |mean h|
    noise   sqrt(mean |g - mean g|^2) / |mean h|, of one batch
    outside the student's and the teacher's mass outside the support
"""

import argparse
from pathlib import Path

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from prime_composer.local.collect import Collector  # noqa: E402
from prime_composer.local.opening import open_engine  # noqa: E402
from prime_composer.losses import (
    parse_loss,  # noqa: E402
    setup_loss_fn,  # noqa: E402
)
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.step.batch import Batch  # noqa: E402
from prime_composer.step.gradients import accumulate_gradients  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402

FULL = {"type": "topk_reverse_kl", "k": "full", "normalization": "full"}
LOSSES = {
    "full": FULL,
    "sampled": {"type": "sampled_reverse_kl"},
    "tail K = 16": {"type": "topk_reverse_kl", "k": 16},
    "tail K = 64": {"type": "topk_reverse_kl", "k": 64},
    "renorm K = 16": {"type": "topk_reverse_kl", "k": 16, "normalization": "renorm"},
    "head-tail K = 16": {"type": "head_tail_reverse_kl", "k": 16},
    "head-tail K = 64": {"type": "head_tail_reverse_kl", "k": 64},
}


def bias_and_noise(grads: Tensor, full: Tensor) -> tuple[float, float, float, float, float]:
    """Return bias, its error, cosine, length and noise, as defined above, of [batches, n]."""
    mean, target = grads.mean(0), full.mean(0)
    gap = grads - full
    spread, error = ((x - x.mean(0)).square().sum() / (len(x) - 1) for x in (grads, gap))
    scale = target.norm()
    return tuple(
        float(value)
        for value in (
            gap.mean(0).norm() / scale,
            (error / len(gap)).sqrt() / scale,
            torch.dot(mean, target) / (mean.norm() * scale),
            mean.norm() / scale,
            spread.sqrt() / scale,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, default=8)
    args = parser.parse_args()
    recipe = load_recipe(
        args.recipe,
        [*args.overrides, 'loss={type = "topk_reverse_kl", k = "full", normalization = "full"}'],
    )
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    grads: dict[str, list[Tensor]] = {name: [] for name in LOSSES}
    outside: dict[str, list[tuple[float, float]]] = {name: [] for name in LOSSES}
    with open_engine(recipe, problems, paths, lambda text: None) as engine:
        collector = Collector(engine, recipe)
        for step in range(1, args.batches + 1):
            samples = collector.sample(collector.problems(step), step)
            batch = Batch(engine.score(samples)[0])
            for name, raw in LOSSES.items():
                metrics = accumulate_gradients(
                    engine.model, setup_loss_fn(parse_loss(raw)), batch, recipe.trainer, step
                )
                grads[name].append(torch.cat([p.grad.flatten() for p in engine.model.parameters()]))
                engine.model.zero_grad(set_to_none=True)
                masses = [
                    1 - metrics.get(f"{raw['type']}/{who}_mass", float("nan"))
                    for who in ("student", "teacher")
                ]
                outside[name].append((masses[0], masses[1]))
    print(f"{args.batches} batches of {recipe.trainer.batch_size} rollouts")
    print(
        f"{'loss':18}{'bias':>14}{'cosine':>8}{'length':>8}{'noise':>8}"
        f"{'outside: student, teacher':>28}"
    )
    for name in LOSSES:
        bias, error, cosine, length, noise = bias_and_noise(
            torch.stack(grads[name]), torch.stack(grads["full"])
        )
        student, teacher = (
            sum(values) / len(values) for values in zip(*outside[name], strict=True)
        )
        print(
            f"{name:18}{bias:8.2f} "
            f"±{error:4.2f}{cosine:8.2f}{length:8.2f}{noise:8.2f}{student:18.3f}{teacher:10.3f}"
        )


if __name__ == "__main__":
    main()
