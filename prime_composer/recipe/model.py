"""Define the tables of a model's origin, which student and teachers share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from prime_composer.recipe.prepare import AnyPrepare, StaysRoundedConfig
from prime_composer.tables import Table


class ModelConfig(Table):
    """Where a model comes from: ``model`` names one, or ``[*.prepare]`` builds or rounds one."""

    model: str | None = None
    """Directory in Hugging Face format, or a hub id."""

    prepare: AnyPrepare | None = None
    """Build a small model on this machine, or round an existing one, once, and cache it."""

    def refusals(self) -> Iterator[str]:
        yield from self.wrong_origin()

    def wrong_origin(self) -> Iterator[str]:
        """Yield why the model has no origin, or several."""
        origins = [
            name
            for name in ("model", "prepare", "policy", "base")
            if getattr(self, name, None) not in (None, False)
        ]
        if len(origins) == 1 or not origins and getattr(self, "tape_only", False):
            return
        choices = "`model` and the table `prepare`"
        if hasattr(self, "policy"):
            choices = "`model`, `prepare`, `policy` and `base = true`"
        yield (
            f"give exactly one of {choices}"
            + (f", not {' and '.join(origins)}" if origins else "")
            + ("; a hinted base is policy.update = 'base'" * (origins == ["policy", "base"]))
        )


LARGEST_RANK = 512  # Of an adapter. vLLM loads none of a larger rank.


class LoraConfig(Table):
    """Train an adapter of low rank beside the student's weights, which stay as they are (LoRA).

    A layer of weight W [out, in] becomes W + (alpha / rank) B A, with A [rank, in] and B [out,
    rank]. B begins at 0, so that the first rollouts are the student's own. Needs peft.

    Source: https://arxiv.org/abs/2106.09685.
    """

    rank: int = Field(default=16, ge=1, le=LARGEST_RANK)
    """Rank of each layer's adapter."""

    alpha: int = Field(default=32, ge=1, le=65536)
    """The adapter's product counts alpha / rank times."""

    targets: (
        Literal["all-linear"]
        | Annotated[
            tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$")], ...],
            Field(min_length=1),
        ]
    ) = "all-linear"
    """Layers with an adapter, by the last part of their names, such as ["q_proj", "v_proj"]; or
    "all-linear", every linear layer but the output head."""

    start: Path | None = None
    """Directory of an adapter to begin with, of this rank, alpha and targets. Unset: a new one."""


class StudentConfig(ModelConfig):
    """The model that is trained."""

    lora: LoraConfig | None = None
    """Train an adapter instead of the weights."""

    load: Literal["float32", "nf4"] = "float32"
    """How the weights are kept. "nf4" keeps those of the linear layers in 4 bits beside an adapter
    (QLoRA, https://arxiv.org/abs/2305.14314), and the sampler gets what they stand for. Needs
    bitsandbytes."""

    quantize: StaysRoundedConfig | None = None
    """Keep the linear layers rounded while the student learns."""
