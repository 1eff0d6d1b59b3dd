"""Define ``[diloco]``: islands that train on their own and average their weights now and then."""

from pydantic import Field

from prime_composer.tables import MOST_STEPS, Table

MOST_ISLANDS = 64


def island_folder(island: int) -> str:
    """Return the folder of an island within the directory of the run."""
    return f"island_{island}"


def check_island(config: "DilocoConfig | None", is_island: bool) -> None:
    """Refuse to run a recipe with islands as if it had none."""
    if config is not None and not is_island:
        raise ValueError(
            "[diloco]: these are several runs. prime-rl rl --islands "
            f"{config.replicas} starts all of them on this machine, and --island I --lighthouse "
            "URL one; --set diloco.replicas=N is their number"
        )


class DilocoConfig(Table):
    """Islands: each runs the whole recipe, and all average what ``every`` steps have changed.

    With theta the weights that all islands have after the last outer step, and theta_i those of
    island i, ``every`` steps of AdamW later, the outer step is one of SGD with Nesterov momentum on
    the pseudo-gradient mean_i(theta - theta_i), in float32. It is torchft's. Experimental.

    Source: DiLoCo, https://arxiv.org/abs/2311.08105.
    """

    replicas: int = Field(ge=1, le=MOST_ISLANDS)
    """Islands, each with ``trainer.batch_size`` rollouts a step."""

    every: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Steps of each island between two outer steps. ``trainer.steps``, ``eval.every`` and
    ``checkpoint.every`` are multiples of it."""

    outer_lr: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Learning rate of the outer SGD. 1, without momentum, takes the mean of the weights."""

    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the outer SGD. The paper's 0.9 makes a run of ten outer steps worse."""

    wait: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds that an outer step waits for the slowest island: longer than its ``every`` steps and
    an evaluation."""

    timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that the mean of one tensor may take, or the copy of a state: five times the student
    in float32."""

    @property
    def fewest(self) -> int:
        """The fewest islands that take an outer step together: a majority, of which two cannot be.

        With fewer, the others wait.
        """
        return self.replicas // 2 + 1
