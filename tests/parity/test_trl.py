"""Compare with ``trl`` from PyPI: its functions are executed as installed, in float64.

Only the functions are taken from the installed source. Importing trl's trainers would import a
training stack, and its warnings, that no comparison of divergences needs.
"""

import ast
import collections
import importlib.metadata
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from prime_composer import divergences as D
from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

try:
    TRL = importlib.metadata.distribution("trl")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("trl is not installed (it is in the test extra)", allow_module_level=True)


def functions(path: str, *names: str) -> types.SimpleNamespace:
    """Return functions or methods from an installed file of trl, without their decorators."""
    source = Path(TRL.locate_file(path))
    if not source.exists():
        pytest.fail(f"trl {TRL.version} has no {path} any more")
    definitions = {
        node.name: node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    }
    lost = set(names) - definitions.keys()
    assert not lost, f"trl {TRL.version}: {path} has lost {lost}"
    for node in definitions.values():
        node.decorator_list = []
    scope = {"torch": torch, "F": F}
    exec(compile(ast.Module(list(definitions.values()), []), str(source), "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


@pytest.fixture(scope="module")
def logits():
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 11, 40, generator=g, dtype=torch.float64) * 2


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_generalized_jsd_is_gkds(logits, beta):
    gkd = functions("trl/experimental/gkd/gkd_trainer.py", "generalized_jsd_loss")
    labels = torch.arange(33).view(3, 11) % 4 - 1
    labels[labels < 0] = -100
    student, teacher = (x.clone().requires_grad_() for x in logits)
    theirs = gkd.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
    (their_grad,) = torch.autograd.grad(theirs, student)
    ours = D.generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta, "full")[
        labels != -100
    ].mean()
    (our_grad,) = torch.autograd.grad(ours, student)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "renorm"])
def test_jsd_on_the_students_top_k_is_sdpos(logits, alpha, tail):
    names = ("compute_divergence", "add_tail_bucket", "compute_topk_self_distillation_loss")
    sdpo = functions("trl/experimental/sdpo/loss_utils.py", *names)
    student, teacher = logits[0].clone().requires_grad_(), logits[1]
    theirs = sdpo.compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=8, distillation_alpha=alpha, distillation_add_tail=tail
    )
    (their_grad,) = torch.autograd.grad(theirs.sum(), student)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = log_p.topk(8, dim=-1).indices
    ours = D.generalized_jsd(
        log_p.gather(-1, ids), log_q.gather(-1, ids), alpha, "tail" if tail else "renorm"
    )
    (our_grad,) = torch.autograd.grad(ours.sum(), student)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-8, atol=1e-13)


def test_the_bounded_importance_factor_is_sdpos(logits):
    sdpo = functions("trl/experimental/sdpo/loss_utils.py", "apply_importance_sampling_clipping")
    log_p = logits[0, 0, :, 0] - 3
    old = log_p - torch.linspace(-30, 30, 11).double()
    theirs = sdpo.apply_importance_sampling_clipping(torch.ones(11).double(), log_p, old, 2.0)
    inputs = LossInputs(log_p, old, log_p - 1.0, None, torch.ones(11, dtype=torch.bool))
    for t in range(11):
        inputs.loss_mask = torch.arange(11) == t
        out = setup_loss_fn(LOSS_TYPES["self_distillation"](divergence="sampled_reverse_kl"))(
            inputs
        )
        torch.testing.assert_close(out.loss, theirs[t] * log_p[t], rtol=1e-12, atol=0)


def test_position_weights_are_iw_opds(logits):
    iw = functions("trl/experimental/iw_opd/iw_opd_trainer.py", "_compute_iw_opd_loss")
    student = logits[0].clone().requires_grad_()
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (3, 11), generator=g)
    labels = torch.where(torch.rand(3, 11, generator=g) > 0.3, tokens, -100)
    take = lambda x: x.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # noqa: E731
    teacher, rollout = (
        take(logits[1]),
        take(logits[0]) + 0.3 * torch.randn(3, 11, generator=g, dtype=torch.float64),
    )
    log = {"train": collections.defaultdict(list)}
    trainer = types.SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.5,
        iw_opd_epsilon=1e-8,
        _metrics=log,
        model=types.SimpleNamespace(training=True),
    )
    theirs = iw._compute_iw_opd_loss(trainer, student, tokens, labels, teacher, rollout)
    (their_grad,) = torch.autograd.grad(theirs, student)

    # trl's loss is the token mean of -w a log p, a = log q - log mu. Ours is the same in one pack,
    # on policy (p = mu in the log-ratio).
    mask = labels != -100
    log_p = take(student)
    inputs = LossInputs(
        trainer_logprobs=log_p.flatten(),
        inference_logprobs=rollout.flatten(),
        ref_logprobs=teacher.flatten(),
        advantages=None,
        loss_mask=mask.flatten(),
        segment_ids=torch.arange(3).repeat_interleave(11),
    )
    out, metrics = LOSS_TYPES["sampled_reverse_kl"](position_weights={}).position_weights.apply(
        inputs
    )
    ours = -(
        out.loss_weights
        * (inputs.ref_logprobs - inputs.inference_logprobs)
        * inputs.trainer_logprobs
    )[mask.flatten()].mean()
    (our_grad,) = torch.autograd.grad(ours, student)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-12, atol=1e-15)
    assert metrics["position_weights/mean"].item() == pytest.approx(
        log["train"]["iw_opd/mean_weight"][0], rel=1e-12
    )
