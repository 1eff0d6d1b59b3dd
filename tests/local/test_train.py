"""The one-machine loop on models of a few thousand parameters, sampled and scored by transformers."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_student
from prime_composer.backends.protocols import Rollout, TeacherScores
from prime_composer.local import gradients as gradients_module
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.engine import open_engine
from prime_composer.local.gradients import Batch, NonFiniteLoss, accumulate_gradients
from prime_composer.local.student_forward import micro_batches
from prime_composer.local.tracker import read_metrics
from prime_composer.local.train import group_advantages, lr_factor, train
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import TrainerConfig
from prime_composer.problems.loading import load_problem_set
from prime_composer.tiny_models.cache import prepare_model
from tests.command import numbers

Raw = Callable[..., dict[str, Any]]


class Silent:
    """Shows nothing; counts the steps it was told of, and may interrupt the run at one of them."""

    def __init__(self, interrupt_at: int | None = None):
        self.steps: list[int] = []
        self.interrupt_at = interrupt_at

    def status(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        if step + 1 == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)


def run(
    raw: dict[str, Any], run_dir: Path, display: Silent | None = None, resume: bool = False
) -> Any:
    run_dir.mkdir(exist_ok=True)
    checkpoint = list_checkpoints(run_dir)[-1] if resume else None
    return train(parse_recipe(raw), run_dir, display or Silent(), resume=checkpoint)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    model, _ = load_student(list_checkpoints(run_dir)[-1].path)
    return model.state_dict()


def random_rollouts(
    vocab: int, lengths: list[tuple[int, int]], k: int
) -> tuple[list[Rollout], list[TeacherScores]]:
    """Rollouts of random tokens with a random teacher's normalised scores, for prompts and completions of these lengths."""
    generator = torch.Generator().manual_seed(7)
    rollouts, scores = [], []
    for index, (prompt, completion) in enumerate(lengths):
        n = prompt + completion
        ids = torch.randint(0, vocab, (n,), generator=generator)
        teacher = (
            torch.randn(n, vocab, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
        )
        top = teacher.topk(k)
        mask = torch.arange(n) >= prompt
        nan = torch.full((n,), math.nan, dtype=torch.float64)
        mu = torch.where(mask, -torch.rand(n, generator=generator, dtype=torch.float64) * 3, nan)
        rollouts.append(Rollout(ids, mask, mu, "stop", index))
        scores.append(
            TeacherScores(teacher.gather(-1, ids[:, None])[:, 0], top.indices, top.values)
        )
    return rollouts, scores


@pytest.fixture(scope="module")
def tiny_model(tiny_recipe: Raw) -> torch.nn.Module:
    recipe = parse_recipe(tiny_recipe())
    model, _ = load_student(prepare_model(recipe.student.prepare, load_problem_set(recipe.sources)))
    return model.double()


def gradients(
    model: torch.nn.Module, rollouts: list[Rollout], scores: list[TeacherScores], **config: Any
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=scores[0].token_ids.shape[-1]))
    trainer = TrainerConfig(steps=1, **config)
    accumulate_gradients(model, loss, Batch(rollouts, scores), trainer, step=1)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


LENGTHS = [(3, 5), (7, 2), (2, 9), (4, 4), (6, 1)]


def test_micro_batches_give_the_gradient_of_one_batch(tiny_model: torch.nn.Module) -> None:
    rollouts, scores = random_rollouts(300, LENGTHS, k=8)
    assert len(micro_batches(rollouts, 1)) == 5 and len(micro_batches(rollouts, 1000)) == 1
    whole = gradients(tiny_model, rollouts, scores, micro_batch_tokens=1000)
    for budget in (1, 24):
        parts = gradients(tiny_model, rollouts, scores, micro_batch_tokens=budget)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_token_mean_written_out_with_a_plain_forward(
    tiny_model: torch.nn.Module,
) -> None:
    rollouts, scores = random_rollouts(300, LENGTHS, k=8)
    ours = gradients(tiny_model, rollouts, scores, micro_batch_tokens=30)
    tiny_model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for rollout, score in zip(rollouts, scores, strict=True):
        probs = tiny_model(rollout.token_ids[None]).logits[0].softmax(-1)
        for t in range(1, len(rollout.token_ids)):
            if not rollout.loss_mask[t]:
                continue
            tokens += 1
            p, q = probs[t - 1][score.token_ids[t]], score.teacher_logprobs[t].exp()
            outcomes = zip([*p, 1 - p.sum()], [*q, 1 - q.sum()], strict=True)
            total = total + sum(a * (a / b).log() for a, b in outcomes)
    (total / tokens).backward()
    for name, parameter in tiny_model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-7, atol=1e-10)


def test_micro_batches_keep_every_rollout_once_and_the_budget() -> None:
    rollouts, _ = random_rollouts(300, [(2, n) for n in (3, 30, 7, 7, 12, 1, 50)], k=2)
    groups = micro_batches(rollouts, 40)
    assert sorted(i for group in groups for i in group) == list(range(7))
    for group in groups:
        longest = max(len(rollouts[i].token_ids) for i in group)
        assert len(group) == 1 or longest * len(group) <= 40


def test_in_bfloat16_the_log_probs_are_still_those_of_one_distribution(tiny_recipe: Raw) -> None:
    recipe = parse_recipe(tiny_recipe())
    model, _ = load_student(prepare_model(recipe.student.prepare, load_problem_set(recipe.sources)))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    rollouts, _ = random_rollouts(300, LENGTHS, k=2)
    everything = torch.arange(300)
    scores = [
        TeacherScores(torch.zeros(n), everything.expand(n, -1), torch.zeros(n, 300))
        for n in (len(r.token_ids) for r in rollouts)
    ]
    batch, config = Batch(rollouts, scores), TrainerConfig(steps=1, dtype="bfloat16")
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k="full"))
    ((_, inputs),) = gradients_module.micro_batch_inputs(
        model, loss, batch, config, batch.tokens, None
    )
    mass = inputs.support.student_logprobs.double().exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


def test_gradient_checkpointing_recomputes_each_layer_to_the_same_gradient_and_wakes_no_dropout(
    tiny_recipe: Raw,
) -> None:
    rollouts, scores = random_rollouts(300, LENGTHS, k=8)
    recipe = parse_recipe(
        tiny_recipe(trainer={**tiny_recipe()["trainer"], "gradient_checkpointing": True})
    )
    found = {}
    for name, checkpointing in (("plain", False), ("recomputed", True)):
        trainer = recipe.trainer.model_copy(update={"gradient_checkpointing": checkpointing})
        with open_engine(
            recipe.model_copy(update={"trainer": trainer}), lambda text: None
        ) as engine:
            model, calls = engine.model.double(), []
            (layer,) = model.model.layers
            layer.self_attn.register_forward_hook(
                lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
            )
            found[name] = gradients(model, rollouts, scores, micro_batch_tokens=1000), len(calls)
            assert not any(part.training for part in layer.modules() if part is not layer)
    assert found["plain"][1] == 1 and found["recomputed"][1] == 2
    for name, gradient in found["plain"][0].items():
        torch.testing.assert_close(found["recomputed"][0][name], gradient, rtol=1e-9, atol=1e-12)


def test_a_rollout_without_a_prompt_is_refused(tiny_model: torch.nn.Module) -> None:
    rollouts, scores = random_rollouts(300, [(0, 4)], k=2)
    with pytest.raises(ValueError, match="needs a prompt"):
        gradients(tiny_model, rollouts, scores)


def test_an_infinite_score_stops_before_the_backward_and_names_step_rollout_and_loss(
    tiny_model: torch.nn.Module,
) -> None:
    rollouts, scores = random_rollouts(300, LENGTHS, k=8)
    scores[3].teacher_logprobs[-1] = math.inf
    with pytest.raises(
        NonFiniteLoss, match=r"step 1: the loss 'topk_reverse_kl' of rollout 3 is (nan|-?inf)"
    ):
        gradients(tiny_model, rollouts, scores)


def test_an_advantage_is_the_reward_minus_its_groups_mean() -> None:
    rollouts = [
        Rollout(torch.zeros(1).long(), torch.ones(1).bool(), torch.zeros(1), "stop", i)
        for i in (0, 0, 1, 1)
    ]
    assert group_advantages(rollouts, [1.0, 0.0, 1.0, 1.0]) == [0.5, -0.5, 0.0, 0.0]


def test_the_learning_rate_warms_up_and_decays_as_written() -> None:
    linear = TrainerConfig(steps=6, warmup_steps=2, schedule="linear")
    assert [lr_factor(linear, step) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = TrainerConfig(steps=4, schedule="cosine")
    assert [lr_factor(cosine, step) for step in (1, 3)] == pytest.approx([1.0, 0.5])
    constant = TrainerConfig(steps=3, warmup_steps=1)
    assert [lr_factor(constant, step) for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    run(tiny_recipe(), tmp_path / "a")
    run(tiny_recipe(), tmp_path / "b")
    run(tiny_recipe(trainer__seed=1), tmp_path / "c")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert numbers(tmp_path / "a")[1:] != numbers(tmp_path / "c")[1:]


def test_what_a_run_measures_and_keeps(tiny_recipe: Raw, tmp_path: Path) -> None:
    display = Silent()
    outcome = run(tiny_recipe(trainer__steps=5, checkpoint__keep=2), tmp_path / "run", display)
    assert display.steps == [1, 2, 3, 4, 5] and not outcome.interrupted
    assert sorted(outcome.evaluations) == [0, 2, 4, 5]
    assert {"eval/accuracy", "eval/reverse_kl", "teacher/accuracy"} <= outcome.evaluations[0].keys()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [4, 5]
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert {"loss", "grad_norm", "lr", "topk_reverse_kl/kl", "rollout/truncated"} <= records[
        3
    ].keys()


def test_distillation_lowers_the_reverse_kl(tiny_recipe: Raw, tmp_path: Path) -> None:
    raw = tiny_recipe(
        trainer={"steps": 40, "batch_size": 32, "lr": 1e-2},
        eval={"every": 0, "size": 4, "kl_size": 16},
    )
    outcome = run(raw, tmp_path / "run")
    assert (
        outcome.evaluations[40]["eval/reverse_kl"] < 0.8 * outcome.evaluations[0]["eval/reverse_kl"]
    )


def test_an_interrupted_run_leaves_a_checkpoint_and_resumes_to_the_numbers_of_an_uninterrupted_one(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(trainer__steps=6)
    run(raw, tmp_path / "whole")
    outcome = run(raw, tmp_path / "cut", Silent(interrupt_at=4))
    assert outcome.interrupted and outcome.steps == 3
    assert list_checkpoints(tmp_path / "cut")[-1].step == 3
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "cut")[name], value)


KILLED = """
import os, signal, sys, json
from pathlib import Path
from prime_composer import train as module, checkpoint as saving
from prime_composer.recipe.loading import parse_recipe

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

where = sys.argv[1]
if where == "step":
    original, calls = module.accumulate_gradients, []
    def counted(*args, **kwargs):
        calls.append(1)
        return die() if len(calls) == 4 else original(*args, **kwargs)
    module.accumulate_gradients = counted
else:
    original = saving.torch.save
    def torn(state, path):
        if state["step"] < 4:
            return original(state, path)
        Path(path).write_bytes(b"torn")
        die()
    saving.torch.save = torn

class Silent:
    def status(self, text): pass
    def step(self, step, metrics): pass

module.train(parse_recipe(json.loads(sys.argv[2])), Path(sys.argv[3]), Silent())
"""


@pytest.mark.parametrize("where", ["step", "checkpoint"])
def test_a_run_killed_in_the_middle_of_a_step_or_of_a_checkpoint_resumes_to_the_same_numbers(
    where: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    raw = tiny_recipe(trainer__steps=6)
    run(raw, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, where, json.dumps(raw), str(tmp_path / "cut")]
    )
    assert killed.returncode == -signal.SIGKILL
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "cut")] == [2]
    assert read_metrics(tmp_path / "cut")[-1]["step"] >= 3
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert not list((tmp_path / "cut" / "checkpoints").glob("*.tmp"))
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "cut")[name], value)


def test_a_diverging_run_stops_and_leaves_the_last_good_checkpoint(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gradients_module.student_inputs

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        if len(display.steps) == 3:
            inputs.support.teacher_logprobs[0] = math.inf
        return inputs

    display = Silent()
    monkeypatch.setattr(gradients_module, "student_inputs", poisoned)
    with pytest.raises(NonFiniteLoss, match="step 4"):
        run(tiny_recipe(trainer__steps=6), tmp_path / "run", display)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [2]


def test_a_finite_loss_with_a_gradient_that_is_not_stops_before_the_weights_are_touched_and_saved(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gradients_module.student_inputs

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        if len(display.steps) == 3:
            inputs.support.student_logprobs.register_hook(lambda gradient: gradient * math.nan)
        return inputs

    display = Silent()
    monkeypatch.setattr(gradients_module, "student_inputs", poisoned)
    with pytest.raises(
        NonFiniteLoss, match="step 4: the gradient of the loss 'topk_reverse_kl' is nan"
    ):
        run(tiny_recipe(trainer__steps=6), tmp_path / "run", display)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [2]
