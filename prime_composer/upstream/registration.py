"""Our losses inside prime-rl's trainer: translated at the door, bound where its tokens arrive, counted.

Two roads lead here, and a loss that was bound over either is a ``Registered``:

- *plain launcher*: ``[trainer.loss] type = "custom", import_path = "prime_composer.upstream.loss_fn"`` with our loss
  table as ``kwargs``. prime-rl imports the path in its ``setup_*`` function; ``enter`` sees that, and binds the loss to
  the distillation slot too, which no recipe key reaches (``opd_loss_fn``, ``ref_kl_loss_fn``).
- *whole-run adapter* (``hooks``): the same, plus the teacher's top-K support.
"""

import difflib
import functools
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, LossUnion, setup_loss_fn
from prime_composer.losses.base import Loss, LossConfig
from prime_composer.upstream.versions import (
    LOSS_MODULE,
    LossContract,
    expect,
    loss_contracts,
    probe_contract,
)
from prime_composer.upstream.switch import EXAMPLE, SECTION, SWITCH, needs_adapter
from prime_composer.upstream.wire import MARK

WITH_ADAPTER = (
    f"Start the run with the adapter: `prime-rl rl --config FILE --engine prime-rl`, or {SWITCH}=1 in front of prime-rl's own "
    "`rl @ FILE`."
)

PATIENCE = 10
"""Optimiser steps without a token for the loss, in a run that may have other tokens, before it is an error."""

SETUPS = frozenset(era.setup for era in loss_contracts())

Aligned = Callable[[Any], tuple[Tensor | None, Support | None]]
"""Finds the token ids and the support of upstream's ``LossInputs`` of one sequence."""


def distils(config: LossConfig) -> bool:
    """Whether a loss compares with a teacher."""
    return bool({"ref_logprobs", "support"} & config.needs)


class Registered:
    """One of our losses, callable with the ``LossInputs`` of either era, returning upstream's own ``LossOutputs``.

    Attributes:
        loss: the bound loss.
        calls: how often it ran since the last optimiser step.
        steps: optimiser steps since it was registered.
        seen: a token has come, on any rank.
        in_file: ``[trainer.loss]`` names it; else rl tokens have a loss of their own.
        distils: the loss compares with a teacher: distillation tokens are its own, rl tokens are not.
        journal: where the adapter keeps the state of a schedule.
        expects_mark: the orchestrator has to run with the adapter too, whatever the loss reads.
    """

    def __init__(
        self,
        loss: Loss,
        era: LossContract,
        outputs: type,
        aligned: Aligned | None = None,
        expects_mark: bool = False,
    ):
        self.loss = loss
        self.era = era
        self.calls = 0
        self.steps = 0
        self.seen = False
        self.in_file = False
        self.distils = distils(loss.config)
        self.journal: Any = None
        self.expects_mark = expects_mark
        self._outputs = outputs
        self._aligned = aligned
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._firsts: list[Tensor] = []

    def __call__(self, inputs: Any) -> Any:
        """``loss`` of one sequence: the SUM over ``loss_mask``, weighted by ``loss_weights`` where the era has them."""
        ref_logprobs = getattr(inputs, self.era.ref_field)
        token_ids, support = (None, None) if self._aligned is None else self._aligned(inputs)
        out = self.loss(
            LossInputs(
                trainer_logprobs=inputs.trainer_logprobs,
                inference_logprobs=inputs.inference_logprobs,
                ref_logprobs=ref_logprobs,
                advantages=inputs.advantages,
                loss_mask=inputs.loss_mask,
                loss_weights=getattr(inputs, "loss_weights", None),
                support=support,
                token_ids=token_ids,
            )
        )
        self.calls += 1
        if not self.seen and ref_logprobs is not None:
            self._firsts.append(ref_logprobs[:1])
        self._sums.append(out.loss.detach())
        self._counts.append(inputs.loss_mask.sum())
        return self._outputs(loss=out.loss, metrics=out.metrics)

    def rl_tokens(self, inputs: Any) -> Any:
        """What prime-rl's rl loss is where ``[trainer.loss]`` names us.

        Raises:
            ValueError: tokens of an rl environment reached a loss that compares with a teacher. From v0.7 on a run may have
                both kinds, and prime-rl fills the teacher's log-probs of rl tokens that share a bin with 0.0.
        """
        if (
            self.distils and self.era.name != "v0.6" and bool(inputs.loss_mask.any())
        ):  # padding batches come here too
            raise ValueError(
                f"[{self.loss.section}] type = {self.loss.config.type!r} compares with a teacher, and tokens of an rl "
                'environment reached it. Distillation environments have algo.type = "opd" (or "opsd"). In a run that has both '
                "kinds, leave [trainer.loss] to the loss of rl tokens, and name this one in the environment: "
                f"{EXAMPLE} rl @ FILE"
            )
        return self(inputs)

    def end_step(self) -> None:
        """Close one optimiser step: log the first one with tokens of this loss, advance a schedule.

        Raises:
            RuntimeError: the first step ended (in a run that may have tokens of another loss, the tenth) and no token came, on
                any rank; or no sequence has the mark of an orchestrator with the adapter that this run needs.
        """
        self.steps += 1
        if not self.seen or self.loss.state is not None:
            total, tokens, calls, scored, marked = self._global_totals()
            if not self.seen:
                self._first_tokens(tokens, calls, scored, marked)
            if tokens > 0:
                self.loss.end_step(total / tokens)
            if self.journal is not None:
                self.journal.keep(self.steps, self.loss)
        self.calls = 0
        self._sums, self._counts, self._firsts = [], [], []

    def _first_tokens(self, tokens: float, calls: float, scored: float, marked: float) -> None:
        section, kind = self.loss.section, self.loss.config.type
        self.seen = tokens > 0
        if self.seen and self.expects_mark and scored > 0 and marked == 0:
            raise RuntimeError(
                f"prime_composer: [{section}] adapter = true: this run's teachers are mixed or routed by the adapter, and the "
                f"orchestrator runs without it: prime-rl has asked one of them for all. Set {SWITCH} for every process of the "
                "run, and see that prime-composer is installed in the orchestrator's environment."
            )
        if self.seen:
            said = (
                "in the first step"
                if self.steps == 1
                else f"in step {self.steps}, the first with tokens for it"
            )
            say(
                f"{kind} was called {calls:.0f} times on {tokens:.0f} tokens {said}, by all ranks together"
            )
            return
        alone = self.in_file and (self.distils or self.era.name == "v0.6")
        patience = 1 if alone else PATIENCE
        if self.steps < patience:
            say(
                f"{kind} was not called in step {self.steps}: no token for it in the batch (the run ends after {patience} such)"
            )
            return
        if not self.distils:
            remedy = "It is a loss of rl tokens: [orchestrator.algo] of an rl algorithm (v0.6: training_mode)."
        elif self.era.name == "v0.6":
            remedy = 'Distillation tokens come from [orchestrator] training_mode = "opd".'
        else:
            remedy = 'Distillation tokens come from [orchestrator.algo] type = "opd" (or "opsd").'
        steps = (
            "the first optimiser step" if patience == 1 else f"the first {patience} optimiser steps"
        )
        raise RuntimeError(
            f"prime_composer: [{section}] type = {kind!r} was registered with prime-rl and never called in {steps}: no token "
            f"was sent to the {'distillation' if self.distils else 'rl'} loss. {remedy}"
        )

    def _global_totals(self) -> list[float]:
        """Loss sum, tokens, calls, sequences with teacher scores and with the orchestrator's mark of this step, over all
        ranks (a rank may have had nothing but padding)."""
        local = [float(sum(part)) for part in (self._sums, self._counts)]
        local += [
            float(self.calls),
            float(len(self._firsts)),
            float(sum((first == MARK).sum() for first in self._firsts)),
        ]
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return local
        device = self._sums[0].device if self._sums else torch.get_default_device()
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        totals = torch.tensor(local, dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        return totals.tolist()


_registered: Registered | None = None
_step_hook: Any = None


def current() -> Registered | None:
    """The loss that is registered in this process."""
    return _registered


def parse_loss(table: dict[str, Any], section: str = SECTION) -> LossConfig:
    """The loss table of a recipe, checked; ``adapter``, which is no part of the loss, is passed by (see ``register``).
    Strings are taken for numbers where a number belongs: prime-rl's command line (``--trainer.loss.kwargs.k 32``)
    delivers strings.

    Raises:
        ValueError: no or an unknown ``type`` (the message lists the choices), an unknown key (it names the nearest).
    """
    try:
        return _ADAPTER.validate_python(
            {key: value for key, value in table.items() if key != "adapter"}
        )
    except ValidationError as error:
        raise ValueError(
            "; ".join(_explain(item, table, section) for item in error.errors())
        ) from None


_ADAPTER: TypeAdapter[Any] = TypeAdapter(LossUnion)


def _explain(item: Any, table: dict[str, Any], section: str) -> str:
    kind = table.get("type")
    if kind not in LOSS_TYPES:
        near = difflib.get_close_matches(str(kind), LOSS_TYPES, n=1)
        said = "has no `type`" if kind is None else f"has the unknown type {kind!r}"
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"[{section}] {said}.{hint} The losses are: {', '.join(sorted(LOSS_TYPES))}"
    path = [str(part) for part in item["loc"] if part not in LOSS_TYPES]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        known = LOSS_TYPES[kind].model_fields
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"{kind} takes: {', '.join(known)}"
        return f"[{section}] has the unknown key {key!r}; {hint}"
    return f"[{section}] {key}: {item['msg']}"


def register(table: dict[str, Any], section: str = SECTION) -> Registered:
    """Bind a loss in this trainer process. A loss that compares with a teacher gets the distillation tokens from now on; one
    that does not gets the rl tokens where ``[trainer.loss] import_path`` names ``prime_composer.upstream.loss_fn``, and
    leaves prime-rl's own distillation alone.

    Rebinds ``prime_rl.trainer.rl.loss.opd_loss_fn`` (38494ccb, loss.py:201) or ``ref_kl_loss_fn`` (559b4477,
    loss.py:186); both are module globals that prime-rl resolves after this. To go when ``[trainer.loss]`` reaches
    distillation tokens by itself.

    Args:
        table: the loss table, ``type`` and knobs; ``adapter = true`` says that the run needs the whole-run adapter.
        section: where the table stands, for messages.

    Raises:
        ValueError: the table is wrong, or the loss needs what this road cannot bring; says what to run instead.
        UnknownSurface: this prime-rl is none that is known.
    """
    global _registered, _step_hook
    module = sys.modules.get(LOSS_MODULE) or __import__(LOSS_MODULE, fromlist=["_"])
    era = probe_contract(module)
    config = parse_loss(table, section)
    if _registered is not None and _registered.loss.config != config:
        raise ValueError(
            f"Two losses for one trainer: {_registered.loss.config!r} is registered already, and [{section}] says "
            f"{config!r}. Keep one of {SWITCH} and [trainer.loss]."
        )
    aligned = _adapter_for(config)
    if aligned is None and needs_adapter(table):
        raise ValueError(
            f"[{section}] adapter = true: this run's teachers are mixed or routed by the adapter, and without it prime-rl "
            f"would ask one of them for all. {WITH_ADAPTER}"
        )
    if _registered is not None and (
        not _registered.distils or getattr(module, era.slot) is _registered
    ):
        _registered.expects_mark |= needs_adapter(table)
        return _registered
    refuse(config, era, aligned is not None, section)
    _registered = Registered(
        setup_loss_fn(config, section), era, module.LossOutputs, aligned, needs_adapter(table)
    )
    if _registered.distils:
        expect(module, era.slot, ("inputs",), f"prime_rl/trainer/rl/loss.py of {era.name}")
        setattr(module, era.slot, _registered)
    if _step_hook is None:
        _step_hook = register_optimizer_step_post_hook(_after_step)
    if OFFLOAD in sys.modules:
        hook_offload(sys.modules[OFFLOAD])
    tokens = f"distillation tokens ({era.slot})" if _registered.distils else "rl tokens"
    say(f"{config.type} registered for {tokens}, {era.name} contract")
    return _registered


def refuse(config: LossConfig, era: LossContract, adapter: bool, section: str = SECTION) -> None:
    """Refuse, at load, a loss that prime-rl cannot feed on this road.

    Raises:
        ValueError: says what is missing, why, and what to run instead.
    """
    said = f"[{section}] type = {config.type!r} needs "
    pairs = sorted(set(config.needs) & {"replay", "segment_ids"})
    if pairs:
        raise ValueError(
            f"{said}{' and '.join(pairs)}: preference pairs, and prime-rl {era.name} hands a loss one sequence at a time "
            "and has no field that ties two of them together. Set the replay channel's weight to 0, or run the recipe "
            "with --engine local."
        )
    missing = sorted(set(config.needs) & {"support", "token_ids"})
    if missing and not adapter:
        raise ValueError(
            f"{said}{' and '.join(missing)}, which prime-rl's own wire does not carry to a custom loss. {WITH_ADAPTER}"
        )
    if (
        era.name != "v0.6"
        and "advantages" in config.needs
        and {"ref_logprobs", "support"} & config.needs
    ):
        raise ValueError(
            f"{said}advantages and a teacher for the same tokens; this prime-rl (the {era.name} contract) sends a token "
            "either to the rl loss or to distillation, and fills the missing advantages with 0. For sampled_reverse_kl "
            'set dialect = "v0_7"; mix rewards in through prime-rl\'s own per-environment algorithms.'
        )


def _adapter_for(config: LossConfig) -> Aligned | None:
    """The adapter's source of supports, where its hooks are in place."""
    trainer = sys.modules.get("prime_composer.upstream.trainer")
    return None if trainer is None else trainer.ROOM.serve(config)


def unregister() -> None:
    """Forget the registered loss (the module global that ``register`` rebound stays as it is)."""
    global _registered, _step_hook, _offloaded
    _registered, _offloaded = None, False
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


OFFLOAD = "prime_rl.trainer.optim.offload"
_offloaded = False


def hook_offload(module: ModuleType) -> None:
    """``[trainer.model.full_offload]`` (559b4477, trainer/optim/offload.py:1058): a training step is one ``step`` of its
    wrapper. The optimiser inside takes several in other threads, one when it is made, or none (native backend). To go when
    prime-rl has a hook for a step."""
    cls = module.FullCPUOffloadOptimizer
    if hasattr(cls.step, "__wrapped__"):
        return
    step = expect(cls, "step", ("self", "closure"), "prime_rl/trainer/optim/offload.py")
    init = cls.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        global _offloaded
        _offloaded = True
        init(self, *args, **kwargs)

    @functools.wraps(step)
    def stepped(self: Any, closure: Any = None) -> Any:
        out = step(self, closure)
        if _registered is not None:
            _registered.end_step()
        return out

    cls.__init__, cls.step = made, stepped


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _offloaded:
        return
    if _registered is not None and not _makes_room_for_a_checkpoint():
        _registered.end_step()


def _makes_room_for_a_checkpoint() -> bool:
    """Whether this step is one that torch takes with zero gradients, so that an optimiser without a state has one to load into
    or to save (``_init_optim_state`` in torch/distributed/checkpoint/state_dict.py, torch 2.4 to 2.13)."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def loss_fn(inputs: Any, **table: Any) -> Any:
    """What ``[trainer.loss] import_path = "prime_composer.upstream.loss_fn"`` names; ``table`` is our loss table.

    Returns:
        prime-rl's own ``LossOutputs``: the SUM over the mask, and 0-dim metrics.
    """
    registered = _registered
    if registered is None:
        registered = register(table)
    return registered.rl_tokens(inputs)


def enter(frame: FrameType | None) -> Callable[..., Any]:
    """``loss_fn``, registered first if the one who asks for it is prime-rl's ``setup_*``.

    prime-rl binds a custom loss to its rl slot only, and hands the kwargs to no one at import time: they are read from
    the local ``loss_config`` of the function that imports. Works in all versions (v0.6.0 loss.py:275-283, 559b4477
    loss.py:239-249). To go with the rebinding of ``register``.
    """
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name in SETUPS and frame.f_globals.get("__name__") == LOSS_MODULE:
            register(dict(frame.f_locals["loss_config"].kwargs)).in_file = True
            break
        frame = frame.f_back
    return loss_fn


def say(text: str) -> None:
    """One line in the log of the process that prime-rl runs us in."""
    logger = sys.modules.get("prime_rl.utils.logger")
    line = f"prime_composer: {text}"
    if logger is None:
        print(line, file=sys.stderr, flush=True)
    else:
        logger.get_logger().info(line)
