"""One-line mutants of the maths, and whether the tests notice: ``python tests/mutants.py [name ...] [--jobs N]``.

Each mutant is a copy of the package with one replacement in one file; the tests of divergences, losses and the contract run
on it until one fails. A mutant that none notices is printed as SURVIVED and the script exits 1. The last result of each stands
in ``tests/mutants.txt``, which a test holds against this list.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "tests" / "mutants.txt"
TESTS = [
    "tests/test_divergences.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "losses").glob("test_*.py")),
    "tests/test_contract.py",
]
# Where a mutant of a file is most likely noticed: run first, so that most of them die within seconds.
FIRST = {
    "masked.py": ["test_support_losses", "test_preferences"],
    "contract.py": ["test_contract"],
    "trust_region.py": ["test_sampled_reverse_kl", "test_rl_losses"],
    "loss_metrics.py": ["test_support_losses"],
    "preferences.py": ["test_preferences"],
    "modifiers.py": ["test_modifiers"],
    "losses/sampled_reverse_kl.py": ["test_sampled_reverse_kl", "test_rl_losses"],
    "losses/head_tail_reverse_kl.py": ["test_expectations"],
    "losses/taid.py": ["test_taid"],
    "losses/entropy_aware_opd.py": ["test_support_losses"],
    "losses/self_distillation.py": ["test_support_losses"],
    "losses/default.py": ["test_rl_losses"],
    "losses/ipo.py": ["test_rl_losses"],
    "losses/sft.py": ["test_rl_losses"],
    "losses/dpo.py": ["test_preferences"],
    "losses/simpo.py": ["test_preferences"],
    "losses/compose.py": ["test_compose"],
    "losses/base.py": ["test_compose", "test_taid", "test_support_losses"],
}

# name: (file in prime_composer, text that stands there exactly once, what a mistake would have written)
MUTANTS: dict[str, tuple[str, str, str]] = {
    # divergences
    "reverse tail dropped": (
        "divergences.py",
        "            p, q = with_tail(p), with_tail(q)\n            return kl_terms(p, q).sum(-1)",
        "            return kl_terms(p, q).sum(-1)",
    ),
    "forward tail dropped": (
        "divergences.py",
        "            p, q = with_tail(p), with_tail(q)\n            return kl_terms(q, p).sum(-1)",
        "            return kl_terms(q, p).sum(-1)",
    ),
    "reverse renorm is forward": (
        "divergences.py",
        "kl_terms(renormalized(p), renormalized(q))",
        "kl_terms(renormalized(q), renormalized(p))",
    ),
    "renorm renormalises the student only": (
        "divergences.py",
        "kl_terms(renormalized(p), renormalized(q))",
        "kl_terms(renormalized(p), q)",
    ),
    "generalised correction has the wrong sign": (
        "divergences.py",
        "kl_terms(p, q) - torch.exp(p) + torch.exp(q)",
        "kl_terms(p, q) + torch.exp(p) - torch.exp(q)",
    ),
    "generalised correction forgotten": (
        "divergences.py",
        "(kl_terms(q, p) - torch.exp(q) + torch.exp(p))",
        "(kl_terms(q, p))",
    ),
    "stop-gradient removed": ("divergences.py", "0.0, p - q).detach())", "0.0, p - q))"),
    "raw allowed in silence": ("divergences.py", "    if not allow_biased:", "    if False:"),
    "jsd mixture fixed at one half": (
        "divergences.py",
        "p + math.log1p(-beta), q + math.log(beta)",
        "p + math.log(0.5), q + math.log(0.5)",
    ),
    "jsd beta swapped in the mixture": (
        "divergences.py",
        "p + math.log1p(-beta), q + math.log(beta)",
        "p + math.log(beta), q + math.log1p(-beta)",
    ),
    "jsd coefficients swapped": (
        "divergences.py",
        "beta * kl_terms(q, m) + (1 - beta) * kl_terms(p, m)",
        "(1 - beta) * kl_terms(q, m) + beta * kl_terms(p, m)",
    ),
    "jsd labels of the ends swapped": (
        "divergences.py",
        "        return forward_kl(student_logprobs, teacher_logprobs, normalization)\n    if beta == 1:\n"
        "        return reverse_kl(student_logprobs, teacher_logprobs, normalization)",
        "        return reverse_kl(student_logprobs, teacher_logprobs, normalization)\n    if beta == 1:\n"
        "        return forward_kl(student_logprobs, teacher_logprobs, normalization)",
    ),
    "jsd of two impossible tokens is NaN": (
        "divergences.py",
        "    absent = (p == -math.inf) & (q == -math.inf)",
        "    absent = torch.zeros_like(p, dtype=torch.bool)",
    ),
    "taid mixes probabilities": (
        "divergences.py",
        "torch.log_softmax((1 - t) * p + t * q, dim=-1)",
        "torch.log((1 - t) * p.exp() + t * q.exp())",
    ),
    "taid anchor keeps its gradient": (
        "divergences.py",
        "outcomes(student_logprobs.detach(),",
        "outcomes(student_logprobs,",
    ),
    "taid t swapped": ("divergences.py", "(1 - t) * p + t * q", "t * p + (1 - t) * q"),
    "k3 without its linear term": ("divergences.py", "torch.expm1(d) - d", "torch.expm1(d)"),
    "k1 backpropagated in silence": (
        "divergences.py",
        "    if student_logprobs.requires_grad and",
        "    if False and",
    ),
    "importance ratio fixed at one": (
        "divergences.py",
        "torch.exp(p - mu.detach()) * (p - q).detach()",
        "torch.exp(p - p.detach()) * (p - q).detach()",
    ),
    "log-ratio against the sampler": (
        "divergences.py",
        "torch.exp(p - mu.detach()) * (p - q).detach()",
        "torch.exp(p - mu.detach()) * (mu - q).detach()",
    ),
    "log1mexp branches swapped": (
        "divergences.py",
        "near_zero = x > -math.log(2)",
        "near_zero = x < -math.log(2)",
    ),
    "mass on the support not clamped": (
        "divergences.py",
        "log1mexp(torch.logsumexp(logprobs, dim=-1).clamp(max=MAX_LOG_MASS))",
        "log1mexp(torch.logsumexp(logprobs, dim=-1))",
    ),
    "0 log 0 is NaN": (
        "divergences.py",
        "    impossible = a == -math.inf\n",
        "    impossible = a == math.inf\n",
    ),
    "teacher keeps its gradient": (
        "divergences.py",
        "    p, q = upcast(student_logprobs), upcast(teacher_logprobs).detach()\n    if normalization not in",
        "    p, q = upcast(student_logprobs), upcast(teacher_logprobs)\n    if normalization not in",
    ),
    "bf16 computed in bf16": (
        "divergences.py",
        "    return logprobs.float() if",
        "    return logprobs if",
    ),
    # reductions and the contract
    "mean for sum": (
        "masked.py",
        "torch.where(mask, values, 0.0).sum()",
        "torch.where(mask, values, 0.0).mean()",
    ),
    "weights ignored": ("masked.py", "    if weights is not None:", "    if False:"),
    "mask ignored": ("masked.py", "torch.where(mask, values, 0.0).sum()", "values.sum()"),
    "student not masked before the exp": (
        "contract.py",
        "torch.where(rows, self.student_logprobs, fill)",
        "self.student_logprobs",
    ),
    # trust region
    "signed region reads the sign the wrong way": (
        "trust_region.py",
        "(signal > 0) & (probs_diff > delta_high)",
        "(signal < 0) & (probs_diff > delta_high)",
    ),
    "signed region has one width": (
        "trust_region.py",
        "(probs_diff < -delta_low)",
        "(probs_diff < -delta_high)",
    ),
    "policy-gradient weights ignored": (
        "trust_region.py",
        "    if inputs.loss_weights is not None:",
        "    if False:",
    ),
    "dropped ratio enters the backward": (
        "trust_region.py",
        "torch.exp(torch.where(keep, log_ratio, 0.0))",
        "torch.exp(log_ratio)",
    ),
    "squared log-ratio of kept tokens only": (
        "trust_region.py",
        "inputs.loss_mask * log_ratio**2",
        "keep * log_ratio**2",
    ),
    "trainer not masked before the exp": (
        "trust_region.py",
        "torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0)",
        "inputs.trainer_logprobs",
    ),
    # sampled reverse KL
    "v0.7 with a high side": (
        "losses/sampled_reverse_kl.py",
        "Region(high=torch.zeros_like(mask), low=too_low)",
        "Region(high=too_high, low=too_low)",
    ),
    "v0.6 zero advantage counted positive": (
        "losses/sampled_reverse_kl.py",
        "mask & (inputs.advantages > 0), mask",
        "mask & (inputs.advantages >= 0), mask",
    ),
    "signal against the sampler": (
        "losses/sampled_reverse_kl.py",
        "inputs.ref_logprobs - inputs.trainer_logprobs, 0.0)",
        "inputs.ref_logprobs - inputs.inference_logprobs, 0.0)",
    ),
    "clip bounds one side": (
        "losses/sampled_reverse_kl.py",
        "signal.clamp(-config.clip, config.clip)",
        "signal.clamp(max=config.clip)",
    ),
    "TOP-D floor without its weight": (
        "losses/sampled_reverse_kl.py",
        "torch.logaddexp(signal + math.log(config.top_d), floor)",
        "torch.maximum(signal, floor)",
    ),
    "vOPD baseline subtracted": (
        "losses/sampled_reverse_kl.py",
        "signal = signal + baseline",
        "signal = signal - baseline",
    ),
    # head and tail
    "head keeps the mass's gradient": (
        "losses/head_tail_reverse_kl.py",
        '"stop_gradient")',
        '"raw", allow_biased=True)',
    ),
    "tail counts the support again": (
        "losses/head_tail_reverse_kl.py",
        "outside = mask & ~(",
        "outside = mask & (",
    ),
    "tail without the ratio": (
        "losses/head_tail_reverse_kl.py",
        "weighted_k1(student, teacher, sampler)",
        "weighted_k1(student, teacher, student.detach())",
    ),
    # TAID
    "schedule takes the smaller branch": (
        "losses/taid.py",
        "max(linear, adaptive)",
        "min(linear, adaptive)",
    ),
    "schedule fixed": ("losses/taid.py", "        self.step += 1", "        self.step += 0"),
    "schedule momentum swapped": (
        "losses/taid.py",
        "config.beta * self.momentum + (1 - config.beta) * change",
        "(1 - config.beta) * self.momentum + config.beta * change",
    ),
    "schedule without its sigmoid": (
        "losses/taid.py",
        "config.alpha / (1 + math.exp(-max(self.momentum, -700.0)))",
        "config.alpha",
    ),
    "schedule forgets the previous loss": (
        "losses/taid.py",
        '"previous_loss": self.previous_loss',
        '"previous_loss": None',
    ),
    "schedule within a sum reads the sum": (
        "losses/base.py",
        "        if self._own_mean is not None:\n",
        "        if False:\n",
    ),
    # entropy-aware, self-distillation
    "forward KL where the teacher is sure": (
        "losses/entropy_aware_opd.py",
        "~(teacher_entropy <= config.tau)",
        "~(teacher_entropy > config.tau)",
    ),
    "entropy-aware switch instead of an addition": (
        "losses/entropy_aware_opd.py",
        "masked_sum(reverse, mask, inputs.loss_weights) + forward_sum",
        "masked_sum(reverse, mask & ~unsure, inputs.loss_weights) + forward_sum",
    ),
    "importance factor unbounded": (
        "losses/self_distillation.py",
        "ratio.clamp(max=bound) * per_token",
        "ratio * per_token",
    ),
    "teacher chooses for the student": (
        "losses/self_distillation.py",
        "support.student_logprobs.detach().topk",
        "support.teacher_logprobs.detach().topk",
    ),
    "one token too many skipped": (
        "losses/self_distillation.py",
        ">= config.skip_first)",
        "> config.skip_first)",
    ),
    # RL
    "zero advantage on the high side": (
        "losses/default.py",
        "mask & (advantages > 0)",
        "mask & (advantages >= 0)",
    ),
    "advantage temperature ignored": (
        "losses/default.py",
        "config.adv_tau * advantages",
        "advantages",
    ),
    "ipo one-sided": ("losses/ipo.py", "ratios.probs_diff.abs()", "ratios.probs_diff"),
    "sft weights ignored": (
        "losses/sft.py",
        "    if inputs.loss_weights is not None:",
        "    if False:",
    ),
    "sft mean for sum": ("losses/sft.py", "nll[mask].sum()", "nll[mask].mean()"),
    # preferences
    "dpo without its reference": (
        "losses/dpo.py",
        "pairs.sums(policy - reference)",
        "pairs.sums(policy)",
    ),
    "rejected preferred": ("losses/dpo.py", "(chosen - rejected)", "(rejected - chosen)"),
    "simpo by sums": ("losses/simpo.py", " / pairs.lengths.clamp(min=1)", ""),
    "half a pair trains": ("preferences.py", "(lengths > 0).all(0)", "(lengths > 0).any(0)"),
    "pair weight summed": ("preferences.py", "total / lengths.sum(0).clamp(min=1)", "total"),
    # modifiers
    "first occurrence of the pack": (
        "modifiers.py",
        "earlier == at_segment_start(earlier, inputs.segment_ids)",
        "earlier == earlier[..., :1]",
    ),
    "special tokens of the prompt use up the first": (
        "modifiers.py",
        "for i in self.ids]) & mask",
        "for i in self.ids])",
    ),
    "position prefix includes the token itself": (
        "modifiers.py",
        "before = gap.double().cumsum(0) - gap.double()",
        "before = gap.double().cumsum(0)",
    ),
    "position weights total over the pack": (
        "modifiers.py",
        "segment_totals(gap.double(), inputs.segment_ids)",
        "segment_totals(gap.double(), None)",
    ),
    # sums of losses
    "channel weight ignored": (
        "losses/compose.py",
        "state.weights[name] * outputs.loss",
        "outputs.loss",
    ),
    "channels of weight zero computed": (
        "losses/compose.py",
        "if channel.weight > 0}",
        "if channel.weight >= 0}",
    ),
    "mixture weights swapped": (
        "losses/base.py",
        "rl_weight * rl.loss + kd_weight * outputs.loss",
        "kd_weight * rl.loss + rl_weight * outputs.loss",
    ),
    "wider support taken whole": ("losses/base.py", "support.token_ids.shape[-1] <= k:", "True:"),
    "top percent of the whole pack": (
        "loss_metrics.py",
        "(mask.sum() * share)",
        "(len(mask) * torch.tensor(share))",
    ),
    "in-support part not weighted by the mass": (
        "loss_metrics.py",
        "torch.exp(log_p_mass) * (log_p_mass - log_q_mass)",
        "(log_p_mass - log_q_mass)",
    ),
}


def mutate(name: str, target: Path) -> None:
    """A copy of package and tests at ``target``, with the mutant in it."""
    for part in ("prime_composer", "tests"):
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    file, right, wrong = MUTANTS[name]
    path = target / "prime_composer" / file
    source = path.read_text()
    if source.count(right) != 1:
        raise SystemExit(
            f"mutant {name!r}: its text stands {source.count(right)} times in {file}, not once."
        )
    path.write_text(source.replace(right, wrong))


def killed_by(name: str) -> str | None:
    """The first test that fails on the mutant, or None."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch)
        mutate(name, target)
        # The mutant's own package, not the installed one; no bytecode, no hypothesis database.
        environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
        first = FIRST.get(MUTANTS[name][0], [])
        tests = sorted(
            TESTS,
            key=lambda test: (
                first.index(Path(test).stem) if Path(test).stem in first else len(first)
            ),
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        done = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+?::[^\s\[]+|\S+)", done.stdout, re.MULTILINE)
    if found is None or done.returncode not in (1, 2):
        raise SystemExit(f"mutant {name!r}: pytest did not run.\n{done.stdout}\n{done.stderr}")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to run; all of them by default")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    names = args.names or list(MUTANTS)
    recorded = (
        dict(line.rsplit(": ", 1) for line in RESULT.read_text().splitlines())
        if RESULT.exists()
        else {}
    )
    survivors = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, test in zip(names, pool.map(killed_by, names), strict=True):
            recorded[name] = test or "SURVIVED"
            print(f"{name}: {recorded[name]}", flush=True)
            if test is None:
                survivors.append(name)
            RESULT.write_text(
                "".join(f"{name}: {recorded[name]}\n" for name in MUTANTS if name in recorded)
            )
    print(f"{len(names) - len(survivors)} of {len(names)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
