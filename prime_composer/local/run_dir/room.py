"""What the checkpoints of a run need on the disk."""

from prime_composer.local.engine import Engine
from prime_composer.local.run_dir.checkpoint import tensor_bytes
from prime_composer.recipe.schema import CheckpointConfig


def checkpoint_bytes(engine: Engine) -> int:
    """Return the size of a checkpoint, with AdamW's two moments and a moving teacher."""
    moments = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    return (
        tensor_bytes(engine.stored.state_dict())
        + 2 * tensor_bytes(moments)
        + tensor_bytes({} if engine.latent is None else engine.latent.state_dict())
        + tensor_bytes(engine.state_dict())
    )


def checkpoints_at_once(config: CheckpointConfig, done: int, last: int) -> int:
    """Return how many checkpoints are on the disk at most, while one is written."""
    written = sum(step == last or is_due(step, config.every) for step in range(done + 1, last + 1))
    return min(config.keep + 1, written + (done > 0))


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every ``every`` steps happens now; 0 is never."""
    return every > 0 and step % every == 0
