"""The mutants: small mistakes in the maths that the tests have to notice.

Each names a file below prime_composer/, a function, and what is replaced by what (see tree.py).
``TESTS`` says which test files have to notice a mistake in which file.
"""

from dataclasses import dataclass

from tests.mutation.tree import Edit

LOSSES = "tests/losses/"
ROWS_READ = "tests/teachers/test_rows_read.py"
OWN_TOKENIZER = [
    "tests/cross_tokenizer/test_supports.py",
    "tests/cross_tokenizer/test_target.py",
    ROWS_READ,
]
TESTS = {
    "divergences/base.py": ["tests/test_divergences.py"],
    "divergences/kl.py": ["tests/test_divergences.py"],
    "divergences/estimators.py": ["tests/test_divergences.py"],
    "divergences/alpha_beta.py": ["tests/test_divergences.py"],
    "divergences/skewed.py": ["tests/test_divergences.py"],
    "lm_head.py": ["tests/test_lm_head.py"],
    "full_vocabulary/blocks.py": ["tests/test_contract.py", "tests/test_full_vocabulary.py"],
    "full_vocabulary/compare.py": [
        "tests/test_full_vocabulary.py", LOSSES + "test_support_losses.py"
    ],
    "full_vocabulary/kernel.py": ["tests/test_full_vocabulary.py"],
    "full_vocabulary/token_blocks.py": ["tests/test_full_vocabulary.py"],
    "full_vocabulary/heads.py": ["tests/test_full_vocabulary.py"],
    "full_vocabulary/sums.py": ["tests/test_full_vocabulary.py"],
    "contract.py": ["tests/test_contract.py", LOSSES + "test_support_losses.py"],
    "losses/shared/reductions.py": [LOSSES + "test_support_losses.py"],
    "losses/shared/trust_region.py": [
        LOSSES + "test_policy_gradients.py",
        "tests/parity/test_recorded.py", "tests/test_contract.py",
        "tests/parity/test_read.py",
    ],
    "losses/shared/support_divergence.py": [LOSSES + "test_support_losses.py"],
    "losses/shared/metrics.py": [
        LOSSES + "test_support_losses.py",
        LOSSES + "test_distillation_kl.py",
    ],
    "losses/shared/modifiers.py": [LOSSES + "test_modifiers.py"],
    **dict.fromkeys(("step/collapse.py", "step/overflow.py"), ["tests/step/test_collapse.py"]),
    "losses/shared/balance.py": [LOSSES + "test_balance.py"],
    "step/balance.py": ["tests/step/test_balance.py"],
    "local/watch_metrics.py": ["tests/local/test_checks_of_steps.py"],
    **dict.fromkeys(
        ("backends/lora/views.py", "backends/lora/adapter.py", "local/weight_sync.py"),
        ["tests/backends/test_lora.py"],
    ),
    "local/ahead.py": ["tests/local/test_ahead.py"],
    "recipe/watchers.py": ["tests/recipe/test_until.py"],
    **dict.fromkeys(("recipe/diloco.py", "recipe/rules.py"), ["tests/recipe/test_rules.py"]),
    "local/collect.py": ["tests/local/test_collect.py"],
    "local/islands/island.py": ["tests/islands/test_faults.py"],
    "local/islands/outer.py": ["tests/islands/test_island.py"],
    "losses/policy_gradients.py": [
        LOSSES + "test_policy_gradients.py", "tests/parity/test_recorded.py"
    ],
    "losses/head_tail_reverse_kl.py": [LOSSES + "test_expectations.py"],
    "losses/taid.py": [LOSSES + "test_taid.py"],
    "losses/entropy_aware_opd.py": [LOSSES + "test_support_losses.py"],
    "losses/self_distillation.py": [LOSSES + "test_support_losses.py"],
    "teachers/mixture.py": ["tests/teachers/test_mixture.py"],
    "teachers/policy.py": ["tests/teachers/test_policy_teacher.py"],
    "losses/sft.py": [LOSSES + "test_policy_gradients.py", "tests/parity/test_recorded.py"],
    "losses/compose.py": [LOSSES + "test_compose.py"],
    "losses/config.py": [LOSSES + "test_compose.py"],
    "environments/episodes.py": ["tests/environments/test_episodes.py"],
    "cross_tokenizer/plan.py": OWN_TOKENIZER,
    "cross_tokenizer/sums.py": OWN_TOKENIZER,
    "cross_tokenizer/finish.py": OWN_TOKENIZER,
    "teachers/own_tokenizer.py": ["tests/teachers/test_own_tokenizer.py", ROWS_READ],
    "backends/alignment.py": ["tests/scoring/test_trained_rows.py"],
    "scoring/worker.py": ["tests/scoring/test_kinds.py"],
    "upstream/orchestrator/messages.py": ["tests/upstream/test_own_tokenizer.py"],
    "upstream/trainer/adapter.py": ["tests/upstream/test_silent_hooks.py"],
    "upstream/trainer/batches.py": [
        "tests/upstream/test_registration.py", "tests/upstream/test_silent_hooks.py"
    ],
    "upstream/trainer/binding.py": [
        "tests/upstream/test_registration.py", "tests/upstream/test_silent_hooks.py"
    ],
    "upstream/trainer/hooks.py": ["tests/upstream/test_silent_hooks.py"],
    "upstream/plain_launcher.py": ["tests/upstream/test_silent_hooks.py"],
    "upstream/orchestrator/hooks.py": ["tests/upstream/test_orchestrator.py"],
    **dict.fromkeys(
        ("teachers/tape/answers.py", "teachers/tape/scorer.py"), ["tests/teachers/test_tape.py"]
    ),
    "teachers/tape/store.py": ["tests/teachers/test_tape_store.py", "tests/teachers/test_tape.py"],
    "losses/bound.py": [
        LOSSES + "test_compose.py", LOSSES + "test_taid.py", LOSSES + "test_support_losses.py"
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    file: str  # path below prime_composer/
    function: str  # qualified name in that file
    edits: tuple[Edit, ...]  # what the mistake changes there, all at once
    # why no test can notice it. Empty for a mutant that has to be killed.
    survives_because: str = ""


def mutant(file: str, function: str, *edits: tuple[str, str]) -> Mutant:
    return Mutant(file, function, tuple(Edit(*edit) for edit in edits))


TAPE_ANSWERS, TAPE_SCORER = "teachers/tape/answers.py", "teachers/tape/scorer.py"
TAPE_STORE = "teachers/tape/store.py"
BASE, KL = "divergences/base.py", "divergences/kl.py"
ESTIMATORS, AB = "divergences/estimators.py", "divergences/alpha_beta.py"
SKEWED = "divergences/skewed.py"
REDUCTIONS = "losses/shared/reductions.py"
REGION = "losses/shared/trust_region.py"
MODIFIERS = "losses/shared/modifiers.py"
COLLAPSE = "step/collapse.py"
BALANCE = "losses/shared/balance.py"
GRADIENTS = "losses/policy_gradients.py"
HEAD_TAIL = "losses/head_tail_reverse_kl.py"
TAID, EOPD, SELF = "losses/taid.py", "losses/entropy_aware_opd.py", "losses/self_distillation.py"
EPISODES = "environments/episodes.py"
ADAPTER, ORCHESTRATOR = "upstream/trainer/adapter.py", "upstream/orchestrator/hooks.py"
BINDING = "upstream/trainer/binding.py"
FINISH, SUMS = "cross_tokenizer/finish.py", "cross_tokenizer/sums.py"
PLAN, TURNS = "cross_tokenizer/plan.py", "upstream/orchestrator/messages.py"
VIEWS, LORA = "backends/lora/views.py", "backends/lora/adapter.py"
RATIO = "torch.exp(p - mu.detach()) * (p - q).detach()"

AHEAD = "local/ahead.py"
MUTANTS: dict[str, Mutant] = {
    # divergences
    "tail dropped": mutant(BASE, "outcomes", ("with_tail(p), with_tail(q)", "p, q")),
    "reverse kl is forward": mutant(
        KL, "reverse_kl", ("kl_terms(p, q).sum(-1)", "kl_terms(q, p).sum(-1)")
    ),
    "renorm renormalizes the student only": mutant(
        BASE, "outcomes", ("renormalized(p), renormalized(q)", "renormalized(p), q")
    ),
    "generalised correction has the wrong sign": mutant(
        KL, "reverse_kl",
        ("kl_terms(p, q) - torch.exp(p) + torch.exp(q)",
         "kl_terms(p, q) + torch.exp(p) - torch.exp(q)"),
    ),
    "generalised correction forgotten": mutant(
        KL, "forward_kl", ("kl_terms(q, p) - torch.exp(q) + torch.exp(p)", "kl_terms(q, p)")
    ),
    "jsd mixture fixed at one half": mutant(
        KL, "generalized_jsd",
        ("(p_share + q_share).log_()", "((log_p.exp() + log_q.exp()) / 2).log_()"),
    ),
    "jsd beta swapped in the mixture": mutant(
        KL, "generalized_jsd",
        ("(p_share + q_share).log_()",
         "(beta * log_p.exp() + (1 - beta) * log_q.exp()).log_()"),
    ),
    "jsd of two impossible tokens is NaN": mutant(
        KL, "generalized_jsd",
        ("(p_share + q_share).log_().clamp_(min=LEAST)", "(p_share + q_share).log_()"),
    ),
    "taid mixes probabilities": mutant(
        KL, "taid_target",
        ("torch.log_softmax((1 - t) * p + t * q, dim=-1)",
         "torch.log((1 - t) * p.exp() + t * q.exp())"),
    ),
    "taid anchor keeps its gradient": mutant(
        KL, "taid_target", ("student_logprobs.detach()", "student_logprobs")
    ),
    "k3 without its linear term": mutant(
        ESTIMATORS, "k3", ("torch.expm1(_D) - _D", "torch.expm1(_D)")
    ),
    "k1 backpropagated in silence": mutant(
        ESTIMATORS, "k1", ("student_logprobs.requires_grad and torch.is_grad_enabled()", "False")
    ),
    "importance ratio fixed at one": mutant(
        ESTIMATORS, "weighted_k1", (RATIO, "torch.exp(p - p.detach()) * (p - q).detach()")
    ),
    "log-ratio against the sampler": mutant(
        ESTIMATORS, "weighted_k1", (RATIO, "torch.exp(p - mu.detach()) * (mu - q).detach()")
    ),
    "log1mexp branches swapped": mutant(
        BASE, "log1mexp", ("x > -math.log(2)", "x < -math.log(2)")
    ),
    "mass on the support not clamped": mutant(
        BASE, "log_tail_mass", ("_M.clamp(max=MAX_LOG_MASS)", "_M")
    ),
    "0 log 0 is NaN": mutant(BASE, "kl_terms", ("a == -math.inf", "a == math.inf")),
    "teacher keeps its gradient": mutant(
        BASE, "outcomes", ("upcast(teacher_logprobs).detach()", "upcast(teacher_logprobs)")
    ),
    "bf16 computed in bf16": mutant(BASE, "upcast", ("logprobs.float()", "logprobs")),
    # recent divergences
    "alpha-beta exponents swapped": mutant(
        AB, "alpha_beta_divergence",
        ("_alpha_beta_terms(p.detach(), q, alpha, beta)",
         "_alpha_beta_terms(p.detach(), q, beta, alpha)"),
    ),
    "alpha-beta far branch for close arguments": mutant(
        AB, "_alpha_beta_terms", ("gap.abs() * width < 1", "gap.abs() * width < 0")
    ),
    "alpha-beta series off its center": mutant(
        AB, "_alpha_beta_terms", ("(low + middle + high) / 3", "middle")
    ),
    "alpha-beta derivative with the other exponent": mutant(
        AB, "_alpha_beta_terms",
        ("-_difference(total * log_p, beta * log_p + alpha * log_q, alpha, gap)",
         "-_difference(total * log_p, beta * log_p + alpha * log_q, beta, gap)"),
    ),
    "alpha-beta of an impossible token is 0": mutant(
        AB, "_alpha_beta_terms",
        ("torch.where(no_p, without_p, torch.where(no_q, without_q, values))", "values"),
    ),
    "total variation without its half": mutant(
        AB, "total_variation", ("(torch.exp(p) - torch.exp(q)).abs().sum(-1) / 2",
                                "(torch.exp(p) - torch.exp(q)).abs().sum(-1)"),
    ),
    "total variation without the absolute value": mutant(
        AB, "total_variation", ("(torch.exp(p) - torch.exp(q)).abs().sum(-1) / 2",
                                "(torch.exp(p) - torch.exp(q)).sum(-1) / 2"),
    ),
    "skewed forward mixes the other way": mutant(
        SKEWED, "skewed_forward_kl", ("_mixture(log_p, q, skew)", "_mixture(q, log_p, skew)")
    ),
    "skewed forward clamps its ratio early": mutant(
        SKEWED, "skewed_forward_kl",
        ("(log_p - q).clamp(max=80.0)", "(log_p - q).clamp(max=1.0)"),
    ),
    "skewed forward derivative of one factor": mutant(
        SKEWED, "skewed_forward_kl",
        ("(1 - skew) ** 2 * torch.exp(log_p - m)", "(1 - skew) * torch.exp(log_p - m)"),
    ),
    "skewed reverse mixes the other way": mutant(
        SKEWED, "skewed_reverse_kl", ("_mixture(q, log_p, skew)", "_mixture(log_p, q, skew)")
    ),
    "skewed reverse holds the mixture fixed": mutant(
        SKEWED, "skewed_reverse_kl",
        ("probs * ((1 - skew) * u - excess(u))", "probs * u"),
        ("probs * (log_ratio + skew - torch.exp(log_ratio + math.log(skew)))",
         "probs * log_ratio"),
    ),
    "skewed reverse derivative cancels": mutant(
        SKEWED, "skewed_reverse_kl", ("(1 - skew) * u - excess(u)", "u - excess(u)")
    ),
    "skewed reverse without its correction": mutant(
        SKEWED, "skewed_reverse_kl",
        ("kl_terms(log_p, m) + (1 - skew) * difference", "kl_terms(log_p, m)"),
    ),
    "skew of one allowed": mutant(SKEWED, "refuse_skew", ("0 <= skew < 1", "0 <= skew <= 1")),
    "todi weights keep their gradient": mutant(
        "divergences/kl.py", "todi",
        ("torch.where(p == q, 0.0, q - p).detach()", "torch.where(p == q, 0.0, q - p)"),
    ),
    "todi weights swapped": mutant(
        "divergences/kl.py", "todi",
        ("forward * kl_terms(q, p) + reverse * kl_terms(p, q)",
         "reverse * kl_terms(q, p) + forward * kl_terms(p, q)"),
    ),
    "todi of two impossible tokens is NaN": mutant(
        "divergences/kl.py", "todi", ("torch.where(p == q, 0.0, q - p)", "q - p")
    ),
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
        ("torch.where(_R, student, _F)", "student"),
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
        REGION, "policy_gradient_sum", ("inputs.loss_weights", "None")
    ),
    "capped ratio without a gradient": mutant(
        REGION, "capped_ratio", ("log_ratio.detach()", "log_ratio")
    ),
    "dropped ratio enters the backward": mutant(
        REGION, "policy_gradient_sum",
        ("torch.where(keep, log_ratio, 0.0)", "log_ratio"),
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
        GRADIENTS, "_prime_rl",
        ('(signal, too_low, {"ref_kl": _M})', '(signal, too_high | too_low, {"ref_kl": _M})'),
    ),
    "v0.6 zero advantage counted positive": mutant(
        GRADIENTS, "_prime_rl", ("advantages > 0", "advantages >= 0")
    ),
    "signal against the sampler": mutant(
        GRADIENTS, "sampled_reverse_kl_loss_fn",
        ("_Q - inputs.own_logprobs", "_Q - inputs.inference_logprobs"),
    ),
    "clip bounds one side": mutant(
        GRADIENTS, "_signed",
        ("signal.clamp(-config.clip, config.clip)", "signal.clamp(max=config.clip)"),
    ),
    # head and tail
    "head keeps the mass's gradient": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn",
        ("torch.where(_C, 0.0, p - q).detach()", "torch.where(_C, 0.0, p - q)"),
    ),
    "tail counts the support again": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn", ("mask & ~_Inside", "mask & _Inside")
    ),
    "event's ratio not taken out": mutant(
        HEAD_TAIL, "head_tail_reverse_kl_loss_fn",
        ("teacher + p_outside - q_outside", "teacher + p_outside"),
    ),
    # TAID
    "schedule takes the smaller branch": mutant(
        TAID, "TAIDScheduler.end_step", ("max(linear, adaptive)", "min(linear, adaptive)")
    ),
    "schedule fixed": mutant(
        TAID, "TAIDScheduler.end_step", ("self.step += 1", "self.step += 0")
    ),
    "schedule forgets the previous loss": mutant(
        TAID, "TAIDScheduler.state_dict", ("self.previous_loss", "None")
    ),
    "schedule within a sum reads the sum": mutant(
        "losses/bound.py", "Objective.end_step", ("objective.end_step()", "None")
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
        "losses/bound.py", "_requested",
        ("support.student_logprobs.detach()", "support.teacher_logprobs.detach()"),
    ),
    "one token too many skipped": mutant(
        SELF, "self_distillation_loss_fn", ("_T >= config.skip_first", "_T > config.skip_first")
    ),
    # RL
    "zero advantage on the high side": mutant(
        GRADIENTS, "default_loss_fn", ("advantages > 0", "advantages >= 0")
    ),
    "advantage temperature ignored": mutant(
        GRADIENTS, "default_loss_fn", ("config.adv_tau * advantages", "advantages")
    ),
    "ipo one-sided": mutant(
        GRADIENTS, "ipo_loss_fn", ("ratios.probs_diff.abs()", "ratios.probs_diff")
    ),
    "sft weights ignored": mutant(
        "losses/sft.py", "sft_loss_fn", ("inputs.loss_weights is not None", "False")
    ),
    "sft mean for sum": mutant(
        "losses/sft.py", "sft_loss_fn", ("_N[mask].sum()", "_N[mask].mean()")
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
    "loss that sees another one's support": mutant(
        "losses/bound.py", "_requested", ("support is None or request is None", "support is None")
    ),
    "balance by environment divides by sequences": mutant(
        BALANCE, "Balance._divisor", (
            '{"token": 1, "sequence": of_sequence, "environment": of_environment}',
            '{"token": 1, "sequence": of_sequence, "environment": of_sequence}',
        ),
    ),
    "balance without the environments' weights": mutant(
        BALANCE, "Balance.of_sequences", ("self.weights.get(name, 1.0)", "1.0")
    ),
    "balance whose weights do not add up": mutant(
        BALANCE, "Balance.of_sequences", ("weight * sum(tokens) / total", "weight")
    ),
    "balance in place of other weights": mutant(
        BALANCE, "Balance.apply", ("weights * inputs.loss_weights", "weights")
    ),
    "distillation/kl of given answers": mutant(
        "losses/shared/metrics.py", "distillation_kl", (
            "inputs.loss_mask & ~inputs.inference_logprobs.isnan()", "inputs.loss_mask",
        ),
    ),
    "distillation/kl that counts the sampled token twice": mutant(
        "losses/shared/metrics.py", "distillation_kl", ("torch.where(within, 0.0, kl)", "kl")
    ),
    # a student that collapses
    "repetition across what does not train": mutant(
        COLLAPSE, "repeated_tokens", ("_T[last]", "_T[trained]")
    ),
    "repetition without its earliest tokens": mutant(
        COLLAPSE, "repeated_tokens", ("differs[-1]", "differs[0]")
    ),
    "ends of cut answers": mutant(
        COLLAPSE, "end_metrics", ('sample.rollout.finish_reason == "stop"', "True")
    ),
    "entropy of given answers": mutant(
        COLLAPSE, "collapse_metrics", ("is_own(sample)", "True")
    ),
    "collapse that recovered goes on": mutant(
        "local/watch_metrics.py", "CollapseCheck.add", ("self.since.pop(name, None)", "pass")
    ),
    "collapse ended by one good step": mutant(
        "local/watch_metrics.py", "CollapseCheck.add",
        ("self.within[name] >= self.config.steps", "True"),
    ),
    "ahead: one step more": mutant(
        AHEAD, "Ahead.take", ("step + self._steps", "step + self._steps + 1")
    ),
    "ahead: one step less": mutant(
        AHEAD, "Ahead.take", ("step + self._steps", "step + self._steps - 1")
    ),
    "ahead: stale by one step less": mutant(
        AHEAD, "Ahead._run", ("step - 1 - weights.step", "step - 2 - weights.step")
    ),
    "ahead: weights that still train": mutant(
        AHEAD, "Ahead._weights_after", ("copy.deepcopy(self._model)", "self._model")
    ),
    "plateau from the last of equal values": mutant(
        "recipe/watchers.py", "UntilConfig.best",
        ("(values[index][1], -index)", "(values[index][1], index)"),
    ),
    "plateau one evaluation longer": mutant(
        "recipe/watchers.py", "UntilConfig.best",
        ("len(values) - 1 - place >= self.plateau", "len(values) - 1 - place > self.plateau"),
    ),
    "islands: the same batch on each": mutant(
        "local/collect.py", "Collector.undivided",
        ("(step - 1) * islands + index + 1", "(step - 1) * islands + 1"),
    ),
    "islands: half of them are a majority": mutant(
        "recipe/diloco.py", "DilocoConfig.fewest", ("self.replicas // 2 + 1", "self.replicas // 2")
    ),
    "islands: a step that is no multiple either": mutant(
        "recipe/rules.py", "of_steps_of_islands",
        ("steps + islands.every - steps % islands.every", "steps + islands.every"),
    ),
    "islands: oldest step that all have": mutant(
        "local/islands/island.py", "Island.join", ("max(common)", "min(common)")
    ),
    "islands: newest step that one has": mutant(
        "local/islands/island.py", "Island.join",
        ("set(starts).intersection(*everyone.values())", "set(starts)"),
    ),
    "islands: momentum that looks back": mutant(
        "local/islands/outer.py", "OuterSteps.__init__", ("momentum > 0", "False")
    ),
    "cut answers with an end": mutant(
        "step/overflow.py", "head_of", ("'length'", "rollout.finish_reason")
    ),
    "end by extrapolated scores": mutant(
        COLLAPSE, "end_metrics", ("ends and of_teacher", "ends")
    ),
    # a reference model
    "extrapolation toward the reference": mutant(
        "teachers/mixture.py", "extrapolate",
        ("scale * log_q + (1 - scale) * log_r", "(1 - scale) * log_q + scale * log_r"),
    ),
    "extrapolation away from both": mutant(
        "teachers/mixture.py", "extrapolate",
        ("scale * log_q + (1 - scale) * log_r", "scale * log_q - (1 - scale) * log_r"),
    ),
    "impossible for both is not a number": mutant(
        "teachers/mixture.py", "extrapolate",
        ("torch.where(log_q == log_r, log_q, extrapolated)", "extrapolated"),
    ),
    "a rollout is its own hint": mutant(
        "teachers/policy.py", "_others_of_group", ("other is not sample", "True")
    ),
    # sums of losses
    "channel weight ignored": mutant(
        "losses/bound.py", "Objective._sum",
        ("term.weight * outputs.loss", "outputs.loss"),
    ),
    "channels of weight zero computed": mutant(
        "losses/compose.py", "ComposeLossConfig.channels",
        ("channel.weight > 0", "channel.weight >= 0"),
    ),
    "mixture weights swapped": mutant(
        "losses/config.py", "LossConfig.terms",
        ("Term('kd', '', mix.kd, _L, mixed=True)", "Term('kd', '', rl_weight, _L, mixed=True)"),
        ("Term('rl', _K, rl_weight, _M, mixed=True)", "Term('rl', _K, mix.kd, _M, mixed=True)"),
    ),
    "wider support taken whole": mutant(
        "losses/bound.py", "_requested", ("support.token_ids.shape[-1] <= request.k", "True")
    ),
    # k = "full" and temperature
    "temperature of the support left out": mutant(
        "contract.py", "Support.tempered", ("temperature == 1", "True")
    ),
    "temperature of the heads left out": mutant(
        "full_vocabulary/compare.py", "WholeVocabulary.tempered",
        ("self.heads.temperature * temperature", "self.heads.temperature"),
    ),
    "head's gradient begins as fresh memory": mutant(
        "full_vocabulary/blocks.py", "GradientSums.__init__",
        ("torch.zeros_like(settings.weight, dtype=weight_dtype)",
         "torch.empty_like(settings.weight, dtype=weight_dtype)"),
    ),
    "chunk of half precision begins as fresh memory": mutant(
        "full_vocabulary/blocks.py", "GradientSums.chunks",
        ("self.weight[self.ids].to(self.plan.dtype)",
         "self.weight[self.ids] if self.weight.dtype == self.plan.dtype "
         "else torch.empty_like(self.weight[self.ids], dtype=self.plan.dtype)"),
    ),
    "log-probs: head's gradient begins as fresh memory": mutant(
        "lm_head.py", "_SelectedLogprobs.backward",
        ("torch.zeros_like(weight)", "torch.empty_like(weight)"),
    ),
    "padding's exp overflows": mutant(
        "full_vocabulary/kernel.py", "_second_pass",
        ("a.sub_(plan.column(beyond)[rows]).exp_().mul_(plan.column(of_beyond)[rows])",
         "a.sub_(p_highest[rows]).exp_()"
         ".mul_((plan.column(of_beyond) / (plan.column(beyond) - p_highest).exp())[rows])"),
    ),
    "taid's gradient shrunk by t": mutant(
        "full_vocabulary/kernel.py", "kls",
        ("sums.r_ratio.detach() * (1 - interpolation) - sums.r_ratio",
         "-interpolation * sums.r_ratio"),
    ),
    "kl of the bucket left out": mutant(
        "full_vocabulary/kernel.py", "_kl", ("a.log_bucket is not None", "False")
    ),
    "token blocks: gradient of log p is that of the logits": mutant(
        "full_vocabulary/token_blocks.py", "_of_logits_in_place",
        ("-of_log_p.sum(1, keepdim=True)", "0 * of_log_p.sum(1, keepdim=True)"),
    ),
    "sum over ids: gradient of log p is that of the logits": mutant(
        "full_vocabulary/sums.py", "_of_logits_in_place", ("-total", "0 * total")
    ),
    "sum over ids: normalized by the first rows": mutant(
        "full_vocabulary/sums.py", "_SumOverIds.backward",
        ("p_norms[:, rows]", "p_norms[:, : rows.stop - rows.start]"),
    ),
    "token blocks: teachers not weighted": mutant(
        "full_vocabulary/token_blocks.py", "_TeacherRows.log_probs",
        ("log_q += self.plan.column(weights[rows, i].log())", "pass"),
    ),
    "token blocks: knobs of the first rows": mutant(
        "full_vocabulary/compare.py", "_called", ("v[rows]", "v[: rows.stop - rows.start]")
    ),
    "token blocks: the bucket without its floor": mutant(
        "full_vocabulary/token_blocks.py", "_floored", ("not plan.has_bucket", "True")
    ),
    "teachers without a weight take part": mutant(
        "full_vocabulary/heads.py", "by_teachers", ("weights > 0", "weights >= 0")
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
    # environments by id: which tokens of a conversation train
    "turns: mask shifted by one": mutant(
        EPISODES, "_extend",
        ("return replace(turn, loss_mask=loss_mask, inference_logprobs=_L, prompt_index=_I, "
         "turns=_T)",
         "return replace(turn, loss_mask=loss_mask.roll(1), inference_logprobs=_L, "
         "prompt_index=_I, turns=_T)"),
    ),
    "turns: tool output trained on": mutant(
        EPISODES, "_extend",
        ("loss_mask, logprobs = turn.loss_mask.clone(), turn.inference_logprobs.clone()",
         "loss_mask, logprobs = torch.ones_like(turn.loss_mask), turn.inference_logprobs.clone()"),
    ),
    "turns: last turn dropped": mutant(
        EPISODES, "interleave", ("return joined", "return joined[:-1] or joined"),
    ),
    "turns: rewritten history taken as an extension": mutant(
        EPISODES, "interleave",
        ("torch.equal(_A, _B)", "True"),
    ),
    "turns: shortest history extended": mutant(
        EPISODES, "interleave", ("max(extended, key=_K)", "min(extended, key=_K)"),
    ),
    # hooks that never fire
    "hooks: silent one accepted": mutant(
        ADAPTER, "TrainerAdapter._judge", ("self.loss is None or not tokens or calls", "True"),
    ),
    "hooks: last batch not judged": mutant(
        ADAPTER, "TrainerAdapter.judge_last_batch", ("sum(self.tokens)", "0"),
    ),
    "hooks: tokens of a micro-batch not counted": mutant(
        ADAPTER, "TrainerAdapter.begin", ("(self.tokens[number], self.calls)", "(0, self.calls)"),
    ),
    "hooks: calls on another micro-batch counted": mutant(
        ADAPTER, "TrainerAdapter.judge_micro_batch", ("self.calls - before", "self.calls"),
    ),
    "hooks: next batch not judged": mutant(
        ADAPTER, "TrainerAdapter.ask_for_batch",
        ("self._judge(sum(self.tokens), self.calls)", "None"),
    ),
    "hooks: last batch judged after an error": mutant(
        ADAPTER, "TrainerAdapter.judge_last_batch", ("self._batches.trained", "True"),
    ),
    "hooks: last batch judged before it has trained": mutant(
        "upstream/trainer/batches.py", "TrackedBatches.trained",
        ("self.begun == self.ended >= 2", "self.begun == self.ended"),
    ),
    "hooks: exit with status 0": mutant(
        ADAPTER, "judge_at_exit", ("os._exit(1)", "None"),
    ),
    "hooks: loop past the data loader accepted": mutant(
        ADAPTER, "TrainerAdapter.check_batch", ("self.k or self.steps == 0", "False"),
    ),
    "hooks: micro-batch not judged": mutant(
        "upstream/trainer/hooks.py", "placed.compute",
        ("trainer_adapter().judge_micro_batch()", "None"),
    ),
    "hooks: support without the student": mutant(
        "upstream/trainer/batches.py", "PackedMicroBatch._support",
        ("raise SilentHook(without_student(model))",
         "self.student = trainer_logprobs.new_zeros((trainer_logprobs.numel(), self.k))"),
    ),
    "hooks: train loop of the plain launcher not hooked": mutant(
        "upstream/plain_launcher.py", "_hook_loop",
        ("train_loop.get('compute_loss') is compute_loss", "False"),
    ),
    "hooks: tokens of all kinds are ours": mutant(
        BINDING, "RegisteredLoss.tokens_in",
        ("distilled_of(tensors, not self.distils)", "distilled_of(tensors, self.distils)"),
    ),
    "hooks: tokens of this rank alone": mutant(
        BINDING, "RegisteredLoss._check_tokens", ("summed_over_ranks(counts)", "counts"),
    ),
    "hooks: request of the teacher not expected": mutant(
        ORCHESTRATOR, "_judged.judged", ("not scoring.asked", "False"),
    ),
    "hooks: request of the teacher not counted": mutant(
        ORCHESTRATOR, "hook_client.prefill_logprobs", ("scoring.asked = True", "pass"),
    ),
    "hooks: sample without scores accepted": mutant(
        ORCHESTRATOR, "hook_stamps.stamp_loss_routing",
        ("distilled and settings.loss is not None and sample.ref_logprobs is None", "False"),
    ),
    "hooks: ids that sampling kept accepted": mutant(
        "upstream/trainer/batches.py", "refuse_sampling_mask",
        ("given.get('sampling_mask') is not None", "False"),
    ),
    "hooks: advantage of zero left to be pruned": mutant(
        ORCHESTRATOR, "hook_stamps.stamp_loss_routing",
        ("a or (wire.NO_ADVANTAGE if trains else a)", "a"),
    ),
    "hooks: mark of no advantage trained on": mutant(
        BINDING, "RegisteredLoss.__call__", ("advantages == NO_ADVANTAGE", "advantages > 1"),
    ),
    # a teacher with a tokenizer of its own
    "own tokenizer: rows not weighed by the path": mutant(
        SUMS, "Sums._straddle",
        ("(log_path[part.row] - log_path[position.row]).exp()", "log_path.new_ones(())"),
    ),
    "own tokenizer: paths in the rows' own precision": mutant(
        SUMS, "Sums._log_path", ("steps.new_zeros(1)", "(steps := steps.float()).new_zeros(1)"),
    ),
    "own tokenizer: open entries counted as closed": mutant(
        SUMS, "Sums._block",
        ("((closed, ~is_open), (open_, is_open))", "((closed, ~is_open), (closed, is_open))"),
    ),
    "own tokenizer: one of several ends": mutant(
        SUMS, "Sums._block",
        ("rows[:, self._ends].sum(-1)", "rows[:, self._ends[:1]].sum(-1)"),
    ),
    "own tokenizer: sampled token left to chance": mutant(
        SUMS, "Sums._block", ("both.scatter(1, sampled[:, None], torch.inf)", "both"),
    ),
    "own tokenizer: last row off by one": mutant(
        PLAN, "_Reader.position",
        ("bisect_right(self.starts, begin) - 1", "max(bisect_right(self.starts, begin) - 2, 0)"),
    ),
    "own tokenizer: earlier rows left out": mutant(
        PLAN, "_Reader.position", ("range(last, -1, -1)", "range(last, last - 1, -1)"),
    ),
    "own tokenizer: seam filter off": mutant(
        FINISH, "Positions.filtered",
        ("self.pair.are_canonical(self.before[positions[asked]], masses.tokens[asked])", "True"),
    ),
    "own tokenizer: sampled token not in its support": mutant(
        FINISH, "Positions.support",
        ("np.zeros(n, bool) if own is None else (norm > 0) & (own > NEVER)", "np.zeros(n, bool)"),
    ),
    "own tokenizer: end mass to another end": mutant(
        FINISH, "Positions.support",
        ("np.full(ends.sum(), end)", "np.full(ends.sum(), end - 1)"),
    ),
    "own tokenizer: unresolved ids floored": mutant(
        FINISH, "token_scores",
        ("torch.from_numpy(support.known[has_score])", "torch.ones(len(at), k, dtype=torch.bool)"),
    ),
    "own tokenizer: scores where nothing leads to": mutant(
        FINISH, "Positions.__init__", ("whole > UNREACHED", "whole > 0"),
    ),
    "own tokenizer: rounding of whole rows counted": mutant(
        "teachers/own_tokenizer.py", "ByRows.scores",
        ("read.token_ids.shape[1] >= size", "read.token_ids.shape[1] > size"),
    ),
    "own tokenizer: turn that the teacher writes otherwise": mutant(
        TURNS, "OwnTokenizer.turn",
        ("text not in whole[len(os.path.commonprefix([prompt, whole])):]", "False"),
    ),
    "own tokenizer: turn read without the one before": mutant(
        TURNS, "turns_of", ("branch.nodes[:index]", "branch.nodes[index - 1:index]"),
    ),
    "own tokenizer: metrics since the run's start": mutant(
        "teachers/own_tokenizer.py", "OwnTokenizerScorer.take_metrics",
        ("self._totals.clear()", "None"),
    ),
    # the tape of a teacher
    "tape: prompt left out of the key": mutant(
        TAPE_ANSWERS, "teacher_question",
        ("[ids_as_bytes(read), ids_as_bytes(own)]", "[ids_as_bytes(own)]"),
    ),
    "tape: chosen ids left out of the key": mutant(
        TAPE_ANSWERS, "teacher_question", ("parts.append(ids_as_bytes(candidates))", "None"),
    ),
    "tape: trained rows left out of the key": mutant(
        TAPE_ANSWERS, "teacher_question",
        ("parts.append(rollout.trained.numpy().tobytes())", "None"),
    ),
    "plugin: rows that do not train are asked for": mutant(
        "backends/alignment.py", "sequences_to_score",
        ("None if rollout.trained.all() else rollout.trained", "None"),
    ),
    "plugin: rows behind a gap take the gap's place": mutant(
        "scoring/worker.py", "answer_batch", ("row += last - first", "row = 0"),
    ),
    "orchestrator: what the student did not sample is asked for": mutant(
        "upstream/orchestrator/messages.py", "read_of",
        ("trains and id(node) not in earlier", "id(node) not in earlier"),
    ),
    "orchestrator: a turn of several branches is asked for in each": mutant(
        "upstream/orchestrator/messages.py", "read_of", ("trace.branches[:number]", "()"),
    ),
    "tape: parts of a key run together": mutant(
        TAPE_ANSWERS, "answer_key", ("len(part).to_bytes(8, 'little') + part", "part"),
    ),
    "tape: known ids forgotten": mutant(
        TAPE_ANSWERS, "_scores_of", ("tensors.get('known')", "None"),
    ),
    "tape: larger K not read": mutant(
        TAPE_STORE, "Store._fitting", ("one.note.k >= k", "one.note.k == k"),
    ),
    "tape: smaller K read for a larger": mutant(
        TAPE_STORE, "Store._fitting", ("one.note.k >= k", "one.note.k <= k"),
    ),
    "tape: hidden states not needed": mutant(
        TAPE_STORE, "Store._fitting", ("one.note.hidden or not hidden", "True"),
    ),
    "tape: damaged answer read": mutant(
        TAPE_STORE, "StoredAnswer.read",
        ("len(content) == self.note.size and zlib.crc32(content) == self.note.crc", "True"),
    ),
    "tape: damaged index read": mutant(
        TAPE_STORE, "answers_of", ("checksum != _checksum(index)", "False"),
    ),
    "tape: answers without a mark read": mutant(
        TAPE_STORE, "Store.add", ("FILES if marked else UNPROVEN", "FILES"),
    ),
    "tape: half a file stays": mutant(
        TAPE_STORE, "_write_whole", ("unfinished.unlink(missing_ok=True)", "None"),
    ),
    "tape: failed mark forgotten": mutant(
        TAPE_STORE, "Store.mark",
        ("[*self._unproven.items()]", "[self._unproven.popitem() for _ in [*self._unproven]]"),
        ("self._unproven.pop(path)", "None"),
    ),
    "tape: another's answer kept twice": mutant(
        TAPE_STORE, "Store.add", ("self.refresh()", "None"),
    ),
    "tape: draws kept by prompt": mutant(
        TAPE_SCORER, "TapedSampler.generate", ("params.temperature > 0", "False"),
    ),
    "tape: another teacher accepted": mutant(
        TAPE_SCORER, "TapedScorer.verify", ("not apart <= limit", "False"),
    ),
    "tape: more ids than were asked for": mutant(
        TAPE_SCORER, "TapedScorer.score", ("_A.top(k)", "_A"),
    ),
    # LoRA
    "lora: merged without its scale": mutant(
        VIEWS, "weights_of",
        ("layer.get_delta_weight(ADAPTER)",
         "layer.get_delta_weight(ADAPTER) / layer.scaling[ADAPTER]"),
    ),
    "lora: merged with the wrong sign": mutant(
        VIEWS, "weights_of",
        ("value + layer.get_delta_weight(ADAPTER)", "value - layer.get_delta_weight(ADAPTER)"),
    ),
    "lora: a bias is merged as well": mutant(
        VIEWS, "weights_of", ('parameter == "weight"', "True"),
    ),
    "lora: the base keeps its adapter": mutant(
        VIEWS, "base_of", ("return layer.base_layer", "return layer"),
    ),
    "lora: a frozen copy is the base's": mutant(
        VIEWS, "frozen_copy", ("dict(weights_of(model))", "base_of(model).state_dict()"),
    ),
    "lora: a frozen copy trains": mutant(
        VIEWS, "frozen_copy", ("_M.requires_grad_(False)", "_M"),
    ),
    "lora: another base accepted": mutant(
        LORA, "LoraAdapter.load", ("digest != self.digest", "False"),
    ),
    "lora: alpha is not peft's": mutant(
        LORA, "LoraAdapter.of_model", ("config.alpha", "config.rank"),
    ),
    "lora: a zero adapter stays zero in the check of a sync": mutant(
        "local/weight_sync.py", "perturbed",
        ("parameter.add_(0.02 * noise.to(parameter))", "parameter.add_(0)"),
    ),
    "lora: an average of the base's weights": mutant(
        "teachers/policy.py", "PolicyTeacher.end_step",
        ("own[name].lerp_(weight, self.config.ema_rate)", "own[name].lerp_(own[name], 0.5)"),
    ),
}  # fmt: skip
