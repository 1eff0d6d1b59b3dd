"""Measure what a special token that the teacher never writes costs, and what the mask restores.

    python -m tests.studies.special_tokens [--seeds 0 1 2] [--steps 60] [--teachers true other]
        [--set KEY=VALUE ...]

"mask" says what leaves the loss: nothing, the first end of text of an answer, or its repeated end.
With "stops" nothing leaves it, and both ends are one outcome.
"end" is the teacher's mean probability of the end of text where the student wrote it in the first
step, "growth" and "loops" are `rollout/growth` and `rollout/repeated` of the last one, and "warned"
is the step of the first warning by `LIMITS`.

Student and teacher share a tokenizer and use it differently. The planted teacher gives the
student's end-of-text token probability e^-20 everywhere, as a chat model does that ends its turns
with another token. The rest of its distribution keeps its proportions. The planted teacher scores
the student's training. The printed KL is measured against the true one.

Results for recipes/gsm8k_opd.toml with models of 900 SFT steps, one seed, 40 steps
(``--seeds 0 --steps 40``). The mask removes the first end of text of a response. "top 1%" and
"removed" (the mask's share of |A|) are means over the first quarter of the steps:

    loss         teacher  mask    accuracy  cut off  true KL   top 1%  removed
    sampled      true     no         79.0%     0.0%    0.136    18.6%     0.0%
    sampled      planted  no         61.5%    99.0%    1.661    13.5%     0.0%
    sampled      planted  yes        79.0%     4.5%    0.270    18.1%    59.2%
    tail K = 16  true     no         83.5%     0.0%    0.062    22.5%     0.0%
    tail K = 16  planted  no         80.0%    35.0%    0.754    18.0%     0.0%
    tail K = 16  planted  yes        84.5%     0.0%    0.112    21.0%    63.8%

Answers that may be longer collapse for good. Five seeds, another processor, which trains other
models (``--seeds 0 1 2 3 4 --steps 40 --set rollout.max_tokens=94``), mean (least to greatest):

    loss         teacher  mask               accuracy  cut off  true KL      end growth  loops
    sampled      true     no      67.2% (66.0%-68.5%)     0.0%    0.141  8.4e-01   0.49   0.3%
    sampled      planted  no         5.4% (3.0%-7.0%)   100.0%    0.717  2.1e-09   2.78  67.2%
    sampled      planted  end     64.8% (60.5%-69.5%)     0.4%    0.173  2.1e-09   0.50   0.6%
    sampled      planted  loops      4.0% (2.0%-6.5%)   100.0%    0.652  2.1e-09   2.78  84.7%
    tail K = 16  true     no      74.4% (72.0%-76.0%)     0.0%    0.077  8.4e-01   0.48   0.0%
    tail K = 16  planted  no      20.2% (17.0%-23.5%)    38.1%    0.430  2.1e-09   1.35  21.2%
    tail K = 16  planted  end     55.7% (49.5%-60.5%)    16.0%    0.265  2.1e-09   0.82  10.3%
    tail K = 16  planted  loops   19.0% (15.0%-24.0%)    44.0%    0.468  2.1e-09   1.42  27.8%

Each planted run is warned of in step 3, the first in which it can be, and no run of the true
teacher. The mask of the end restores the sampled token's accuracy. It restores two thirds of what
the tail loss has lost: 16% of its answers are still cut. With one seed and the models of the first
table it restored all.

The teacher's probability of the end of text says so from the first step on. To leave repeated ends
out does not help: the student writes them because it does not end.

The other teacher ends by a token of its own, which has the true end's probability. With both ends
in ``[loss.stops]`` each seed ends as with the true teacher, to a point of accuracy. Same settings,
models of a third processor; seeds 0 to 4, or the first 3 or 4 ("of"):

    loss         teacher  mask               accuracy  cut off  true KL      end growth  loops
    sampled      true     no      78.1% (74.0%-81.5%)     0.1%    0.111  9.7e-01   0.65   0.6%
    sampled      other    end     79.3% (74.5%-82.5%)     0.2%    0.101  2.1e-09   0.67   0.5%  of 3
    sampled      other    stops   78.5% (75.0%-81.5%)     0.1%    0.112  2.1e-09   0.65   0.6%
    tail K = 16  true     no      87.9% (87.0%-88.5%)     0.0%    0.046  9.7e-01   0.67   0.4%  of 4
    tail K = 16  other    stops   87.7% (87.0%-88.5%)     0.0%    0.047  2.1e-09   0.64   0.3%

No run of the other teacher without mask or stops was finished. Stops leave the warning as it is.

One token in about 16 has three fifths of |A|, and trains the sampled token's student never to stop.
The tail loss is less sensitive. The token is not among the teacher's 16, so the mass of the bucket
is compared, not e^-20.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from prime_composer.cli.machine import set_environment

set_environment()

import torch  # noqa: E402

from prime_composer.backends.hf_model import load_tokenizer  # noqa: E402
from prime_composer.backends.protocols import (  # noqa: E402
    Limits,
    Rollout,
    Sampler,
    Scorer,
)
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
"""The models that the results above were measured with."""

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
    "loops": ", repetition = {}",
    "stops": f', stops = {{texts = ["{END}", "{OTHER}"]}}',
}
"""What is left out of the loss: the end of text, or the repeated end of an answer; or what is one
outcome."""

ROWS = {
    "true": ("no",),
    "planted": ("no", "end", "loops"),
    "other": ("no", "end", "stops"),
}
"""Teacher -> what is tried with it."""

LIMITS = "checks.collapse={end = 0.01, truncated = 0.5, repeated = 0.25, steps = 3}"


def plant(scores: Scores, sampled: torch.Tensor, token: int, k: int) -> Scores:
    """The scores of a teacher that gives ``token`` e^-20 and the others its old mass in their old
    proportions.

    Args:
        scores: of the true teacher, with at least k + 1 ids.
        sampled: the rollout's token ids from its first trained token on, [n].
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


def run(
    loss: str, teacher: str, seed: int, steps: int, more: Sequence[str] = ()
) -> tuple[list[dict[str, float]], list[int]]:
    """Return the records of one run, and the steps in which it warned of a collapse."""
    overrides = [
        *MODELS,
        f"loss={loss}",
        f"trainer.seed={seed}",
        f"trainer.steps={steps}",
        "rollout.backend=transformers",
        LIMITS,
    ]
    recipe = load_recipe(
        RECIPE,
        [*overrides, "eval.every=0", "checkpoint.every=0", "logging.tensorboard=false", *more],
    )
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    true_scorer = opening.open_scorer

    def open_planted(spec: BackendSpec, status: Callable[[str], None]) -> Scorer:
        tokenizer = load_tokenizer(spec.model)
        end, other = tokenizer.convert_tokens_to_ids([END, OTHER])
        return PlantedScorer(true_scorer(spec, status), end, other if teacher == "other" else None)

    opening.open_scorer = true_scorer if teacher == "true" else open_planted
    try:
        with tempfile.TemporaryDirectory() as folder:
            display = Silent()
            train(recipe, problems, paths, Path(folder), display)
            warned = [
                int(text.split("step ")[1].split(":")[0])
                for text in display.texts
                if "checks.collapse" in text
            ]
            return read_metrics(folder), warned
    finally:
        opening.open_scorer = true_scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--teachers", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print(
        f"{'loss':12} {'teacher':8} {'mask':5} {'accuracy':>21} {'cut off':>8} {'true KL':>8} "
        f"{'top 1%':>8} {'removed':>8} {'end':>8} {'growth':>6} {'loops':>6} {'warned':>7}"
    )
    for name, loss in LOSSES.items():
        for teacher, mask in ((one, mask) for one in args.teachers for mask in ROWS[one]):
            knobs = loss.replace("MASK", MASKS[mask])
            runs = [run(knobs, teacher, s, args.steps, args.overrides) for s in args.seeds]
            print(f"{name:12} {teacher:8} {mask:5} {row(runs, args.steps)}", flush=True)


def row(runs: Sequence[tuple[list[dict[str, float]], list[int]]], steps: int) -> str:
    """Return the columns of one table row."""
    every = [records for records, _ in runs]
    ends = [records[-1] for records in every]
    accuracy = [end["eval/accuracy"] for end in ends]
    # The first quarter of the run: later an unmasked student may have no end of text left to be
    # punished for.
    early = [
        record
        for records in every
        for record in records
        if 1 <= record["step"] <= max(1, steps // 4)
    ]
    top_share = [
        value for record in early for key, value in record.items() if key.endswith("top1pct")
    ]
    removed = [
        record.get("special_tokens/removed_signal", 0.0) / record.get("special_tokens/signal", 1.0)
        for record in early
    ]
    first = [min(warned) for _, warned in runs if warned]
    return (
        f"{f'{mean(accuracy):.1%} ({min(accuracy):.1%}-{max(accuracy):.1%})':>21} "
        f"{mean([end['eval/truncated'] for end in ends]):8.1%} "
        f"{mean([end['eval/reverse_kl'] for end in ends]):8.3f} "
        f"{mean(top_share):8.1%} {mean(removed):8.1%} "
        f"{mean([records[1]['rollout/end_teacher'] for records in every]):8.1e} "
        f"{mean([end['rollout/growth'] for end in ends]):6.2f} "
        f"{mean([end['rollout/repeated'] for end in ends]):6.1%} "
        f"{f'{min(first)} to {max(first)}' if first else '-':>7}"
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    main()
