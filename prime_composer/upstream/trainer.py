"""The trainer's half of teacher top-K: hooks on what prime-rl's train loop holds by reference.

    DataLoader.get_batch     each micro batch announces itself before its forward
    *OutputLinear.forward    student logits on the support, beside the head
    compute_loss             the packed tensors' slices, so that a loss finds its own
    setup_cp_params          context parallelism: which shard of the sequence this rank holds

The trainer runs as ``__main__``, so names of its module cannot be rebound; these modules are imported by it, and the
hooks run when each of them has been loaded and before the trainer copies names out of it.
"""

import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import Support
from prime_composer.losses.base import LossConfig
from prime_composer.upstream import wire
from prime_composer.upstream.versions import UnknownSurface, expect, probe_contract
from prime_composer.upstream.registration import Aligned, say
from prime_composer.upstream.student import folded, rows_of, support_logits
from prime_composer.upstream.switch import SWITCH

KEY = "prime_composer_support"


class Bin:
    """One micro batch: its tokens, its support, and what the head's hook found for it."""

    def __init__(self, micro_batch: dict[str, Any], k: int):
        self.input_ids = micro_batch["input_ids"][0]
        self.temperatures = micro_batch.get("temperatures")
        self.k = k
        self.payload: wire.Payload | None = None
        self.wanted: Tensor | None = None
        packed = micro_batch.get("routed_experts")
        if k and packed is not None:
            self.payload = wire.unpack(packed[0], k)
            self.wanted = micro_batch["loss_mask"][0].clone()
            for stream in ("ref_kl_weights", "rl_weights"):
                if micro_batch.get(stream) is not None:
                    self.wanted |= micro_batch[stream][0] != 0
            self.wanted &= ~self.payload.teacher_logprobs[:, 0].isnan()
        self.student: Tensor | None = None
        self.slices: dict[int, slice] = {}


class Room:
    """What the hooks share: the size of the support, the micro batch in flight, the context-parallel shard."""

    def __init__(self) -> None:
        self.k = 0
        self.bin: Bin | None = None
        self.cp: tuple[int, int, Any] | None = None
        self.warned = False
        self.hooked = False

    def begin(self, micro_batch: dict[str, Any]) -> None:
        self.bin = Bin(micro_batch, self.k)
        if self.bin.wanted is not None and not self.warned and self.bin.temperatures is not None:
            odd = self.bin.temperatures[0][self.bin.wanted]
            if bool((odd != 1).any()):
                self.warned = True
                say(
                    "the rollouts' temperature is not 1: prime-rl's trainer takes log-probs at that temperature and "
                    "the teacher scores at 1, so the divergence compares two temperatures"
                )

    def serve(self, config: LossConfig) -> Aligned | None:
        """Where supports for ``config`` come from; None while the hooks of this process are not in place.

        Raises:
            ValueError: it wants the full vocabulary.
        """
        if not self.hooked:
            return None
        if config.support_size == "full":
            raise ValueError(
                f"type = {config.type!r} asks for the full vocabulary; prime-rl's wire carries a top-K support: give it a number k."
            )
        self.k = config.support_size
        return self.aligned

    def aligned(self, inputs: Any) -> tuple[Tensor | None, Support | None]:
        """Token ids and support of one of the sequences that ``compute_loss`` was given.

        Raises:
            ValueError: the loss needs a support and this sequence, or one of its trained tokens, came without one.
        """
        trainer_logprobs = inputs.trainer_logprobs
        here = self.bin
        part = None if here is None else here.slices.get(id(trainer_logprobs))
        if here is None or part is None:
            return None, None
        device = trainer_logprobs.device
        token_ids = here.input_ids[part].to(device)
        if here.payload is None:
            if self.k:
                raise ValueError(
                    f"No teacher support arrived with this batch (top-{self.k} was expected): the orchestrator runs "
                    f"without the adapter. Set {SWITCH} for every process of the run, and see that prime-composer is "
                    "installed in the orchestrator's environment."
                )
            return token_ids, None
        teacher = here.payload.teacher_logprobs[part]
        if bool(teacher[inputs.loss_mask.to(teacher.device)].isnan().any()):
            raise ValueError(
                "A token that trains came without a teacher score: the loss has nothing to compare it to."
            )
        if here.student is None:
            student = trainer_logprobs.new_zeros((token_ids.shape[0], here.k))
        else:
            student = here.student[part]
        return token_ids, Support(
            token_ids=here.payload.token_ids[part].to(device),
            teacher_logprobs=teacher.to(device),
            student_logprobs=student + trainer_logprobs.unsqueeze(1),
        )


ROOM = Room()


class Announced(list):
    """Micro batches that tell the room which one is in flight. prime-rl iterates twice (counting, training)."""

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in list.__iter__(self):
            ROOM.begin(micro_batch)
            yield micro_batch


def hook_data(module: ModuleType) -> None:
    """``DataLoader.get_batch`` announces (38494ccb data.py:216, 559b4477 data.py:182). To go when prime-rl's custom
    losses are handed the micro batch."""
    get_batch = expect(module.DataLoader, "get_batch", ("self",), "prime_rl/trainer/rl/data.py")

    @functools.wraps(get_batch)
    def announced(self):
        return Announced(get_batch(self))

    module.DataLoader.get_batch = announced


HEAD = ("self", "hidden_states", "labels", "temperature")


def hook_head(module: ModuleType) -> None:
    """Student logits beside ``FusedOutputLinear`` and ``VanillaOutputLinear`` (38494ccb lm_head.py:42, 69; 559b4477
    lm_head.py:38, 66) and the Gemma heads. To go when prime-rl's heads return log-probs of given ids."""
    for name in (
        "FusedOutputLinear",
        "VanillaOutputLinear",
        "GemmaFusedOutputLinear",
        "GemmaVanillaOutputLinear",
    ):
        cls = module.__dict__.get(name)
        if cls is not None and cls.__module__ == module.__name__:
            cls.forward = _beside(
                expect(cls, "forward", HEAD, "prime_rl/trainer/models/layers/"), "Fused" in name
            )


def _beside(original: Any, fused: bool) -> Any:
    @functools.wraps(original)
    def forward(self, hidden_states, labels=None, temperature=None):
        here = ROOM.bin
        if here is None or here.payload is None or labels is None:
            return original(self, hidden_states, labels, temperature=temperature)
        ids, wanted, own_temperature = _shards(here, hidden_states)
        # A plain head returns logits, and the trainer divides them by the batch's float32 temperatures; what arrives here has
        # been rounded to the model's dtype by FSDP. The fused head divides by that itself.
        divides_by = temperature[0] if fused and temperature is not None else own_temperature
        rows = rows_of(ids, labels[0], wanted, divides_by)
        if rows is None:
            out = original(self, hidden_states, labels, temperature=temperature)
            local = hidden_states.new_zeros((hidden_states.shape[1], here.k), dtype=torch.float32)
        else:
            weight, token = folded(self.weight, rows)
            # An instance attribute hides the parameter of the same name for this one call.
            self.__dict__["weight"] = weight
            try:
                out = original(self, hidden_states, labels, temperature=temperature)
            finally:
                del self.__dict__["weight"]
            local = support_logits(
                hidden_states[0], token, weight, rows, getattr(self, "softcap", None)
            )
        # In the module's output FSDP finds it, and has the weight gathered before its backward runs.
        out[KEY] = local
        here.student = _whole(local)
        return out

    return forward


def _shards(here: Bin, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, rows and temperatures in the head's frame: position j predicts token j + 1, at the temperature that stands at j;
    under context parallelism, this rank's."""
    assert here.payload is not None and here.wanted is not None
    device, length = hidden_states.device, here.input_ids.shape[0]
    if hidden_states.shape[0] != 1:
        raise ValueError(
            f"prime-rl packs one sequence row per micro batch; got {hidden_states.shape[0]}."
        )
    ids = torch.roll(here.payload.token_ids, -1, 0)
    wanted = torch.roll(here.wanted, -1, 0)
    wanted[-1] = False
    temperatures = None if here.temperatures is None else here.temperatures[0]
    if hidden_states.shape[1] != length:
        if ROOM.cp is None:
            raise UnknownSurface(
                f"The head sees {hidden_states.shape[1]} of {length} tokens and setup_cp_params was not called: this "
                "prime-rl shards sequences in a way that prime_composer does not know."
            )
        rank, size, _ = ROOM.cp
        ids, wanted = ids.chunk(size)[rank], wanted.chunk(size)[rank]
        temperatures = None if temperatures is None else temperatures.chunk(size)[rank]
    return (
        ids.to(device),
        wanted.to(device),
        None if temperatures is None else temperatures.to(device),
    )


def _whole(local: Tensor) -> Tensor:
    """Back to token positions: gathered over the context-parallel ranks, shifted right like prime-rl's log-probs."""
    if ROOM.bin is not None and local.shape[0] != ROOM.bin.input_ids.shape[0]:
        assert ROOM.cp is not None
        from torch.distributed.nn import all_gather

        if not local.requires_grad:
            # The backward is a collective too: a rank whose shard trains no token takes part in it.
            local.requires_grad_(torch.is_grad_enabled())
        local = torch.cat(all_gather(local.contiguous(), group=ROOM.cp[2]))
    return torch.cat([local.new_zeros((1, local.shape[1])), local[:-1]])


def hook_cp(module: ModuleType) -> None:
    """Remember this rank's shard from ``setup_cp_params`` (38494ccb cp.py:150, 559b4477 cp.py:142). To go with
    ``hook_head``."""
    names = inspect.signature(module.setup_cp_params).parameters
    missing = {"cp_rank", "cp_world_size", "cp_group"} - set(names)
    if missing:
        raise UnknownSurface(
            f"setup_cp_params lost {', '.join(sorted(missing))}; it has {', '.join(names)}."
        )
    original = module.setup_cp_params
    signature = inspect.signature(original)

    @functools.wraps(original)
    def remembered(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        ROOM.cp = given["cp_rank"], given["cp_world_size"], given["cp_group"]
        return original(*args, **kwargs)

    module.setup_cp_params = remembered


def hook_loss(module: ModuleType) -> None:
    """``compute_loss`` notes which slice of the bin each per-sequence tensor is (38494ccb loss.py:298, 559b4477
    loss.py:255), so that a loss finds its support. To go with ``hook_data``."""
    era = probe_contract(module)
    compute_loss = expect(module, "compute_loss", era.compute_loss, "prime_rl/trainer/rl/loss.py")

    @functools.wraps(compute_loss)
    def sliced(*args, **kwargs):
        sequences = kwargs["trainer_logprobs"] if "trainer_logprobs" in kwargs else args[0]
        here = ROOM.bin
        if here is None:
            return compute_loss(*args, **kwargs)
        start = 0
        for sequence in sequences:
            here.slices[id(sequence)] = slice(start, start + sequence.shape[0])
            start += sequence.shape[0]
        try:
            return compute_loss(*args, **kwargs)
        finally:
            here.slices.clear()

    module.compute_loss = sliced
    ROOM.hooked = True
