"""Runs, displays and samples of the one-machine engine's tests."""

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_composer.backends.hf_model import load_student
from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.contract import Scores
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.collect import Clock, Collector, Weights
from prime_composer.local.dry_run import dry_run
from prime_composer.local.engine import Engine
from prime_composer.local.opening import open_engine
from prime_composer.local.outcome import Outcome
from prime_composer.local.probe.report import ProbeReport
from prime_composer.local.probe.run import probe
from prime_composer.local.sources import load_sources
from prime_composer.local.train import train
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe
from prime_composer.samplers.transformers import TransformersSampler
from prime_composer.step.batch import Batch, Sample
from prime_composer.tiny_models.cache import prepare_models

VOCAB = 300
"""Vocabulary of TINY_RECIPE's models."""

DATA = DataConfig()
SOURCES = {"problems": DATA}
PROBLEM = Problem("Ada has 2 apples and buys 3 more. How many?", "2 + 3 = 5\n#### 5")


class Silent:
    """A display that shows nothing, records the finished steps, and may interrupt the run."""

    def __init__(self, interrupt_at: int | None = None, signum: int = signal.SIGINT):
        self.steps: list[int] = []
        self.texts: list[str] = []
        self.started: dict[str, float] = {}
        self.interrupt_at = interrupt_at
        self.signum = signum

    def status(self, text: str) -> None:
        self.texts.append(text)

    def start(self, metrics: dict[str, float]) -> None:
        self.started = metrics

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        if step + 1 == self.interrupt_at:
            os.kill(os.getpid(), self.signum)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    error: Exception,
    lasting: bool = False,
) -> None:
    """Let the given call of a function, counted from 1, raise; or all from it on."""
    original, calls = getattr(owner, name), []

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call or (lasting and len(calls) > call):
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)


def stop_taking_weights(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the sampler ignore all weights after so many; the preflight sends two."""
    update, syncs = TransformersSampler.update_weights, []

    def stuck(sampler: TransformersSampler, model: Any) -> None:
        syncs.append(1)
        if len(syncs) <= after:
            update(sampler, model)

    monkeypatch.setattr(TransformersSampler, "update_weights", stuck)


def collect(
    engine: Engine, recipe: Recipe, step: int, clock: Clock | None = None
) -> tuple[Batch, dict[str, float]]:
    """Return the batch of a step as a run collects it, and what was measured."""
    collector = Collector(engine, recipe)
    collected = collector.collect(step, Weights(step - 1, engine.model), clock or Clock())
    return collected.batch, collected.metrics


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


def run(
    raw: dict[str, Any], run_dir: Path, display: Silent | None = None, resume: bool = False
) -> Outcome:
    """Train a recipe given as tables; ``resume`` continues the newest checkpoint."""
    run_dir.mkdir(exist_ok=True)
    checkpoint = list_checkpoints(run_dir)[-1] if resume else None
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    return train(recipe, problems, paths, run_dir, display or Silent(), resume=checkpoint)


class Narrow:
    """A teacher's scorer with a smaller window, which records the lengths that it reads."""

    gives_any_ids = True

    def __init__(self, scorer: Any, window: int):
        self.scorer, self.sampler = scorer, scorer.sampler
        self.limits = Limits(window, scorer.limits.vocab_size, scorer.limits.max_logprobs)
        self.lengths: list[int] = []

    def score(self, rollouts: Any, *arguments: Any, **options: Any) -> list[Scores]:
        self.lengths += [len(rollout.token_ids) for rollout in rollouts]
        assert all(length < self.limits.max_model_len for length in self.lengths)
        return self.scorer.score(rollouts, *arguments, **options)

    def close(self) -> None:
        self.scorer.close()


def opened(raw: dict[str, Any], **how: Any) -> Engine:
    """Return the open models of a recipe given as tables."""
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    return open_engine(recipe, problems, prepare_models(recipe, problems), lambda _: None, **how)


def open_run(raw: dict[str, Any]) -> tuple[Recipe, Engine]:
    """Return a recipe given as tables, and its open models."""
    return parse_recipe(raw), opened(raw)


def planned(raw: dict[str, Any]) -> list[str]:
    """Return what a dry run says of a recipe given as tables."""
    recipe = parse_recipe(raw)
    return dry_run(recipe, load_problem_set(recipe.sources))


def probed(raw: dict[str, Any], status: Callable[[str], None] = lambda text: None) -> ProbeReport:
    """Probe a recipe given as tables, with a hundredth of a second per column."""
    recipe = parse_recipe(raw)
    problems = load_sources(recipe)
    return probe(recipe, problems, prepare_models(recipe, problems), status, 0.01)


def copy_first_half(whole: Path, cut: Path) -> None:
    """Make ``cut`` the run directory that ``whole`` was after the checkpoint of its second step."""
    (cut / "checkpoints").mkdir(parents=True)
    checkpoint = Path("checkpoints") / "step_000002"
    (whole / checkpoint).rename(cut / checkpoint)
    (cut / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text())


def tiny_models(raw: dict[str, Any]) -> dict[str, Path]:
    """Return the prepared models of a recipe given as tables."""
    recipe = parse_recipe(raw)
    return prepare_models(recipe, load_problem_set(recipe.sources))


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    model, _ = load_student(list_checkpoints(run_dir)[-1].path)
    return model.state_dict()


def rollout(group: int, ids: tuple[int, ...] = (5, 6, 7, 8)) -> Rollout:
    """Return a rollout with a prompt of two tokens."""
    mask = torch.arange(len(ids)) >= 2
    return Rollout(torch.tensor(ids), mask, torch.where(mask, -1.0, torch.nan), "stop", group)


def sample(
    group: int, reward: float = 0.0, ids: tuple[int, ...] = (5, 6, 7, 8), text: str = ""
) -> Sample:
    """Return a sample without scores."""
    return Sample(rollout(group, ids), PROBLEM, text, reward)


def random_samples(lengths: list[tuple[int, int]], k: int) -> list[Sample]:
    """Return random rollouts with a random teacher's normalized scores, in float64.

    Args:
        lengths: tokens of prompt and completion of each.
        k: size of the support.
    """
    generator = torch.Generator().manual_seed(7)
    samples = []
    for index, (prompt, completion) in enumerate(lengths):
        n = prompt + completion
        ids = torch.randint(0, VOCAB, (n,), generator=generator)
        logits = torch.randn(n, VOCAB, generator=generator, dtype=torch.float64)
        teacher = logits.mul(2).log_softmax(-1)
        mask = torch.arange(n) >= prompt
        nan = torch.full((n,), math.nan, dtype=torch.float64)
        mu = torch.where(mask, -torch.rand(n, generator=generator, dtype=torch.float64) * 3, nan)
        own = teacher.gather(-1, ids[:, None])[prompt:, 0]
        top = teacher[prompt:].topk(k)
        scores = Scores(own, top.indices, top.values)
        samples.append(Sample(Rollout(ids, mask, mu, "stop", index), PROBLEM, scores=scores))
    return samples


def save_padded(folder: Path, extra: int, target: Path) -> Path:
    """Save a copy of a model whose head has ``extra`` more rows, which are as probable as others.

    Each is nearly the row of another id, so that no two are equally probable. The tokenizer stays.
    """
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + extra, mean_resizing=False)
    twins = torch.randperm(size, generator=torch.Generator().manual_seed(extra))[:extra]
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[size:] = 1.1 * weight[twins]
    model.save_pretrained(target)
    return target


def plain_overlap(log_p: Tensor, log_q: Tensor, k: int, shared: int) -> tuple[float, float]:
    """Return overlap and advantage per token, by sets of the ids that both have, in float64."""
    shares, advantages = [], []
    for of_p, of_q in zip(log_p.double().tolist(), log_q.double().tolist(), strict=True):
        tops = [sorted(enumerate(x), key=lambda one: -one[1])[:k] for x in (of_p[:shared], of_q)]
        common = {i for i, _ in tops[0]} & {i for i, _ in tops[1]}
        p, q = ([math.exp(x[i]) for i in common] for x in (of_p, of_q))
        terms = [
            a / sum(p) * math.log(b / sum(q) / (a / sum(p))) for a, b in zip(p, q, strict=True)
        ]
        shares.append(len(common) / k)
        advantages.append(sum(terms) / max(1, len(common)))
    return sum(shares) / len(shares), sum(advantages) / len(shares)
