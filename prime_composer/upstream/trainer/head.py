"""What losses need of the student beside prime-rl's output heads.

Log-probs on the teacher's support are computed in the head's own forward. For whole vocabularies
the hidden states are kept, and the loss multiplies them with the head's weight.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import Logits
from prime_composer.losses.shared.stops import refuse_beyond
from prime_composer.upstream.trainer.adapter import Shard, TrainerAdapter, trainer_adapter
from prime_composer.upstream.trainer.batches import PackedMicroBatch, refuse_sampling_mask
from prime_composer.upstream.trainer.logits import SupportRows, folded, support_logits, support_rows
from prime_composer.upstream.versions import capabilities
from prime_composer.upstream.versions.capabilities import UnknownSurface

# In a head's output, where FSDP finds them: it gathers the weight before their backward runs.
KEY, STATES = "prime_composer_support", "prime_composer_states"


def hook_head(module: Any) -> None:
    """Compute support logits beside each head (559b4477 lm_head.py:42, 69).

    TODO(prime-rl): remove once heads return log-probs of given ids.
    """
    for head in capabilities.HEADS:
        fused = head in (capabilities.FUSED_HEAD, capabilities.GEMMA_FUSED_HEAD)
        capabilities.replace(head, module, functools.partial(_beside, fused=fused))


def _beside(original: Any, fused: bool) -> Any:
    names = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = names.bind(self, *args, **kwargs).arguments
        labels, temperature = given.get("labels"), given.get("temperature")
        state = trainer_adapter()
        batch = state.micro_batch
        run = functools.partial(original, self, *args, **kwargs)
        if batch is None or labels is None or temperature is None:
            return run()
        hidden_states = given["hidden_states"]
        if batch.support is not None or batch.reads_hidden_states:
            refuse_sampling_mask(given)
        if batch.support is None:
            out = run()
        else:
            state.warn_of_temperature()
            vocab_size, softcap = self.weight.shape[0], getattr(self, "softcap", None)
            batch.check_support(vocab_size)
            # The fused head divides by the temperature that it is given, which FSDP has rounded to
            # the model's dtype. A plain head returns logits, and the trainer divides them by the
            # batch's own float32 temperatures.
            by_head = temperature[0] if fused else None
            rows = _rows(state, batch, hidden_states, labels[0], by_head, vocab_size)
            if rows is None:
                out = run()
                size = hidden_states.shape[1], batch.k + len(batch.stop_ids)
                local = hidden_states.new_zeros(size, dtype=torch.float32)
            else:
                weight, token = folded(self.weight, rows)
                # An instance attribute hides the parameter of the same name for this one call.
                self.__dict__["weight"] = weight
                try:
                    out = run()
                finally:
                    del self.__dict__["weight"]
                local = support_logits(hidden_states[0], token, weight, rows, softcap)
            out[KEY] = local
            batch.student = _whole(state, batch, local)
        if batch.reads_hidden_states:
            state.warn_of_temperature()
            out[STATES] = _gathered(state, batch, hidden_states[0])
            # Without the rollouts' temperature: the loss has one of its own, for both sides.
            states = out[STATES].to(self.weight.dtype)
            batch.head = Logits(states, self.weight, softcap=getattr(self, "softcap", None))
        return out

    return forward


def _rows(
    state: TrainerAdapter,
    batch: PackedMicroBatch,
    hidden_states: Tensor,
    labels: Tensor,
    temperature: Tensor | None,  # of each position of the head, [n]; None for the batch's own
    vocab_size: int,
) -> SupportRows | None:
    """Return the rows to compute, in the head's frame; under context parallelism this rank's.

    Position j of the head predicts token j + 1, at the temperature of position j.
    """
    assert batch.support is not None
    assert hidden_states.shape[0] == 1, "prime-rl packs one row per micro-batch"
    length = batch.input_ids.shape[0]
    # The entry of an id that the head lacks is replaced, whichever row is read for it.
    ids = torch.roll(batch.support.token_ids.clamp(0, vocab_size - 1), -1, 0)
    refuse_beyond(batch.stop_ids, vocab_size)
    ids = torch.cat([ids, torch.tensor(batch.stop_ids, dtype=torch.long).expand(length, -1)], 1)
    scored = torch.roll(batch.scored, -1, 0)
    scored[-1] = False
    temperatures = batch.temperatures if temperature is None else temperature
    if hidden_states.shape[1] != length:
        rank, size, _ = _shard(state, hidden_states.shape[1], length)
        ids, scored = ids.chunk(size)[rank], scored.chunk(size)[rank]
        if temperatures is not None and temperature is None:
            temperatures = temperatures.chunk(size)[rank]
    return support_rows(ids, labels, scored, temperatures)


def _whole(state: TrainerAdapter, batch: PackedMicroBatch, local: Tensor) -> Tensor:
    """Return support logits by token, of all ranks, shifted right as prime-rl's log-probs are."""
    whole = _gathered(state, batch, local)
    return torch.cat([whole.new_zeros((1, whole.shape[1])), whole[:-1]])


def _gathered(state: TrainerAdapter, batch: PackedMicroBatch, local: Tensor) -> Tensor:
    """Return the rows of all context-parallel ranks, [n, columns]."""
    length = batch.input_ids.shape[0]
    if local.shape[0] == length:
        return local
    group = _shard(state, local.shape[0], length).group
    from torch.distributed.nn import all_gather

    if not local.requires_grad:
        # The backward is a collective too: a rank whose shard trains no token takes part.
        local.requires_grad_(torch.is_grad_enabled())
    return torch.cat(all_gather(local.contiguous(), group=group))


def _shard(state: TrainerAdapter, tokens: int, length: int) -> Shard:
    """Return this rank's shard, of which the head sees ``tokens`` of ``length``."""
    if state.shard is None:
        raise UnknownSurface(
            f"The head sees {tokens} of {length} tokens and setup_cp_params was not called: this "
            "prime-rl shards sequences in a way that prime_composer does not support."
        )
    return state.shard


def gather_head(state: TrainerAdapter) -> None:
    """Let FSDP gather the head's weight again, for the loss, where it has freed it.

    It frees the parameters of its root, which a head that is tied to the embeddings belongs to.
    The backward, which comes next, needs them too.
    """
    batch = state.micro_batch
    if batch is None or batch.head is None or _is_there(batch.head.weight):
        return
    if hasattr(state.model, "unshard"):
        state.model.unshard()
    if not _is_there(batch.head.weight):
        raise UnknownSurface(
            "FSDP has freed the output head's weight before the loss, and it is no parameter of "
            "the model's root: this prime-rl shards models in a way that prime_composer does not "
            "support. Set k to a number."
        )


def _is_there(weight: Tensor) -> bool:
    return weight.untyped_storage().size() > 0
