"""trl's distillation trainer with the losses of this package, and a teacher of any kind."""

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prime_composer.backends.cpu_guard import hide_cuda_packages
from prime_composer.backends.hf_model import cap_attention, check_head, float32_head, lm_head_weight
from prime_composer.backends.transformers import fix_frequencies
from prime_composer.contract import Scores
from prime_composer.extras import pip_install
from prime_composer.losses import LossConfig, setup_loss_fn
from prime_composer.losses.shared.modifiers import with_token_ids
from prime_composer.problems.config import Problem
from prime_composer.step.batch import Sample
from prime_composer.step.gradients import (
    ForwardPass,
    MetricAverages,
    NonFiniteLoss,
    describe_non_finite,
    kl_metrics,
)
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.compatibility import check_ids
from prime_composer.teachers.policy import students_choice
from prime_composer.trl.batch import SCORES, rollouts_of
from prime_composer.trl.objective import check_arguments, read_loss
from prime_composer.trl.teacher import Teacher, check_teacher, ends_with, open_teacher, read_prompts

hide_cuda_packages()  # trl imports all of transformers
try:
    import trl
    from accelerate.utils import is_peft_model
    from transformers import ProcessorMixin, TrainerCallback
except ModuleNotFoundError as error:
    if error.name not in ("trl", "transformers"):
        raise
    raise ImportError(f"prime_composer.trl needs {error.name}: {pip_install('trl')}") from error

logger = logging.getLogger(__name__)

LOSS_STATE = "prime_composer_loss"  # Key in ``TrainerState.stateful_callbacks``, of checkpoints


class OnPolicyDistillationTrainer(trl.DistillationTrainer):
    """``trl.DistillationTrainer`` with another loss.

    Generation, data, optimizer, checkpoints and logging are trl's. With N trained tokens in an
    optimizer step, over all micro-batches and ranks, the step's gradient is that of
    (1/N) sum_t loss_t. Student and teacher are compared at temperature 1: ``args.temperature``
    decides how the student samples, and not the loss.

    Every step trains on samples of its own weights. So the probability of a sampled token is also
    that with which it was sampled, and importance ratios are 1.

    Args:
        loss: a ``LossConfig``, a ``[loss]`` table, its ``type`` alone, or a recipe file, whose
            ``[loss]`` is read.
        teacher_prompt: what the teacher reads in front of a completion, where it is not the
            student's prompt: a ``[teacher.prompt]`` table, such as ``{"chat_template": True}``.
        teacher_tokenizer: the teacher's tokenizer, whose template writes that. None: that of the
            directory or hub id in ``teacher_model``.
    """

    def __init__(
        self,
        model: Any,
        teacher_model: Teacher | None = None,
        args: Any = None,
        *,
        loss: LossConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        teacher_prompt: Mapping[str, Any] | None = None,
        teacher_tokenizer: Any = None,
        **others: Any,
    ):
        config = read_loss(dict(loss) if isinstance(loss, Mapping) else loss)
        super().__init__(model=model, args=args, **others)
        check_arguments(config, self.args)
        self._refuse_untested()
        student = self._student(self.model)
        with _in_eval_mode(student):
            check_head(student)
        capped = cap_attention(student)
        fix_frequencies(student, getattr(self.args, "vllm_max_model_length", None))
        config = self.loss_config = with_token_ids(config, self.processing_class)
        self.loss_fn = setup_loss_fn(config)
        self.scorer = open_teacher(teacher_model, self.args, self.accelerator.device, logger.info)
        assert teacher_model is not None
        vocab_size = lm_head_weight(student).shape[0]
        try:
            warnings = check_teacher(
                teacher_model, self.scorer, self.processing_class, vocab_size, config
            )
        except BaseException:
            if self.scorer is not teacher_model:
                self.scorer.close()
            raise
        warnings += capped + self._end_as_the_teacher(teacher_model)
        self._prompts = read_prompts(teacher_prompt, teacher_model, teacher_tokenizer)
        for warning in warnings:
            logger.warning(warning)
        self._averages = MetricAverages()
        self._computed = False
        self._logged: list[dict[str, float]] = []
        self.add_callback(_EndOfStep(self))

    def _end_as_the_teacher(self, teacher: Teacher) -> list[str]:
        """Let completions end where the chat template or the teacher ends them, too."""
        trainer: Any = self  # its attributes are trl's
        chosen = trainer.args.generation_kwargs or {}
        if "eos_token_id" in chosen or "stop_token_ids" in chosen:
            return []
        ends, lines = ends_with(teacher, trainer.processing_class, trainer.eos_token_ids)
        trainer.eos_token_ids = [*ends]
        trainer.generation_config.eos_token_id = [*ends]
        trainer.generation_kwargs["eos_token_id"] = [*ends]
        if trainer.use_vllm:
            trainer.vllm_generation.generation_kwargs |= {"stop_token_ids": [*ends]}
        return lines

    def _refuse_untested(self) -> None:
        sharded = {"FSDP": self.is_fsdp_enabled, "DeepSpeed": self.is_deepspeed_enabled}
        for name, is_enabled in sharded.items():
            if is_enabled:
                raise ValueError(
                    f"{name} shards the student's output head, which these losses read as a whole: "
                    "use one process, or several that each have the student (accelerate launch)."
                )
        if isinstance(self.processing_class, ProcessorMixin):
            raise ValueError(
                f"{type(self.processing_class).__name__} reads images, which the teacher would not "
                "see: pass a text model and its tokenizer."
            )

    def _student(self, model: Any) -> nn.Module:
        """Return the causal language model within a wrapper or a PEFT model."""
        unwrapped: Any = self.accelerator.unwrap_model(model)
        return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample completions as trl does, and have all of them scored at once."""
        with float32_head(self._student(self.model)):
            batch = super()._generate_and_score_completions(inputs)
        return batch | {SCORES: self._scores(batch, [one["prompt"] for one in inputs])}

    def _scores(self, batch: Mapping[str, Any], asked: Sequence[Any]) -> list[Scores]:
        rollouts = rollouts_of(batch, self.eos_token_ids)
        student = self._student(self.model)
        size, by_student = self.loss_config.asked_of_teacher
        candidates = None
        if by_student:
            with _in_eval_mode(student):
                shared = self.scorer.limits.vocab_size
                candidates = students_choice(student, rollouts, size, shared)
        scores = self.scorer.score(
            rollouts,
            size,
            None if self._prompts is None else [*map(self._prompts, asked)],
            candidate_ids=candidates,
            hidden=self.loss_config.reads_hidden_states,
        )
        for one in scores:
            check_ids(one, lm_head_weight(student).shape[0])
        return [
            dataclasses.replace(one, start=rollout.start)
            for one, rollout in zip(scores, rollouts, strict=True)
        ]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the micro-batch's part of the step's loss, a sum over tokens divided by N.

        Gradients are averaged over ranks, so that the divisor is N divided by their number. An
        evaluation divides by the tokens of its own batch.
        """
        # Through the wrapper's forward, where DistributedDataParallel prepares its backward.
        wrapped = self.accelerator.unwrap_model(model)
        loss, tokens, metrics = self._forward_redirection(
            model, wrapped, self._summed_loss, wrapped, inputs
        )
        self._averages.add(metrics, tokens)
        self._computed = True
        if model.training:
            divisor = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        else:
            divisor = max(1, tokens)
        loss = loss / divisor
        return (loss, None) if return_outputs else loss

    def _summed_loss(
        self, model: nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return the sum of the loss over the trained tokens, their number, and the metrics."""
        samples = [
            Sample(rollout, Problem("", ""), scores=scores)
            for rollout, scores in zip(
                rollouts_of(inputs, self.eos_token_ids), inputs[SCORES], strict=True
            )
        ]
        own = student_inputs(self._student(model), samples, stop_ids=self.loss_config.stop_ids)
        own = dataclasses.replace(own, inference_logprobs=own.trainer_logprobs.detach())
        tokens = own.loss_mask.shape[0]
        outputs = self.loss_fn(own)
        if not torch.isfinite(outputs.loss):
            micro_batch = ForwardPass(own, [f"row {row}" for row in range(len(samples))])
            step = self.state.global_step + 1
            raise NonFiniteLoss(describe_non_finite(self.loss_fn, micro_batch, outputs, step))
        return outputs.loss, tokens, outputs.metrics | kl_metrics(self.loss_fn, own)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log trl's metrics and the loss's own, under their names.

        In training they are means over the steps since the last time, of each step's value over its
        tokens. In an evaluation they are values over all its tokens, with ``eval_`` in front.
        """
        student: Any = self.model
        if student.training:
            for name in dict.fromkeys(name for row in self._logged for name in row):
                values = [row[name] for row in self._logged if name in row]
                logs[name] = math.fsum(values) / len(values)
            self._logged.clear()
        else:
            logs |= {f"eval_{name}": value for name, value in self._take_averages().items()}
        super().log(logs, start_time)

    def _take_averages(self) -> dict[str, float]:
        averages, self._averages = self._averages, MetricAverages()
        return averages.over_ranks().result()

    def _check_step(self) -> None:
        computed, self._computed = self._computed, False
        if not computed:
            raise RuntimeError(
                f"step {self.state.global_step + 1}: transformers or trl has computed a gradient "
                "and never called compute_loss, so that it is not that of the loss "
                f"{self.loss_config.type!r}. Nothing was trained on it. Install a trl that "
                f"prime_composer.trl supports ({pip_install('trl')})."
            )

    def _end_step(self) -> None:
        self._logged.append(self._take_averages())
        self.loss_fn.end_step()


class _EndOfStep(TrainerCallback):
    """Advances the loss's schedules after each optimizer step, and restores them on resume."""

    def __init__(self, trainer: OnPolicyDistillationTrainer):
        self._trainer = trainer
        self._first = trainer.loss_fn.state_dict()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the schedules of the checkpoint, or those of a new run."""
        self._trainer.loss_fn.load_state_dict(state.stateful_callbacks.get(LOSS_STATE, self._first))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a gradient that is not the loss's, before it changes a weight."""
        self._trainer._check_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the step's metrics, advance, and note the state for the next checkpoint."""
        self._trainer._end_step()
        if self._trainer.loss_fn.stateful:
            state.stateful_callbacks[LOSS_STATE] = self._trainer.loss_fn.state_dict()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Within the block, disable dropout and recomputed layers."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
