"""Every distillation loss brings the student nearer to the teacher, on a table of logits."""

import pytest
import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.divergences import reverse_kl
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

VOCAB, POSITIONS, K, STEPS = 12, 64, 6, 30
TAIL = {"type": "topk_reverse_kl", "k": K}
FITTED = {
    "taid": {"total_steps": STEPS // 2},
    "entropy_aware_opd": {"tau": 1.0, "alpha": 0.5},
    "compose": {
        "rl": {"weight": 0},
        "distillation": {
            "tail": {"weight": 0.5, "loss": TAIL},
            "taid": {"weight": 0.5, "loss": {"type": "taid", "k": K, "total_steps": STEPS}},
        },
    },
}
RECIPES = {
    name: FITTED.get(name, cls.examples[0])
    for name, cls in LOSS_TYPES.items()
    if cls.channel == "distillation" and name != "sft"
} | {
    "sampled_reverse_kl, signed": {"mode": "signed"},
    "topk_reverse_kl, generalized": {"normalization": "generalized"},
    "entropy_aware_opd, topk": {"tau": 1.0, "alpha": 0.5, "reverse": "topk"},
    "self_distillation, sampled": {"divergence": "sampled_reverse_kl"},
}


def distil(name: str) -> tuple[float, float]:
    """Full reverse KL to the teacher, before and after."""
    knobs = dict(RECIPES[name])
    cls = LOSS_TYPES[name.split(",")[0]]
    config = cls(**({"k": K} if "k" in cls.model_fields else {}), **knobs)
    loss = setup_loss_fn(config)
    g = torch.Generator().manual_seed(0)
    log_q = (1.5 * torch.randn(POSITIONS, VOCAB, generator=g)).log_softmax(-1)
    teacher, ids = log_q.topk(K)
    z = torch.randn(POSITIONS, VOCAB, generator=g).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.25)
    kl = lambda: reverse_kl(z.detach().log_softmax(-1), log_q, "full").mean().item()  # noqa: E731
    before = kl()
    for _ in range(STEPS):
        log_p = z.log_softmax(-1)
        tokens = torch.multinomial(log_p.detach().exp(), 1, generator=g)
        trainer = log_p.gather(-1, tokens).squeeze(-1)
        ref, old = log_q.gather(-1, tokens).squeeze(-1), trainer.detach()
        inputs = LossInputs(
            trainer_logprobs=trainer,
            inference_logprobs=old,
            ref_logprobs=ref,
            advantages=None,
            loss_mask=torch.ones(POSITIONS, dtype=torch.bool),
            support=Support(ids, teacher, log_p.gather(-1, ids)),
            token_ids=tokens.squeeze(-1),
            segment_ids=torch.arange(POSITIONS),
        )
        out = loss(inputs)
        (out.loss / POSITIONS).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.end_step()
    return before, kl()


@pytest.mark.parametrize("name", RECIPES)
def test_the_student_comes_nearer_to_its_teacher(name):
    before, after = distil(name)
    # One sample per position is noisy; a whole distribution per position is not.
    noisy = "sampled" in name or name == "entropy_aware_opd"
    assert after < (0.6 if noisy else 0.2) * before
