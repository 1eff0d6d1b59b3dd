"""The mutants: small mistakes in the maths that the tests have to notice.

Each names a file below prime_composer/, a function, and what is replaced by what (see tree.py).
``TESTS`` says which test files have to notice a mistake in which file.
"""

from dataclasses import dataclass

from tests.mutation.tree import Edit

LOSSES = "tests/losses/"
TESTS = {
    "divergences.py": ["tests/test_divergences.py"],
    "contract.py": ["tests/test_contract.py"],
    "losses/shared/reductions.py": [
        LOSSES + "test_support_losses.py", LOSSES + "test_preferences.py"
    ],
    "losses/shared/trust_region.py": [
        LOSSES + "test_sampled_reverse_kl.py", LOSSES + "test_rl_losses.py",
        "tests/parity/test_recorded.py", "tests/test_contract.py",
    ],
    "losses/shared/metrics.py": [LOSSES + "test_support_losses.py"],
    "losses/shared/pairs.py": [LOSSES + "test_preferences.py"],
    "losses/shared/modifiers.py": [LOSSES + "test_modifiers.py"],
    "losses/sampled_reverse_kl.py": [
        LOSSES + "test_sampled_reverse_kl.py", "tests/parity/test_recorded.py"
    ],
    "losses/head_tail_reverse_kl.py": [LOSSES + "test_expectations.py"],
    "losses/taid.py": [LOSSES + "test_taid.py"],
    "losses/entropy_aware_opd.py": [LOSSES + "test_support_losses.py"],
    "losses/self_distillation.py": [LOSSES + "test_support_losses.py"],
    "losses/default.py": [LOSSES + "test_rl_losses.py", "tests/parity/test_recorded.py"],
    "losses/ipo.py": [LOSSES + "test_rl_losses.py", "tests/parity/test_recorded.py"],
    "losses/sft.py": [LOSSES + "test_rl_losses.py", "tests/parity/test_recorded.py"],
    "losses/dpo.py": [LOSSES + "test_preferences.py"],
    "losses/simpo.py": [LOSSES + "test_preferences.py"],
    "losses/compose.py": [LOSSES + "test_compose.py"],
    "losses/config.py": [LOSSES + "test_compose.py"],
    "losses/bound.py": [
        LOSSES + "test_compose.py", LOSSES + "test_taid.py", LOSSES + "test_support_losses.py"
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: path below prime_composer/.
        function: qualified name in that file.
        edits: what the mistake changes there, all at once.
        survives_because: why no test can notice it. Empty for a mutant that has to be killed.
    """

    file: str
    function: str
    edits: tuple[Edit, ...]
    survives_because: str = ""


def mutant(file: str, function: str, *edits: tuple[str, str]) -> Mutant:
    return Mutant(file, function, tuple(Edit(*edit) for edit in edits))


D = "divergences.py"
TAIL = ("p, q = with_tail(p), with_tail(q)", "pass")
REDUCTIONS = "losses/shared/reductions.py"
REGION = "losses/shared/trust_region.py"
MODIFIERS = "losses/shared/modifiers.py"
SAMPLED = "losses/sampled_reverse_kl.py"
HEAD_TAIL = "losses/head_tail_reverse_kl.py"
TAID, EOPD, SELF = "losses/taid.py", "losses/entropy_aware_opd.py", "losses/self_distillation.py"
RATIO = "torch.exp(p - mu.detach()) * (p - q).detach()"

MUTANTS: dict[str, Mutant] = {
    # divergences
    "reverse tail dropped": mutant(D, "reverse_kl", TAIL),
    "forward tail dropped": mutant(D, "forward_kl", TAIL),
    "reverse renorm is forward": mutant(
        D, "reverse_kl",
        ("kl_terms(renormalized(p), renormalized(q))",
         "kl_terms(renormalized(q), renormalized(p))"),
    ),
    "renorm renormalizes the student only": mutant(
        D, "reverse_kl",
        ("kl_terms(renormalized(p), renormalized(q))", "kl_terms(renormalized(p), q)"),
    ),
    "generalised correction has the wrong sign": mutant(
        D, "reverse_kl",
        ("kl_terms(p, q) - torch.exp(p) + torch.exp(q)",
         "kl_terms(p, q) + torch.exp(p) - torch.exp(q)"),
    ),
    "generalised correction forgotten": mutant(
        D, "forward_kl", ("kl_terms(q, p) - torch.exp(q) + torch.exp(p)", "kl_terms(q, p)")
    ),
    "stop-gradient removed": mutant(
        D, "reverse_kl", ("torch.where(_C, 0.0, p - q).detach()", "torch.where(_C, 0.0, p - q)")
    ),
    "raw allowed in silence": mutant(D, "_refuse_biased", ("not allow_biased", "False")),
    "jsd mixture fixed at one half": mutant(
        D, "generalized_jsd",
        ("torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))",
         "torch.logaddexp(p + math.log(0.5), q + math.log(0.5))"),
    ),
    "jsd beta swapped in the mixture": mutant(
        D, "generalized_jsd",
        ("torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))",
         "torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))"),
    ),
    "jsd coefficients swapped": mutant(
        D, "generalized_jsd",
        ("beta * kl_terms(q, m) + (1 - beta) * kl_terms(p, m)",
         "(1 - beta) * kl_terms(q, m) + beta * kl_terms(p, m)"),
    ),
    "jsd labels of the ends swapped": mutant(
        D, "generalized_jsd", ("beta == 0", "beta == 1"), ("beta == 1", "beta == 0")
    ),
    "jsd of two impossible tokens is NaN": mutant(
        D, "generalized_jsd",
        ("(p == -math.inf) & (q == -math.inf)", "torch.zeros_like(p, dtype=torch.bool)"),
    ),
    "taid mixes probabilities": mutant(
        D, "taid_target",
        ("torch.log_softmax((1 - t) * p + t * q, dim=-1)",
         "torch.log((1 - t) * p.exp() + t * q.exp())"),
    ),
    "taid anchor keeps its gradient": mutant(
        D, "taid_target", ("student_logprobs.detach()", "student_logprobs")
    ),
    "taid t swapped": mutant(
        D, "taid_target", ("(1 - t) * p + t * q", "t * p + (1 - t) * q")
    ),
    "k3 without its linear term": mutant(D, "k3", ("torch.expm1(_D) - _D", "torch.expm1(_D)")),
    "k1 backpropagated in silence": mutant(
        D, "k1", ("student_logprobs.requires_grad and torch.is_grad_enabled()", "False")
    ),
    "importance ratio fixed at one": mutant(
        D, "weighted_k1", (RATIO, "torch.exp(p - p.detach()) * (p - q).detach()")
    ),
    "log-ratio against the sampler": mutant(
        D, "weighted_k1", (RATIO, "torch.exp(p - mu.detach()) * (mu - q).detach()")
    ),
    "log1mexp branches swapped": mutant(
        D, "log1mexp", ("x > -math.log(2)", "x < -math.log(2)")
    ),
    "mass on the support not clamped": mutant(
        D, "log_tail_mass", ("_M.clamp(max=MAX_LOG_MASS)", "_M")
    ),
    "0 log 0 is NaN": mutant(D, "kl_terms", ("a == -math.inf", "a == math.inf")),
    "teacher keeps its gradient": mutant(
        D, "reverse_kl", ("upcast(teacher_logprobs).detach()", "upcast(teacher_logprobs)")
    ),
    "bf16 computed in bf16": mutant(D, "upcast", ("logprobs.float()", "logprobs")),
    # reductions and the contract
    "mean for sum": mutant(
        REDUCTIONS, "masked_sum",
        ("torch.where(_M, _V, 0.0).sum()", "torch.where(_M, _V, 0.0).mean()"),
    ),
    "weights ignored": mutant(REDUCTIONS, "masked_sum", ("weights is not None", "False")),
    "mask ignored": mutant(
        REDUCTIONS, "masked_sum", ("torch.where(_M, _V, 0.0).sum()", "_V.sum()")
    ),
    "student not masked before the exp": mutant(
        "contract.py", "Support.masked",
        ("torch.where(_R, self.student_logprobs, _F)", "self.student_logprobs"),
    ),
    # trust region
    "signed region reads the sign the wrong way": mutant(
        REGION, "signed_region",
        ("signal > 0", "signal < 0"),
    ),
    "signed region has one width": mutant(
        REGION, "signed_region", ("probs_diff < -delta_low", "probs_diff < -delta_high")
    ),
    "policy-gradient weights ignored": mutant(
        REGION, "policy_gradient_sum", ("inputs.loss_weights is not None", "False")
    ),
    "dropped ratio enters the backward": mutant(
        REGION, "policy_gradient_sum",
        ("torch.exp(torch.where(keep, log_ratio, 0.0))", "torch.exp(log_ratio)"),
    ),
    "squared log-ratio of kept tokens only": mutant(
        REGION, "policy_gradient_sum",
        ("inputs.loss_mask * log_ratio ** 2", "keep * log_ratio ** 2"),
    ),
    "trainer not masked before the exp": mutant(
        REGION, "importance_ratios",
        ("torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0)", "inputs.trainer_logprobs"),
    ),
    # sampled reverse KL
    "v0.7 with a high side": mutant(
        SAMPLED, "_prime_rl",
        ("Region(high=torch.zeros_like(mask), low=too_low)", "Region(high=too_high, low=too_low)"),
    ),
    "v0.6 zero advantage counted positive": mutant(
        SAMPLED, "_prime_rl", ("advantages > 0", "advantages >= 0")
    ),
    "signal against the sampler": mutant(
        SAMPLED, "sampled_reverse_kl_loss_fn",
        ("_Q - inputs.trainer_logprobs", "_Q - inputs.inference_logprobs"),
    ),
    "clip bounds one side": mutant(
        SAMPLED, "_signed",
        ("signal.clamp(-config.clip, config.clip)", "signal.clamp(max=config.clip)"),
    ),
    "TOP-D floor without its weight": mutant(
        SAMPLED, "_signed",
        ("torch.logaddexp(signal + math.log(config.top_d), floor)", "torch.maximum(signal, floor)"),
    ),
    "vOPD baseline subtracted": mutant(
        SAMPLED, "_signed", ("signal + baseline", "signal - baseline")
    ),
    # head and tail
    "head keeps the mass's gradient": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn",
        ("reverse_kl(_P, _Q, 'stop_gradient')", "reverse_kl(_P, _Q, 'raw', allow_biased=True)"),
    ),
    "tail counts the support again": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn", ("mask & ~_Inside", "mask & _Inside")
    ),
    "tail without the ratio": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn",
        ("weighted_k1(_P, _Q, _Mu)", "weighted_k1(_P, _Q, _P.detach())"),
    ),
    # TAID
    "schedule takes the smaller branch": mutant(
        TAID, "TAIDScheduler.end_step", ("max(linear, adaptive)", "min(linear, adaptive)")
    ),
    "schedule fixed": mutant(
        TAID, "TAIDScheduler.end_step", ("self.step += 1", "self.step += 0")
    ),
    "schedule momentum swapped": mutant(
        TAID, "TAIDScheduler.end_step",
        ("config.beta * self.momentum + (1 - config.beta) * change",
         "(1 - config.beta) * self.momentum + config.beta * change"),
    ),
    "schedule without its sigmoid": mutant(
        TAID, "TAIDScheduler.end_step", ("config.alpha / (1 + math.exp(_X))", "config.alpha")
    ),
    "schedule forgets the previous loss": mutant(
        TAID, "TAIDScheduler.state_dict", ("self.previous_loss", "None")
    ),
    "schedule within a sum reads the sum": mutant(
        "losses/bound.py", "WeightedSum.end_step", ("term.objective.end_step()", "None")
    ),
    # entropy-aware, self-distillation
    "forward KL where the teacher is sure": mutant(
        EOPD, "entropy_aware_opd_loss_fn",
        ("~(teacher_entropy <= config.tau)", "~(teacher_entropy > config.tau)"),
    ),
    "entropy-aware switch instead of an addition": mutant(
        EOPD, "entropy_aware_opd_loss_fn",
        ("masked_sum(reverse, mask, inputs.loss_weights) + forward_sum",
         "masked_sum(reverse, mask & ~unsure, inputs.loss_weights) + forward_sum"),
    ),
    "importance factor unbounded": mutant(
        SELF, "self_distillation_loss_fn",
        ("ratio.clamp(max=bound) * per_token", "ratio * per_token"),
    ),
    "teacher chooses for the student": mutant(
        SELF, "_chosen", ("support.student_logprobs.detach()", "support.teacher_logprobs.detach()")
    ),
    "one token too many skipped": mutant(
        SELF, "self_distillation_loss_fn", ("_T >= config.skip_first", "_T > config.skip_first")
    ),
    # RL
    "zero advantage on the high side": mutant(
        "losses/default.py", "default_loss_fn", ("advantages > 0", "advantages >= 0")
    ),
    "advantage temperature ignored": mutant(
        "losses/default.py", "default_loss_fn", ("config.adv_tau * advantages", "advantages")
    ),
    "ipo one-sided": mutant(
        "losses/ipo.py", "ipo_loss_fn", ("ratios.probs_diff.abs()", "ratios.probs_diff")
    ),
    "sft weights ignored": mutant(
        "losses/sft.py", "sft_loss_fn", ("inputs.loss_weights is not None", "False")
    ),
    "sft mean for sum": mutant(
        "losses/sft.py", "sft_loss_fn", ("_N[mask].sum()", "_N[mask].mean()")
    ),
    # preferences
    "dpo without its reference": mutant(
        "losses/dpo.py", "dpo_loss_fn",
        ("pairs.sums(policy - reference)", "pairs.sums(policy)"),
    ),
    "rejected preferred": mutant(
        "losses/dpo.py", "dpo_loss_fn", ("chosen - rejected", "rejected - chosen")
    ),
    "simpo by sums": mutant(
        "losses/simpo.py", "simpo_loss_fn",
        ("pairs.sums(policy) / pairs.lengths.clamp(min=1)", "pairs.sums(policy)"),
    ),
    "half a pair trains": mutant(
        "losses/shared/pairs.py", "pairs_of", ("(lengths > 0).all(0)", "(lengths > 0).any(0)")
    ),
    "pair weight summed": mutant(
        "losses/shared/pairs.py", "pairs_of", ("total / lengths.sum(0).clamp(min=1)", "total")
    ),
    # modifiers
    "first occurrence of the pack": mutant(
        MODIFIERS, "SpecialTokenMask.apply",
        ("earlier == at_segment_start(earlier, inputs.segment_ids)", "earlier == earlier[..., :1]"),
    ),
    "special tokens of the prompt use up the first": mutant(
        MODIFIERS, "SpecialTokenMask.apply", ("torch.stack(_S) & mask", "torch.stack(_S)")
    ),
    "position prefix includes the token itself": mutant(
        MODIFIERS, "PositionWeights.apply",
        ("gap.double().cumsum(0) - gap.double()", "gap.double().cumsum(0)"),
    ),
    "position weights total over the pack": mutant(
        MODIFIERS, "PositionWeights.apply",
        ("segment_totals(gap.double(), inputs.segment_ids)", "segment_totals(gap.double(), None)"),
    ),
    # sums of losses
    "channel weight ignored": mutant(
        "losses/bound.py", "WeightedSum.__call__", ("term.weight * outputs.loss", "outputs.loss")
    ),
    "channels of weight zero computed": mutant(
        "losses/compose.py", "ComposeLossConfig.parts",
        ("channel.weight > 0", "channel.weight >= 0"),
    ),
    "mixture weights swapped": mutant(
        "losses/bound.py", "_bind",
        ("Term(kd_objective, kd_weight)", "Term(kd_objective, rl_weight)"),
        ("Term(rl_objective, rl_weight)", "Term(rl_objective, kd_weight)"),
    ),
    "wider support taken whole": mutant(
        "losses/bound.py", "_first_k", ("support.token_ids.shape[-1] <= k", "True")
    ),
    # metrics
    "top percent of the whole pack": mutant(
        "losses/shared/metrics.py", "top_share",
        ("mask.sum() * share", "len(mask) * torch.tensor(share)"),
    ),
    "in-support part not weighted by the mass": mutant(
        "losses/shared/metrics.py", "support_metrics",
        ("torch.exp(log_p_mass) * (log_p_mass - log_q_mass)", "log_p_mass - log_q_mass"),
    ),
}  # fmt: skip
