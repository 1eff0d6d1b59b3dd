"""A sampler that works while the student trains, without a server to start.

    [rollout]
    backend = "tests.studies.beside:Beside"
    url = "http://beside"

It samples in this process with a copy of the student, so that batches ahead of their steps are as
stale as a server's. How much time they save is nothing that it could show.
"""

from collections.abc import Callable

from prime_composer.samplers.registry import BackendSpec
from prime_composer.samplers.transformers import TransformersSampler


class Beside(TransformersSampler):
    """Rollouts of a transformers model, for ``rollout.ahead``."""

    serves = True
    within_positions = False

    def __init__(self, spec: BackendSpec, status: Callable[[str], None]):
        super().__init__(spec.model, dtype=spec.dtype, max_model_len=spec.max_model_len)
        self.status = status
