"""Write the page of every metric, from where metrics are made.

python -m docs.metrics                  # print it
python -m docs.metrics --write FILE     # renew it between the markers of FILE
python -m docs.metrics --check FILE     # fail if FILE is stale

The page is recipes/metrics.md. Names of losses come from calling every loss with each of its
examples, other names from the package's sources. A name without a meaning here, or a meaning
without a name, is an error.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from docs.losses import generate, page_parser
from prime_composer.local.evaluate import SUMS
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.metrics import DISTILLATION_KL
from tests.builders import packed_inputs

ROOT = Path(__file__).resolve().parents[1]

BEGIN = "<!-- metrics: begin, from python -m docs.metrics --write FILE -->"
END = "<!-- metrics: end -->"

OF_LOSSES = {
    "kl": "the loss: KL(student ‖ teacher) per token; of topk_forward_kl KL(teacher ‖ student), of "
    "taid KL(moving target ‖ student)",
    "jsd": "the loss: the generalized Jensen-Shannon divergence",
    "divergence": "the loss: its own divergence (self_distillation: before the ratio)",
    "cross_entropy": "the loss: cross-entropy with the moving target",
    "nll": "the loss: -log p of the data's tokens",
    "reverse_kl": "the reverse KL, on the support or of the sampled token (`on`)",
    "forward_kl": "the forward KL of the support",
    "head": "the part on the teacher's top K",
    "sampled_tail": "the part of sampled tokens outside of it",
    "outside": "share of sampled tokens outside the teacher's top K",
    "kl_in_support": "KL of the distributions renormalized within the K ids, times the mass there; "
    "of the loss's direction",
    "kl_mass": "KL of being within the K ids or not. `kl_in_support` + `kl_mass` is the KL of "
    "K + 1 outcomes",
    "student_mass": "the student's probability of the K ids",
    "teacher_mass": "the teacher's; near 1 means that K is large enough",
    "topk_overlap_min": "share of the K ids that are certainly among the student's own K most "
    "probable",
    "signal_top1pct": "part of the sum of |signal| that its largest 1% of tokens carry. Near 1 a "
    "handful of tokens trains the model",
    "signal_abs": "mean |log q - log p| of the sampled token, after `clip`",
    "ref_kl": "mean log q - log p of the sampled token; prime-rl's name. Its negative estimates "
    "the reverse KL",
    "teacher_kl": "the same under prime-rl v0.6's name",
    "entropy": "the teacher's entropy",
    "unsure": "share of tokens at which the teacher is unsure, and the forward KL counts",
    "t": "the target's place between student (0) and teacher (1)",
    "ratio": "importance ratio p/mu",
    "ratio_at_bound": "share of tokens whose ratio is at `max_ratio`",
    "is_masked": "share of tokens that the trust region drops",
    "is_masked_high": "the part of it whose probability rose",
    "is_masked_low": "the part of it whose probability fell",
    "masked_mismatch_kl": "KL of sampler and student (k3), of dropped tokens",
    "unmasked_mismatch_kl": "the same of kept tokens",
    "masked_advantage_positive": "share of dropped tokens with an advantage above 0",
    "masked_advantage_negative": "share of dropped tokens with one below 0",
}
"""A loss's metric without the loss's name -> what it is."""

OF_MODIFIERS = {
    "special_tokens/removed": "share of tokens that are taken out",
    "special_tokens/signal": "mean |log q - log p| of all tokens",
    "special_tokens/removed_signal": "what the removed tokens contribute to it",
    "stops/sampled": "share of tokens that are one of the stops",
    "stops/student": "the student's probability of all stops where one was sampled",
    "stops/teacher": "the teacher's; what its top K lists, and the sampled one",
    "position_weights/mean": "mean weight of a token",
}
"""Metric of a table that works with every loss -> what it is."""

OF_A_STEP = {
    "loss": "the step's loss per token",
    "grad_norm": "norm of the gradient before it is clipped",
    "lr": "learning rate",
    "tokens_per_second": "trained tokens per second of the step",
    "time/{}": "seconds of a part of the step, such as `time/sample`; `time/step` is the whole",
    "distillation/kl/{}": "`distillation/kl` of an environment, or of a teacher that rows name",
    "rollout/reward": "mean reward; `/NAME` by environment",
    "rollout/truncated": "share of rollouts that are cut",
    "rollout/tokens": "mean trained tokens of a rollout",
    "rollout/student_truncated": "share of the student's rollouts that are cut",
    "rollout/student_tokens": "mean tokens of the student's rollouts",
    "rollout/growth": "the same, as a multiple of the first step's",
    "rollout/repeated": "share of rollouts that end in a repetition",
    "rollout/repeated_tokens": "share of tokens that only repeat",
    "rollout/entropy": "entropy of the policy that samples, nats per token (an estimate)",
    "rollout/end_student": "mean probability of the tokens that ended answers, by the student",
    "rollout/end_teacher": "the same by the teacher",
    "rollout/token_share/{}": "an environment's share of the step's tokens",
    "rollout/weight_share/{}": "its share of the weights of `[loss.balance]`",
    "rollout/gradient_share/{}": "its share of the gradient's norm, in steps that are evaluated",
    "rollout/samples": "sequences of an episode that train; a conversation may branch",
    "rollout/turns": "turns of an episode",
    "rollout/tool_calls": "calls of tools of an episode",
    "rollout/turn_limit": "share of episodes that end at the limit of turns",
    "rollout/special_texts": "share of rollouts that were told the text of a special token",
    "rollout/failed": "share of episodes that failed",
    "rollout/staleness": "updates since the rollouts were sampled, with `rollout.ahead`",
    "rollout/padding_ids": "sampled ids that a teacher's output head lacks",
    "rollout/without_hint": "share of rollouts without a hint, which do not train",
    "rollout/teacher_cut": "share of rollouts that are cut to a teacher's window",
    "rollout/teacher_dropped": "share of rollouts that are dropped for it",
    "rollout/answer_timeouts": "answers whose check took too long, and counts as wrong",
    "sampler/mismatch_kl": "KL of the sampler and the trainer on the same tokens (k3)",
    "student/weights": "weights of a student that is quantized in training",
    "student/rounded": "how many of them are rounded",
    "tape/read": "share of the scores that came from a tape",
    "islands/outer_steps": "outer steps of `[diloco]`",
    "islands/together": "islands in the last one",
    "xtok/{}": "teachers with a tokenizer of their own: `unscored` (share of tokens without a "
    "score), `aligned`, `noncanonical`, `teacher_tokens` (per token of the student); inside "
    "prime-rl of each rollout, with `unscored_turns`",
}
"""Metric of a training step on one machine -> what it is."""

OF_AN_EVALUATION = {
    "eval/{}": "the score of the held-out problems: `accuracy`, or a graded metric; "
    "`/NAME` by environment",
    "eval/reverse_kl": "KL(student ‖ teacher) on the student's own samples at temperature 1; "
    "`/NAME`",
    "eval/forward_kl": "KL(teacher ‖ student) on the same tokens",
    "eval/entropy": "the student's entropy",
    "eval/teacher_entropy": "the teacher's, on the same tokens",
    "eval/kl_ids": "K, where these KLs are of the teacher's top K and a tail: lower bounds",
    "eval/overlap": "share of the student's K most probable ids that are among the teacher's; K of "
    "the loss, or 16",
    "eval/overlap_advantage": "on the shared ids, mean of p (log q - log p) after renormalization: "
    "0 where both agree on them",
    "eval/truncated": "share of answers that are cut",
    "eval/failed": "share of tasks that failed",
    "teacher/{}": "the same scores of the teacher's own answers, once",
}
"""Metric of an evaluation on one machine -> what it is."""

ROOMS = ("local", "step", "samplers", "teachers", "environments")
"""Where one machine makes metrics."""

PATTERN = re.compile(rf"({'|'.join(sorted({n.split('/')[0] for n in OF_A_STEP if '/' in n}))}"
                     r"|eval|teacher)(/[\w{}]+)+")  # fmt: skip
"""How a metric looks in a source, with ``{}`` in the place of what is formatted."""

GROUPS = ("rollout/token_share", "rollout/weight_share", "rollout/gradient_share")
"""Names that ``step.balance.shares`` completes."""


def made_by_losses() -> tuple[dict[str, list[str]], set[str]]:
    """Return the losses that make each name, and the modifiers' names."""
    own: dict[str, dict[str, None]] = {}
    others: set[str] = set()
    for loss, config_type in LOSS_TYPES.items():
        # A loss from outside may be registered in this process, and a sum has its parts' names.
        if ":" in loss or config_type.is_sum():
            continue
        for example in config_type.examples:
            config = config_type.model_validate(example)
            mixed = config.rl_mix.loss.type if config.rl_mix else None
            for name in setup_loss_fn(config)(packed_inputs(config)).metrics:
                prefix, _, rest = name.partition("/")
                if prefix in (loss, mixed):
                    own.setdefault(rest, {})[prefix] = None
                else:
                    others.add(name)
    return {name: [*makers] for name, makers in own.items()}, others


def made_on_one_machine() -> set[str]:
    """Return the names of metrics in the sources of ``ROOMS``."""
    found = set()
    for room in ROOMS:
        for path in sorted((ROOT / "prime_composer" / room).rglob("*.py")):
            found |= {name for name in literals(path) if PATTERN.fullmatch(name)}
    found |= {f"eval/{name}" for name in SUMS if name != "tokens"}
    whole = {name for name in OF_A_STEP if name.count("/") == 1 and name.endswith("/{}")}
    grouped = {f"{name.partition('/')[0]}/{{}}" for name in found}
    named = {name for name in found if f"{name.partition('/')[0]}/{{}}" not in whole}
    return {f"{name}/{{}}" if name in GROUPS else name for name in named} | (grouped & whole)


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a source file, with ``{}`` for what is formatted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def explained(names: set[str], meanings: Mapping[str, str], where: str) -> None:
    """Check that names and meanings are the same.

    Raises:
        ValueError: they are not.
    """
    if names != meanings.keys():
        raise ValueError(
            f"docs/metrics.py, {where}: without a meaning: {sorted(names - meanings.keys())}; "
            f"of nothing: {sorted(meanings.keys() - names)}"
        )


def table(meanings: Mapping[str, str], more: Mapping[str, str] | None = None) -> str:
    """Return the rows of a table; ``more`` has a third column."""
    rows = ["| metric | what it is |", "|---|---|"]
    if more is not None:
        rows = ["| metric | what it is | losses |", "|---|---|---|"]
    for name, text in meanings.items():
        shown = name.replace("{}", "NAME")
        last = "" if more is None else f" {more[name]} |"
        rows.append(f"| `{shown}` | {text.replace('|', chr(92) + '|')} |{last}")
    return "\n".join(rows)


def page() -> str:
    """Return the generated part of the page."""
    own, others = made_by_losses()
    explained(set(own), OF_LOSSES, "OF_LOSSES")
    explained(others, OF_MODIFIERS, "OF_MODIFIERS")
    known = {*OF_A_STEP, *OF_AN_EVALUATION} - {"loss", "grad_norm", "lr", "tokens_per_second"}
    explained(
        made_on_one_machine() | {f"{DISTILLATION_KL}/{{}}"}, dict.fromkeys(known, ""), "steps"
    )
    most = max(len(losses) for losses in own.values()) // 2
    losses = {}
    for name, makers in own.items():
        few = ", ".join(f"`{loss}`" for loss in makers)
        losses[name] = few if len(makers) <= most else f"{len(makers)} losses"
    sections = (
        "## Of a loss\n\n`TYPE/METRIC`, such as `topk_reverse_kl/kl`; of a channel of `compose` "
        "`compose/CHANNEL/METRIC`, and `compose/CHANNEL/loss`. Means over the tokens that train.\n",
        table(OF_LOSSES, losses),
        "\n## Of a modifier\n",
        table(OF_MODIFIERS),
        "\n## Of a step on one machine\n",
        table(OF_A_STEP),
        "\n## Of an evaluation on one machine\n",
        table(OF_AN_EVALUATION),
    )
    return "\n".join(sections) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the page. Return the exit status."""
    options = page_parser("The page of every metric.").parse_args(arguments)
    return generate("docs.metrics", (BEGIN, END), page(), options)


if __name__ == "__main__":
    sys.exit(main())
