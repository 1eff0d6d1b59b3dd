"""Opens what a recipe names: the student and its sampler, the teacher and its scorer."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from prime_composer.backends.mixture import Teachers
from prime_composer.backends.protocols import (
    Rollout,
    Sampler,
    SamplingParams,
    Scorer,
    TeacherScores,
)
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.local.replay import Pair, read_pairs, response
from prime_composer.losses.base import LossConfig
from prime_composer.problems.config import Problem
from prime_composer.recipe.schema import ModelConfig, Recipe, TeacherConfig, spoken
from prime_composer.tiny_models.cache import prepare_model


@dataclass
class Engine:
    """Everything that runs a model, open.

    Attributes:
        recipe: what was opened.
        model: the student that trains; its tokenizer beside it.
        sampler: samples the student's rollouts.
        teachers: score them with models of their own; None where the loss needs none.
        policy_teacher: scores them with the policy itself, told more; None without ``[teacher.policy]``.
        reference: the frozen policy of the replay channel's loss, where that needs one.
        pairs: preference pairs of a file.
        stop_token_ids: what ends a completion beyond the engine's own EOS.
    """

    recipe: Recipe
    model: nn.Module
    tokenizer: Any
    sampler: Sampler
    teachers: Teachers | None = None
    policy_teacher: PolicyTeacher | None = None
    reference: nn.Module | None = None
    pairs: Sequence[Pair] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    def decode(self, rollout: Rollout) -> str:
        """The completion as text, without special tokens."""
        return self.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)

    def score(
        self,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        problems: Sequence[Problem],
        rewards: Sequence[float],
    ) -> tuple[list[int], list[TeacherScores] | None]:
        """Which rollouts have a teacher, and its scores of those; every one and None where the loss needs no teacher.

        Only a policy teacher leaves rollouts out: those that it has no hint for.
        """
        everything = list(range(len(rollouts)))
        size = self.recipe.loss.support_size
        if self.teachers is not None:
            return everything, self.teachers.score(rollouts, problems, size)
        if self.policy_teacher is None:
            return everything, None
        hints = self.policy_teacher.hints(rollouts, texts, problems, rewards)
        told = [index for index, hint in enumerate(hints) if hint is not None]
        if not told:
            return [], []
        prompts = [
            self.policy_teacher.prompt(problems[i], hints[i], texts[i].strip()) for i in told
        ]
        k = student_support_size(self.recipe.loss)
        return told, self.policy_teacher.score(
            [rollouts[i] for i in told],
            prompts,
            size if k is None else k,
            chosen_by_student=k is not None,
        )

    def end_step(self, step: int) -> None:
        """Give the new weights to the sampler, and to a teacher that follows the policy."""
        self.sampler.update_weights(self.model)
        if self.policy_teacher is not None:
            self.policy_teacher.end_step(step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside the student: the weights of a teacher that moves."""
        return {} if self.policy_teacher is None else self.policy_teacher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.policy_teacher is not None:
            self.policy_teacher.load_state_dict(state)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        for part in (self.sampler, self.teachers):
            if part is not None:
                part.close()


def student_support_size(loss: LossConfig) -> int | None:
    """K where the loss wants the student to choose the support and K is less than the vocabulary; None otherwise."""
    k = getattr(loss, "k", None)
    return k if getattr(loss, "chosen_by", "teacher") == "student" and k != "full" else None


def open_engine(
    recipe: Recipe, status: Callable[[str], None], student_dir: Path | None = None
) -> Engine:
    """Load the student for training, and open its sampler and the teacher's scorer.

    Args:
        recipe: what to open.
        status: told what is being waited for.
        student_dir: the student's weights of a checkpoint; None for the recipe's own.
    """
    from prime_composer.backends.hf_model import checkpoint_layers, load_student

    origin = model_dir(recipe.student, recipe)
    status(f"loading the student from {student_dir or origin}")
    model, tokenizer = load_student(student_dir or origin, dtype="float32")
    if recipe.trainer.gradient_checkpointing:
        checkpoint_layers(model)
    status(f"opening the {recipe.rollout.backend} sampler")
    sampler = open_sampler(recipe, origin)
    if student_dir is not None:
        sampler.update_weights(model)
    engine = Engine(recipe, model, tokenizer, sampler)
    if recipe.teacher is not None and recipe.teacher.policy is not None:
        engine.policy_teacher = PolicyTeacher(
            recipe.teacher.policy, recipe.sources, model, tokenizer
        )
    elif {"support", "ref_logprobs"} & recipe.loss.needs:
        scorers = {}
        engine.teachers = Teachers(scorers, recipe.mixture)
        for role, teacher in recipe.scored_by.items():
            status(f"opening the {spoken(role)}'s {teacher_backend(teacher, recipe)} scorer")
            scorers[role] = open_scorer(teacher, recipe)
    if "replay" in recipe.loss.needs:
        if "ref_logprobs" in recipe.loss.replay.loss.needs:
            engine.reference = load_student(origin, dtype="float32")[0].requires_grad_(False)
        if recipe.replay.path is not None:
            engine.pairs = read_pairs(recipe.replay.path, recipe.sources, tokenizer)
    return engine


def open_sampler(recipe: Recipe, origin: str | Path) -> Sampler:
    """What samples the student, on the recipe's backend, from the weights at ``origin``."""
    config = recipe.rollout
    if config.backend == "server":
        from prime_composer.backends.vllm_server import ServerSampler

        key = os.environ.get(config.api_key_var)
        return ServerSampler(
            config.url, model=str(origin), weights_dir=config.weights_dir, api_key=key
        )
    if config.backend == "vllm":
        from prime_composer.backends.vllm import VLLMSampler

        return VLLMSampler(
            origin,
            dtype=recipe.trainer.dtype,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )
    from prime_composer.backends.transformers import TransformersSampler

    return TransformersSampler(
        origin, dtype=recipe.trainer.dtype, max_model_len=config.max_model_len
    )


def open_scorer(teacher: TeacherConfig, recipe: Recipe) -> Scorer:
    """What scores with a teacher, able to answer the loss's K and the evaluation's."""
    origin = model_dir(teacher, recipe)
    backend = teacher_backend(teacher, recipe)
    dtype = teacher.dtype or recipe.trainer.dtype
    if backend == "server":
        from prime_composer.backends.vllm_server import ServerScorer

        return ServerScorer(
            teacher.url, model=str(origin), api_key=os.environ.get(teacher.api_key_var)
        )
    if backend == "vllm":
        from prime_composer.backends.vllm import VLLMScorer

        return VLLMScorer(
            origin,
            dtype=dtype,
            max_model_len=recipe.rollout.max_model_len,
            max_logprobs="full",
            gpu_memory_utilization=teacher.gpu_memory_utilization,
        )
    from prime_composer.backends.transformers import TransformersScorer

    return TransformersScorer(origin, dtype=dtype, max_model_len=recipe.rollout.max_model_len)


def preflight(
    engine: Engine,
    recipe: Recipe,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    status: Callable[[str], None],
) -> None:
    """Check that student, teacher, engines and prompts fit together, before the first step; tell the warnings.

    Raises:
        PreflightError: they do not; one sentence with the remedy.
    """
    from prime_composer.backends.hf_model import load_tokenizer
    from prime_composer.local.preflight import PreflightError
    from prime_composer.local.preflight import preflight as check

    for section, (name, _) in recipe.loss.needs_by_section().items():
        if name == "sft" and recipe.rollout.student_fraction == 1:
            raise PreflightError(
                f"[{section}] type = 'sft' on the student's own samples has an expected gradient of 0, since nothing tells a "
                "good sample from a bad one; set rollout.student_fraction = 0 to train on the data's solutions."
            )
    if engine.policy_teacher is not None:
        policy, new_tokens = engine.policy_teacher, recipe.rollout.max_tokens
        if policy.config.hint == "sibling":  # a rollout's text, not the data's
            told = max(len(policy.prompt(problem, "")) for problem in problems) + new_tokens
        else:
            told = max(len(policy.best_prompt(problem)) for problem in problems)
        attempt = new_tokens if "{attempt}" in policy.config.text else 0
        needed = told + attempt + new_tokens
        if needed > recipe.rollout.max_model_len:
            raise PreflightError(
                f"The longest prompt with its hint has {told} tokens, with attempt and response up to {needed}; raise "
                f"rollout.max_model_len from {recipe.rollout.max_model_len} to {needed}, or shorten the hint's template."
            )
        positions = engine.model.config.get_text_config().max_position_embeddings
        if needed > positions:
            raise PreflightError(
                f"The longest prompt with its hint has {told} tokens, with attempt and response up to {needed}, and the "
                f"student has only {positions} positions; shorten the hint's template, or lower rollout.max_tokens."
            )
    teachers, asked = {}, {}
    if engine.teachers is not None:
        shares = [recipe.mixture(problem) for problem in problems]
        for role, scorer in engine.teachers.scorers.items():
            teachers[role] = (scorer, load_tokenizer(model_dir(recipe.scored_by[role], recipe)))
            mine = [index for index, share in enumerate(shares) if role in share]
            asked[role] = [prompts[index] for index in mine]
            limit = getattr(scorer, "max_model_len", None)
            if recipe.rollout.student_fraction == 1 or limit is None or not mine:
                continue
            longest = max(
                len(
                    response(
                        prompts[i],
                        problems[i].answer,
                        recipe.data_of(problems[i]),
                        engine.tokenizer,
                        0,
                    ).token_ids
                )
                for i in mine
            )
            if longest >= limit:
                raise PreflightError(
                    f"The longest solution of the data has {longest} tokens with its prompt, and the {spoken(role)} takes "
                    f"{limit - 1}; raise rollout.max_model_len (a server's --max-model-len) to {longest + 1}, set "
                    "rollout.student_fraction = 1, or leave such problems out of the data."
                )
    found = check(
        model=engine.model,
        tokenizer=engine.tokenizer,
        sampler=engine.sampler,
        teachers=teachers,
        prompts=prompts,
        asked=asked,
        params=SamplingParams(
            temperature=recipe.rollout.temperature,
            top_p=recipe.rollout.top_p,
            max_tokens=recipe.rollout.max_tokens,
        ),
        support_size=recipe.loss.support_size,
        engine_dtype=recipe.trainer.dtype,
    )
    for warning in found.warnings:
        status(f"warning: {warning}")
    difference = found.facts["sampler_trainer_difference"]
    status(
        f"preflight passed: after a weight sync, sampler and trainer differ by {difference:.1e} nat per token"
    )


def teacher_sampler(scorer: Scorer, teacher: TeacherConfig, recipe: Recipe) -> Sampler:
    """What generates with a teacher, to measure its accuracy once. On vLLM it is the scorer's own engine."""
    if hasattr(scorer, "generate"):
        return scorer
    server = {"url": teacher.url, "api_key_var": teacher.api_key_var}
    rollout = recipe.rollout.model_copy(
        update={"backend": teacher_backend(teacher, recipe), **server}
    )
    trainer = recipe.trainer.model_copy(update={"dtype": teacher.dtype or recipe.trainer.dtype})
    return open_sampler(
        recipe.model_copy(update={"rollout": rollout, "trainer": trainer}),
        model_dir(teacher, recipe),
    )


def teacher_backend(teacher: TeacherConfig, recipe: Recipe) -> str:
    """The teacher's backend: its own, "server" where it has a URL, or the rollout's."""
    if teacher.url is not None:
        return "server"
    return teacher.backend or recipe.rollout.backend


def model_dir(config: ModelConfig, recipe: Recipe) -> str | Path:
    """Where a model's weights lie: its directory or hub id, or what was prepared for the recipe."""
    return config.model if config.prepare is None else prepare_model(config.prepare, recipe.sources)
