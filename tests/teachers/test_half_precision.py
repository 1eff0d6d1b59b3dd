"""Models in half precision: each head keeps its float32 sums, on every road to a loss.

Expected numbers are those of float64 on the same bfloat16 hidden states and head.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_composer.backends.hf_model import (
    check_head,
    float32_head,
    hidden_states,
    lm_head_weight,
)
from prime_composer.backends.protocols import Rollout, SamplingParams, Scorer
from prime_composer.contract import Scores
from prime_composer.divergences import reverse_kl
from prime_composer.full_vocabulary import compare
from prime_composer.lm_head import head_logits, selected_logprobs
from prime_composer.problems.config import Problem
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.step.batch import Sample
from prime_composer.step.student_forward import autocast, student_inputs
from prime_composer.teachers.output_head import teacher_head
from prime_composer.teachers.policy import students_choice
from prime_composer.teachers.server import ServerScorer
from prime_composer.teachers.tape.answers import head_of_bytes, head_record
from prime_composer.teachers.transformers import TransformersScorer
from tests.fork_server import ForkServer
from tests.tiny_qwen import make_model

VOCAB, K, GOAL = 4000, 32, 0.01
WIDE = {"vocab_size": VOCAB, "hidden_size": 256, "initializer_range": 0.12}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.nn.Module]]:
    model = make_model(False, 0, **WIDE).bfloat16()
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    yield folder, model


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, VOCAB, (n,), generator=g) for n in (20, 30)]
    return [Rollout.not_sampled(one, 4, "stop", i) for i, one in enumerate(ids)]


def states_of(model: torch.nn.Module, rollouts: list[Rollout]) -> list[Tensor]:
    """Return the hidden states that predict the tokens from the fifth on, one tensor each."""
    with torch.no_grad():
        every = [one.token_ids[None] for one in rollouts]
        return [hidden_states(model, ids, torch.ones_like(ids))[0, 3:-1] for ids in every]


def near(states: list[Tensor]) -> Tensor:
    """Return a student's hidden states, which differ from the teacher's by 3 %."""
    joined = torch.cat(states).float()
    noise = torch.randn(joined.shape, generator=torch.Generator().manual_seed(1))
    return (joined + 0.03 * noise).bfloat16()


def exact(states: Tensor, weight: Tensor) -> Tensor:
    return (states.double() @ weight.double().T).log_softmax(-1)


def error_of_the_gradient(scores: list[Scores], states: list[Tensor], weight: Tensor) -> float:
    """Return the relative error of the reverse KL's gradient for the student's hidden states."""
    ids = torch.cat([one.token_ids for one in scores])
    log_q = torch.cat([one.teacher_logprobs for one in scores])
    hidden = near(states).requires_grad_()
    reverse_kl(selected_logprobs(hidden, weight, ids), log_q, "tail").sum().backward()
    plain = hidden.detach().double().requires_grad_()
    p, q = (
        torch.cat([at, 1 - at.sum(1, keepdim=True)], 1)
        for at in (exact(x, weight).gather(1, ids).exp() for x in (plain, torch.cat(states)))
    )
    (p * (p.log() - q.log())).sum().backward()
    return float((hidden.grad.double() - plain.grad).norm() / plain.grad.norm())


def check_scorer(scorer: Scorer, teacher: torch.nn.Module, rollouts: list[Rollout]) -> None:
    weight = lm_head_weight(teacher).detach()
    scores = scorer.score(rollouts, K, hidden=True)
    own = [share.states for one in scores for share in one.hidden]
    assert error_of_the_gradient(scores, own, weight) < GOAL
    for one, hidden in zip(scores, own, strict=True):
        row = exact(hidden, weight)
        assert torch.equal(one.token_ids.sort().values, row.topk(K).indices.sort().values)
    given = scorer.score(rollouts, K, candidate_ids=[one.token_ids.flip(1) for one in scores])
    assert error_of_the_gradient(given, own, weight) < GOAL
    assert all(one.hidden[0].head.weight.dtype == torch.bfloat16 for one in scores)
    check_whole_vocabulary(scores, rollouts, teacher)


def check_whole_vocabulary(
    scores: list[Scores], rollouts: list[Rollout], teacher: torch.nn.Module
) -> None:
    """Compare the gradient of k = "full", as the trainer computes it, with float64."""
    student = copy.deepcopy(teacher).float()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 0.005 * torch.randn_like(parameter))
    samples = [Sample(r, Problem("", ""), scores=s) for r, s in zip(rollouts, scores, strict=True)]
    with autocast(student, "bfloat16"):
        inputs = student_inputs(student, samples)
        heads = inputs.hidden_states
        assert heads is not None
    hidden = heads.student.hidden.detach().requires_grad_()
    weight = heads.student.weight.detach()
    leaf = type(heads)(type(heads.student)(hidden, weight), heads.teachers)
    compare(leaf, reverse_kl).sum().backward()
    plain = hidden.detach().double().requires_grad_()
    log_p = exact(plain, weight)
    log_q = exact(heads.teachers[0].hidden, lm_head_weight(teacher).detach())
    (log_p.exp() * (log_p - log_q)).sum().backward()
    assert hidden.grad is not None and plain.grad is not None
    assert (hidden.grad.double() - plain.grad).norm() / plain.grad.norm() < GOAL


def test_bfloat16_teacher_gives_the_gradient_of_float64(
    teacher: tuple[Path, torch.nn.Module], rollouts: list[Rollout]
) -> None:
    """Its top K, given ids, and its whole vocabulary by hidden states."""
    folder, model = teacher
    check_scorer(TransformersScorer(folder, dtype="bfloat16"), model, rollouts)


@pytest.mark.vllm
@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_vllm_gives_the_gradient_of_float64(
    tied: bool, rollouts: list[Rollout], tmp_path: Path
) -> None:
    """The engine keeps float32 sums unless its arguments say otherwise, and says so."""
    from prime_composer.teachers.vllm import VLLMScorer

    model = make_model(tied, 0, **WIDE).bfloat16()
    model.save_pretrained(tmp_path)
    settings = {"dtype": "bfloat16", "max_model_len": 64, "max_logprobs": K}
    scorer = VLLMScorer(tmp_path, **settings)
    assert scorer.head_dtype == "float32"
    check_scorer(scorer, model, rollouts)
    scorer.close()
    if tied:
        return
    own = {"hf_overrides": {"head_dtype": "model"}}
    scorer = VLLMScorer(tmp_path, **settings, engine_args=own)
    assert scorer.head_dtype == "bfloat16"
    (one, *_) = scorer.score(rollouts, K, hidden=True)
    scorer.close()
    assert one.hidden[0].head.rounded_to == torch.bfloat16


@pytest.mark.vllm
def test_bfloat16_server_gives_the_gradient_of_float64(
    rollouts: list[Rollout], vllm_forks: ForkServer, tmp_path: Path
) -> None:
    """`prime-rl teacher` adds the option, and its facts say so."""
    from tests.vllm_process import QUICK, TeacherProcess, save_tokenizer

    model = make_model(True, 0, **WIDE).bfloat16()
    model.save_pretrained(tmp_path / "teacher")
    save_tokenizer(tmp_path / "teacher", VOCAB)
    options = ("--dtype", "bfloat16", *QUICK)
    with TeacherProcess(
        tmp_path / "teacher", tmp_path / "server.log", *options, forks=vllm_forks
    ) as server:
        scorer = ServerScorer(server.url)
        assert (scorer.dtype, scorer.head_dtype) == ("bfloat16", "float32")
        check_scorer(scorer, model, rollouts)
        scorer.close()


def sampled(sampler: TransformersSampler, folder: Path) -> None:
    """Check log mu of 24 tokens against float64."""
    found = sampler.generate([[4, 5, 6], [7] * 9], SamplingParams(max_tokens=12), seed=0)
    model = TransformersScorer(folder, dtype="bfloat16").model
    weight = lm_head_weight(model).detach()
    for one in found:
        ids = one.token_ids[None]
        with torch.no_grad():
            states = hidden_states(model, ids, torch.ones_like(ids))[0, :-1]
            rounded = (states @ weight.T).float().log_softmax(-1)
        own = one.token_ids[1:, None]
        mu = one.inference_logprobs[1:][one.loss_mask[1:]]
        log_p, low = (
            x.gather(1, own)[:, 0][one.loss_mask[1:]] for x in (exact(states, weight), rounded)
        )
        # The states of a step with a cache are rounded once more, those of rounded logits as well.
        assert (mu - log_p).abs().mean() <= (low - log_p).abs().mean()


def test_bfloat16_sampler_has_the_mu_of_float32_sums(
    teacher: tuple[Path, torch.nn.Module],
) -> None:
    """What it draws from is what the trainer computes on the same hidden states."""
    folder, model = teacher
    sampled(TransformersSampler(folder, dtype="bfloat16", eos_token_ids=[1]), folder)
    ids = torch.arange(2, 9)[None]
    with torch.no_grad(), float32_head(model):
        logits = model(input_ids=ids).logits
    states = hidden_states(model, ids, torch.ones_like(ids)).detach()
    torch.testing.assert_close(
        logits.double(), states.double() @ lm_head_weight(model).double().T, rtol=0, atol=1e-4
    )
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.bfloat16


def test_students_choice_in_bfloat16_is_the_true_top_k(
    teacher: tuple[Path, torch.nn.Module], rollouts: list[Rollout]
) -> None:
    """Rounded logits have ties, which put wrong ids into the list."""
    _, model = teacher
    weight = lm_head_weight(model).detach()
    chosen = students_choice(model, rollouts, K)
    for ids, states in zip(chosen, states_of(model, rollouts), strict=True):
        assert torch.equal(ids.sort().values, exact(states, weight).topk(K).indices.sort().values)


def test_plain_head_in_bfloat16_finds_a_scale_of_one_percent() -> None:
    """Float32 sums of the same hidden states agree, so that the check need not be loose."""
    model = make_model(False, 0).bfloat16()
    check_head(model)
    head = model.lm_head.register_forward_hook(lambda module, args, out: out * 1.01)
    with pytest.raises(ValueError, match='does more to its logits.*backend = "vllm"'):
        check_head(model)
    head.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_head_logits_are_the_sums_of_their_inputs(dtype: torch.dtype) -> None:
    """In blocks of the vocabulary whose last one is smaller."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 700, generator=g).to(dtype)
    weight = torch.randn(3100, 700, generator=g).to(dtype)
    found = head_logits(hidden, weight)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        found.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=2e-4
    )


@pytest.mark.parametrize("computed_in", [torch.float32, torch.bfloat16])
def test_head_on_a_tape_keeps_how_it_rounds(computed_in: torch.dtype) -> None:
    """A teacher that keeps float32 sums keeps them on its tape, in half of the memory."""
    head = teacher_head(computed_in, torch.randn(5, 3).bfloat16(), None)
    again = head_of_bytes(head_record(head).content, "it")
    assert again.rounded_to == head.rounded_to
    assert head.rounded_to == (None if computed_in == torch.float32 else torch.bfloat16)
    assert again.weight.dtype == torch.bfloat16
