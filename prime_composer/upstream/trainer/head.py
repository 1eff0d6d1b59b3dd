"""Student log-probs on the teacher's support, beside prime-rl's output heads."""

import functools
from typing import Any

import torch
from torch import Tensor

from prime_composer.upstream.trainer.adapter import Adapter, adapter
from prime_composer.upstream.trainer.batches import MicroBatch
from prime_composer.upstream.trainer.logits import Rows, folded, rows_of, support_logits
from prime_composer.upstream.versions import UnknownSurface, expect

HEADS = (
    "FusedOutputLinear",
    "VanillaOutputLinear",
    "GemmaFusedOutputLinear",
    "GemmaVanillaOutputLinear",
)
PARAMETERS = ("self", "hidden_states", "labels", "temperature")
KEY = "prime_composer_support"
"""Key of our tensor in a head's output."""


def hook_head(module: Any) -> None:
    """Compute support logits beside each head (38494ccb lm_head.py:42, 69; 559b4477 :38, 66).

    TODO(prime-rl): remove once heads return log-probs of given ids.
    """
    for name in HEADS:
        cls = module.__dict__.get(name)
        if cls is not None and cls.__module__ == module.__name__:
            forward = expect(cls, "forward", PARAMETERS, "prime_rl/trainer/models/layers/")
            cls.forward = _beside(forward, fused="Fused" in name)


def _beside(original: Any, fused: bool) -> Any:
    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Any:
        state = adapter()
        batch = state.micro_batch
        if batch is None or batch.payload is None or labels is None:
            return original(self, hidden_states, labels, temperature=temperature)
        state.warn_of_temperature()
        batch.check_support(self.weight.shape[0])
        # The fused head divides by the temperature that it is given, which FSDP has rounded to the
        # model's dtype. A plain head returns logits, and the trainer divides them by the batch's
        # own float32 temperatures.
        given = temperature[0] if fused and temperature is not None else None
        rows = _rows(state, batch, hidden_states, labels[0], given)
        if rows is None:
            out = original(self, hidden_states, labels, temperature=temperature)
            local = hidden_states.new_zeros((hidden_states.shape[1], batch.k), dtype=torch.float32)
        else:
            weight, token = folded(self.weight, rows)
            # An instance attribute hides the parameter of the same name for this one call.
            self.__dict__["weight"] = weight
            try:
                out = original(self, hidden_states, labels, temperature=temperature)
            finally:
                del self.__dict__["weight"]
            softcap = getattr(self, "softcap", None)
            local = support_logits(hidden_states[0], token, weight, rows, softcap)
        # FSDP finds it in the module's output, and gathers the weight before its backward runs.
        out[KEY] = local
        batch.student = _whole(state, batch, local)
        return out

    return forward


def _rows(
    state: Adapter,
    batch: MicroBatch,
    hidden_states: Tensor,
    labels: Tensor,
    temperature: Tensor | None,
) -> Rows | None:
    """Return the rows to compute, in the head's frame; under context parallelism this rank's.

    Position j of the head predicts token j + 1, at the temperature of position j.

    Args:
        temperature: temperature of each position of the head, [n]; None for the batch's own.
    """
    assert batch.payload is not None
    if hidden_states.shape[0] != 1:
        raise ValueError(
            f"prime-rl packs one sequence row per micro-batch; got {hidden_states.shape[0]}."
        )
    length = batch.input_ids.shape[0]
    ids = torch.roll(batch.payload.token_ids, -1, 0)
    scored = torch.roll(batch.scored, -1, 0)
    scored[-1] = False
    temperatures = batch.temperatures if temperature is None else temperature
    if hidden_states.shape[1] != length:
        if state.shard is None:
            raise UnknownSurface(
                f"The head sees {hidden_states.shape[1]} of {length} tokens and setup_cp_params "
                "was not called: this prime-rl shards sequences in a way that prime_composer does "
                "not support."
            )
        rank, size, _ = state.shard
        ids, scored = ids.chunk(size)[rank], scored.chunk(size)[rank]
        if temperatures is not None and temperature is None:
            temperatures = temperatures.chunk(size)[rank]
    return rows_of(ids, labels, scored, temperatures)


def _whole(state: Adapter, batch: MicroBatch, local: Tensor) -> Tensor:
    """Return the support logits by token, of all context-parallel ranks.

    They are shifted right, as prime-rl shifts its log-probs.
    """
    if local.shape[0] != batch.input_ids.shape[0]:
        assert state.shard is not None
        from torch.distributed.nn import all_gather

        if not local.requires_grad:
            # The backward is a collective too: a rank whose shard trains no token takes part.
            local.requires_grad_(torch.is_grad_enabled())
        local = torch.cat(all_gather(local.contiguous(), group=state.shard.group))
    return torch.cat([local.new_zeros((1, local.shape[1])), local[:-1]])
