"""The adapter of a trainer process: everything that its hooks share, in one object."""

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from prime_composer.losses import require_inputs, setup_loss_fn
from prime_composer.losses.needs import START_ADAPTER
from prime_composer.upstream import launches
from prime_composer.upstream.keys import PROMPTS_KEY, SECTION, SWITCH, TOKENIZERS_KEY
from prime_composer.upstream.log import log
from prime_composer.upstream.settings import (
    EXAMPLE,
    FILE_KEY,
    AdapterSettings,
    parse_loss_table,
    split_table,
    wire_support_size,
)
from prime_composer.upstream.silent_hook import DOCTOR, SilentHook
from prime_composer.upstream.trainer.batches import (
    PackedMicroBatch,
    Questions,
    TrackedBatches,
    distilled_of,
    refuse_sampling_mask,
)
from prime_composer.upstream.trainer.binding import RegisteredLoss
from prime_composer.upstream.trainer.journal import Journal
from prime_composer.upstream.trainer.questions import StepAnswers, TeacherConnections, wanted_of
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.records import LOSS_MODULE, probe_contract

WITHOUT_BATCH = (
    "prime_composer: prime-rl computes a loss, and on no micro-batch that get_batch of "
    "prime_rl.trainer.rl.data returned: this prime-rl's train loop gets its batches in another "
    f"way, or not one by one. {DOCTOR}"
)


class Shard(NamedTuple):
    """This rank's place in context parallelism."""

    rank: int  # index of the shard
    size: int  # number of shards
    group: Any  # process group of all shards of a sequence


class TrainerAdapter:
    """State of the adapter in one trainer process.

    Two roads lead here. With the *whole-run adapter*, hooks on prime-rl's modules bring supports.
    With the *plain launcher* (``plain_launcher``) a loss is registered and nothing else.

    A step has ended when the next batch is asked for: prime-rl's train loop calls
    ``DataLoader.wait_for_batch`` and then ``get_batch`` once per step (38494ccb
    trainer/rl/train.py:335 and 342, 559b4477:282). So the last step of a run has no end here, and
    its state is not kept.

    A batch with tokens for the loss in which the loss was not called ends the run. That is judged
    where ``compute_loss`` returns, before a gradient exists. Where prime-rl does not run the
    ``compute_loss`` that is hooked, it is judged when the next batch is asked for, or at the end of
    the process. The rule is each rank's own, and reads nothing on the device.
    """

    def __init__(self, settings: AdapterSettings | None = None):
        self.settings = settings
        self.whole_run = False  # the hooks that bring supports are in place
        self.k = 0  # size of the registered loss's support, 0 for none
        self.loss: RegisteredLoss | None = None
        self.micro_batch: PackedMicroBatch | None = None  # the one in flight
        self.shard: Shard | None = None  # this rank's; None without context parallelism
        self.model: Any = None  # prime-rl's, once it has run
        self.steps = 0  # batches that were asked for
        self.journal: Journal | None = None  # None for a loss without a state
        self.tokens: list[int] = []  # for the loss, of each micro-batch of the last batch
        self.calls = 0  # of the loss, on the last batch
        self._in_flight = 0, 0  # tokens of the micro-batch in flight, and calls before it
        self._batches = TrackedBatches((), self.begin)
        self._asked = False
        self._reported = False
        self._warned_of_temperature = False
        self._teachers: TeacherConnections | None = None
        self._answers: StepAnswers | None = None

    def register(self, table: Mapping[str, Any], in_file: bool = False) -> RegisteredLoss:
        """Bind a loss to the tokens that it is for.

        A loss that compares with a teacher gets the distillation tokens. Another one gets the rl
        tokens where ``[trainer.loss] import_path`` names ``prime_composer.upstream.loss_fn``, and
        leaves prime-rl's own distillation alone. Where the kinds are separate, a loss of rewards
        and a teacher gets the rl tokens as well. The adapter's orchestrator makes its tokens rl
        tokens, so that distillation tokens are refused.

        Replaces ``prime_rl.trainer.rl.loss.opd_loss_fn`` (38494ccb, loss.py:197) or
        ``ref_kl_loss_fn`` (559b4477, loss.py:199); prime-rl resolves both names later.
        TODO(prime-rl): remove once ``[trainer.loss]`` reaches distillation tokens.
        """
        module = sys.modules.get(LOSS_MODULE) or importlib.import_module(LOSS_MODULE)
        contract = probe_contract(module)
        own_table, in_file_too = split_table(table)
        mixed = "teachers_mixed" in in_file_too or (
            self.settings is not None and self.settings.needs_orchestrator
        )
        config = parse_loss_table(own_table)
        if self.loss is not None and self.loss.objective.config != config:
            raise ValueError(
                f"Two losses for one trainer: {self.loss.objective.config!r} is registered "
                f"already, and [{SECTION}] has {config!r}: keep one of {SWITCH} and [trainer.loss]."
            )
        of_adapter = {
            'asked_by = "trainer"': in_file_too.get("asked_by") == "trainer",
            TOKENIZERS_KEY: TOKENIZERS_KEY in in_file_too,
            PROMPTS_KEY: PROMPTS_KEY in in_file_too,
            f"{FILE_KEY} = true": mixed,
        }
        lost = [key for key, is_set in of_adapter.items() if is_set and not self.whole_run]
        if lost:
            raise ValueError(
                f"[{SECTION}] {lost[0]} is a setting of the adapter, and without it prime-rl would "
                f"ask one teacher for all, in the student's tokens. {START_ADAPTER}"
            )
        registered = self.loss
        bound = registered is not None and (
            not registered.distils or getattr(module, contract.slot) is registered
        )
        if registered is not None and bound:
            registered.in_file |= in_file
            registered.teachers_mixed |= mixed
            return registered
        available = contract.provides(config, self.whole_run)
        require_inputs(config, available, "prime_rl", section=SECTION)
        if self.whole_run:
            self.k = wire_support_size(config)
        registered = RegisteredLoss(
            setup_loss_fn(config, SECTION),
            contract,
            module.LossOutputs,
            self.called,
            self.aligned if self.whole_run else None,
            in_file,
            mixed,
        )
        if registered.compares:
            in_slot = registered if registered.distils else registered.no_distillation_tokens
            capabilities.replace(capabilities.SLOT, module, lambda _: in_slot)
        tokens = f"distillation tokens ({contract.slot})" if registered.distils else "rl tokens"
        log(f"{config.type} registered for {tokens}")
        self.loss = registered
        return registered

    def open_journal(self, output_dir: Path, start_step: int) -> None:
        """Restore the state of the loss, if it has one, and keep it from now on."""
        if self.loss is not None and self.loss.objective.stateful:
            self.journal = Journal(output_dir, start_step)
            self.journal.restore(self.loss.objective)

    def ask_for_batch(self) -> None:
        """End the step of the last batch, and begin the one of the next.

        prime-rl's loop waits for a batch, then gets it. Whichever comes first ends the step, so
        that its state is kept before the trainer waits.
        """
        if self._asked:
            return
        self._asked = True
        self._judge(sum(self.tokens), self.calls)
        if self.loss is not None:
            if self.steps > 0:
                self.loss.objective.end_step()
            if self.steps == 1:
                launches.judge_ranks(self.loss.compares)
            if self.journal is not None:
                step = self.journal.start_step + self.steps
                self.journal.keep(step, self.loss.objective)
        self.steps += 1

    def batch_came(self, batches: Sequence[dict[str, Any]]) -> TrackedBatches:
        """Note a batch, and return it so that its micro-batches are reported. All ranks call it.

        The next call of ``ask_for_batch`` counts. Where the trainer asks the teachers, the first
        questions are sent.
        """
        self._asked = False
        self._batches = TrackedBatches(batches, self.begin)
        self.tokens, self.calls, self._in_flight = [], 0, (0, 0)
        if self.loss is not None:
            launches.mark(launches.TRAINER + os.environ.get("RANK", "0"))
            self.tokens = self.loss.batch_came(batches, self.steps)
            atexit.unregister(judge_at_exit)
            atexit.register(judge_at_exit)
            if self.k or self.loss.objective.config.reads_hidden_states:
                for tensors in batches:
                    refuse_sampling_mask(tensors)
            self._ask_teachers(batches)
        return self._batches

    def _judge(self, tokens: int, calls: int) -> None:
        """Check that the loss was called, where some tokens are for it."""
        if self.loss is None or not tokens or calls:
            return
        where = "as the loss of [trainer.loss]"
        if self.loss.distils:
            where = f"in the place of {LOSS_MODULE}.{self.loss.contract.slot}"
        raise SilentHook(
            f"prime_composer: {self.loss.label}: {tokens} tokens of this rank's batch {self.steps} "
            "are for this loss, and prime-rl has not called it: another loss was computed, or "
            f"none. The loss is registered {where}, and this prime-rl takes its loss from "
            f"elsewhere. Do not use what this run has trained. {DOCTOR}"
        )

    def called(self) -> None:
        self.calls += 1

    def judge_micro_batch(self) -> None:
        """Check, after its ``compute_loss``, that the micro-batch in flight reached the loss."""
        tokens, before = self._in_flight
        self._judge(tokens, self.calls - before)
        every = sum(self.tokens)
        if self.loss is not None and not self._reported and self.calls and every:
            self._reported = True
            log(
                f"{self.loss.objective.config.type} was called for the first time, in step "
                f"{self.steps}, which has {every} tokens for it on this rank"
            )

    def judge_last_batch(self) -> None:
        """Check the last batch, unless an error ended its step before it had trained."""
        if not self._asked and self._batches.trained:
            self._judge(sum(self.tokens), self.calls)

    def _ask_teachers(self, batches: Sequence[dict[str, Any]]) -> None:
        hidden = self.loss is not None and self.loss.objective.config.reads_hidden_states
        asks = hidden or (self.settings is not None and self.settings.trainer_asks)
        if not self.whole_run or self.loss is None or not self.loss.compares or not asks:
            return
        self._teachers = self._teachers or self._open_teachers(hidden)
        entries, on_rl_tokens = self._teachers.entries, self._on_rl_tokens
        self._answers = StepAnswers(
            self._teachers,
            [
                wanted_of(tensors, distilled_of(tensors, on_rl_tokens), entries)
                for tensors in batches
            ],
        )

    def _open_teachers(self, hidden: bool) -> TeacherConnections:
        settings = self.settings or AdapterSettings()
        if settings.teachers is None:
            example = '"teachers": [{"url": "http://host:8001/v1", "model": "NAME", "weight": 1}]'
            raise ValueError(
                f"{SWITCH}: the trainer asks the teachers and does not know them. prime-rl's "
                "launcher `rl` fills them in. Where processes are started one by one, add "
                f"{example} to the JSON object: {EXAMPLE}"
            )
        return TeacherConnections(
            settings.teachers,
            self.k,
            hidden,
            settings.head_on or "device",
            (settings.teacher_prompts or {}).keys(),
        )

    @property
    def _on_rl_tokens(self) -> bool:
        return self.loss is not None and self.loss.compares and not self.loss.distils

    def begin(self, tensors: dict[str, Any] | None) -> None:
        """Set the micro-batch in flight; None where a loop over them has ended."""
        self._in_flight = 0, self.calls
        if tensors is None:
            self.micro_batch = None
            return
        number = None if self.loss is None else self._batches.number_of(tensors)
        if number is not None:
            self._in_flight = self.tokens[number], self.calls
        questions = None
        if self._answers is not None and self._teachers is not None and number is not None:
            take = self._answers.take
            questions = Questions(self._teachers, lambda: take(number))
        stop_ids = () if self.loss is None else self.loss.objective.config.stop_ids
        self.micro_batch = PackedMicroBatch(
            tensors, self.k, self._on_rl_tokens, questions, stop_ids
        )

    def warn_of_temperature(self) -> None:
        """Say once that rollouts were sampled at a temperature at which the teacher is not."""
        batch = self.micro_batch
        if self._warned_of_temperature or batch is None or not batch.has_other_temperatures:
            return
        self._warned_of_temperature = True
        if batch.reads_hidden_states:
            log(
                'the rollouts\' temperature is not 1: importance ratios have it, and k = "full" '
                "compares student and teacher at the temperature of the loss, which is 1 unless "
                "its table sets `temperature`"
            )
            return
        log(
            "the rollouts' temperature is not 1: prime-rl's trainer takes log-probs at that "
            "temperature and the teacher scores at 1, so the divergence compares two temperatures"
        )

    def aligned(self, trainer_logprobs: Tensor) -> dict[str, Any]:
        """Return our fields of a sequence of the micro-batch in flight, where there is one."""
        if self.micro_batch is None:
            return {}
        return self.micro_batch.aligned(trainer_logprobs, self.model)

    def check_batch(self) -> None:
        """Check, where no micro-batch is in flight, that no train loop calls ``compute_loss``."""
        trains = self.model is not None or not self.whole_run
        if self.loss is not None and (self.k or self.steps == 0) and trains:
            raise SilentHook(WITHOUT_BATCH)


@functools.cache
def trainer_adapter() -> TrainerAdapter:
    """Return the one adapter of this process; ``trainer_adapter.cache_clear()`` forgets it.

    Functions that ``register`` replaced stay as they are.
    """
    return TrainerAdapter(AdapterSettings.from_env())


def judge_at_exit() -> None:
    """Judge the last batch of a run whose ``compute_loss`` is not the one that is hooked.

    An exit function cannot change the exit status by raising.
    """
    try:
        trainer_adapter().judge_last_batch()
    except SilentHook as error:
        log(str(error).removeprefix("prime_composer: "), level="error")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
