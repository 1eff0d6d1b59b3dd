"""What the checkpoints of a run need on the disk."""

from prime_composer.backends.hf_model import lm_head_weight
from prime_composer.local.engine import Engine
from prime_composer.local.run_dir.checkpoint import tensor_bytes
from prime_composer.recipe.schema import CheckpointConfig, RolloutConfig

TOKEN_BYTES = 17
"""Of a stored token: id, mask, the sampler's log-prob and the teacher's."""

ENTRY_BYTES = 8
"""Of an id of its support, with the log-prob."""


def checkpoint_bytes(engine: Engine) -> int:
    """Return the size of a checkpoint: weights or adapter, latent weights, AdamW's two moments, a
    moving teacher."""
    moments = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    return (
        tensor_bytes(engine.stored.state_dict())
        + 2 * tensor_bytes(moments)
        + tensor_bytes({} if engine.latent is None else engine.latent.state_dict())
        + tensor_bytes(engine.state_dict())
    )


def bytes_ahead(engine: Engine, rollout: RolloutConfig, batch_size: int) -> int:
    """Return the most that batches collected ahead take in a checkpoint.

    Each is there with its scores; or with the weights that are to sample it, where a run ended
    before it was there. Hidden states are taken to be as wide as the student's.
    """
    size, _ = engine.loss.asked_of_teacher
    support = engine.vocab_size if size == "full" else size
    if engine.reads_hidden_states:
        support = lm_head_weight(engine.model).shape[1] // 2
    batch = batch_size * engine.context * (TOKEN_BYTES + ENTRY_BYTES * support)
    return rollout.ahead * max(batch, tensor_bytes(engine.model.state_dict()))


def checkpoints_at_once(config: CheckpointConfig, done: int, last: int) -> int:
    """Return how many checkpoints are on the disk at most, while one is written."""
    written = sum(step == last or is_due(step, config.every) for step in range(done + 1, last + 1))
    return min(config.keep + 1, written + (done > 0))


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every ``every`` steps happens now; 0 is never."""
    return every > 0 and step % every == 0
