"""Measure what a special token that the teacher never writes costs, and what the mask restores.

    python -m tests.studies.special_tokens [--seeds 0 1 2] [--steps 60] [--set KEY=VALUE ...]

"mask" says what leaves the loss: nothing, or the end of text. With "stops" nothing leaves it, and
both ends are one outcome. "cut off" is the share of answers that reach the budget.

Student and teacher share a tokenizer and use it differently. The planted teacher gives the
student's end-of-text token probability e^-20 everywhere, as a chat model does that ends its turns
with another token. The rest of its distribution keeps its proportions.

The other teacher ends by a token of its own, which has the true end's probability. What came out
is in recipes/results.md and recipes/README.md.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402

from prime_composer.backends.hf_model import load_tokenizer  # noqa: E402
from prime_composer.backends.protocols import Limits, Rollout, Sampler, Scorer  # noqa: E402
from prime_composer.contract import Scores  # noqa: E402
from prime_composer.local import opening  # noqa: E402
from prime_composer.local.tracker import read_metrics  # noqa: E402
from prime_composer.local.train import train  # noqa: E402
from prime_composer.problems.loading import load_problem_set  # noqa: E402
from prime_composer.recipe.loading import load_recipe  # noqa: E402
from prime_composer.samplers.registry import BackendSpec  # noqa: E402
from prime_composer.tiny_models.cache import prepare_models  # noqa: E402
from tests.local.helpers import Silent  # noqa: E402

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_opd.toml"
MODELS = ("teacher.prepare.sft_steps=900", "student.prepare.sft_steps=900")
"""The models that the results were measured with."""

END = "<|endoftext|>"
OTHER = "~"
"""The other teacher's end, one token that neither problems nor answers have."""
LOG_PLANTED = -20.0
LOSSES = {
    "sampled": '{type = "sampled_reverse_kl", k = 16MASK}',
    "tail K = 16": '{type = "topk_reverse_kl", k = 16MASK}',
}
MASKS = {
    "no": "",
    "end": f', special_tokens = {{strings = ["{END}"]}}',
    "stops": f', stops = {{texts = ["{END}", "{OTHER}"]}}',
}
"""What is left out of the loss, or what is one outcome."""

ROWS = {"planted": ("no", "end"), "other": ("no", "end", "stops")}
"""Teacher -> what is tried with it."""


def plant(scores: Scores, sampled: torch.Tensor, token: int, k: int) -> Scores:
    """The scores of a teacher that gives ``token`` e^-20 and the others its old mass in their old
    proportions, from the true ones with k + 1 ids or more. ``sampled`` are the trained tokens, [n].
    """
    at_token = scores.token_ids == token
    # log q of the token; 0 mass where it is not among the K + 1 most probable: it is at most the
    # least of them.
    log_q = torch.where(at_token, scores.teacher_logprobs, -torch.inf).logsumexp(-1)
    log_q = torch.where(sampled == token, scores.ref_logprobs, log_q)
    # Where q rounds to 1 nothing is known of the others but their order.
    others = math.log1p(-math.exp(LOG_PLANTED)) - torch.log1p(-log_q.clamp(max=-1e-6).exp())
    logprobs = torch.where(at_token, -torch.inf, scores.teacher_logprobs + others[:, None])
    order = logprobs.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return Scores(
        torch.where(sampled == token, LOG_PLANTED, scores.ref_logprobs + others),
        scores.token_ids.gather(1, order),
        logprobs.gather(1, order),
    )


def move(scores: Scores, sampled: torch.Tensor, token: int, other: int, k: int) -> Scores:
    """The scores of a teacher that ends by ``other`` where the true one does by ``token``, whose
    probability is e^-20."""
    q = scores.teacher_logprobs
    at_token = scores.token_ids == token
    log_q = torch.where(at_token, q, -torch.inf).logsumexp(-1)
    ref = torch.where(sampled == other, log_q.clamp(min=LOG_PLANTED), scores.ref_logprobs)
    return Scores(
        torch.where(sampled == token, LOG_PLANTED, ref),
        torch.where(at_token, other, scores.token_ids)[:, :k],
        q[:, :k],
    )


class PlantedScorer:
    """A scorer whose teacher never writes ``token``, or writes ``other`` in its place;
    full-vocabulary scores, which measure the KL, stay the true ones."""

    gives_any_ids = True

    def __init__(self, inner: Scorer, token: int, other: int | None = None):
        self.inner, self.token, self.other = inner, token, other

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    @property
    def sampler(self) -> Sampler | None:
        return self.inner.sampler

    def score(
        self,
        rollouts: Sequence[Rollout],
        support_size: int | Literal["full"],
        prompts: Sequence[Sequence[int]] | None = None,
        **asked: Any,
    ) -> list[Scores]:
        if support_size == "full":
            return self.inner.score(rollouts, "full", prompts, **asked)
        true = self.inner.score(rollouts, support_size + 1, prompts, **asked)
        asked = [(one, r.token_ids[r.start :]) for one, r in zip(true, rollouts, strict=True)]
        if self.other is not None:
            return [move(*one, self.token, self.other, support_size) for one in asked]
        return [plant(*one, self.token, support_size) for one in asked]

    def close(self) -> None:
        self.inner.close()


def run(loss: str, teacher: str, seed: int, steps: int, more: Sequence[str]) -> dict[str, float]:
    """Return the last record of one run."""
    overrides = [
        *MODELS,
        f"loss={loss}",
        f"trainer.seed={seed}",
        f"trainer.steps={steps}",
        "rollout.backend=transformers",
    ]
    overrides += ["eval.every=0", "checkpoint.every=0", "logging.tensorboard=false"]
    recipe = load_recipe(RECIPE, [*overrides, *more])
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    true_scorer = opening.open_scorer

    def open_planted(spec: BackendSpec, status: Callable[[str], None]) -> Scorer:
        tokenizer = load_tokenizer(spec.model)
        end, other = tokenizer.convert_tokens_to_ids([END, OTHER])
        return PlantedScorer(true_scorer(spec, status), end, other if teacher == "other" else None)

    opening.open_scorer = open_planted
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, problems, paths, Path(folder), Silent())
            return read_metrics(folder)[-1]
    finally:
        opening.open_scorer = true_scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print(f"{'loss':12} {'teacher':8} {'mask':5} {'accuracy':>21} {'cut off':>8}")
    for name, loss in LOSSES.items():
        for teacher, mask in ((one, mask) for one, masks in ROWS.items() for mask in masks):
            knobs = loss.replace("MASK", MASKS[mask])
            runs = [run(knobs, teacher, s, args.steps, args.overrides) for s in args.seeds]
            accuracy = [end["eval/accuracy"] for end in runs]
            shown = f"{mean(accuracy):.1%} ({min(accuracy):.1%}-{max(accuracy):.1%})"
            cut_off = mean([end["eval/truncated"] for end in runs])
            print(f"{name:12} {teacher:8} {mask:5} {shown:>21} {cut_off:8.1%}", flush=True)


if __name__ == "__main__":
    main()
