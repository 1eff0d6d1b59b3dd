"""Check that a trainer provides what a loss needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prime_composer.losses.config import LossConfig


@dataclass(frozen=True)
class Unmet:
    """One input that a loss needs and nobody provides.

    Attributes:
        section: recipe section of the loss.
        loss: the loss's ``type``.
        need: name of the input in ``LossInputs``.
    """

    section: str
    loss: str
    need: str


def unmet(config: LossConfig, available: Iterable[str], section: str = "loss") -> list[Unmet]:
    """Return the needs of a loss, and of the losses within it, that are not among ``available``."""
    provided = set(available)
    return [
        Unmet(below, name, need)
        for below, (name, needs) in config.needs_by_section(section).items()
        for need in sorted(needs - provided)
    ]


def require(
    config: LossConfig,
    available: Iterable[str],
    remedies: Mapping[str, str],
    section: str = "loss",
    provider: str = "the trainer",
) -> None:
    """Raise unless all that a loss needs is among ``available``.

    Args:
        config: the loss.
        available: names of inputs that are provided.
        remedies: what to do about each need, one sentence each.
        section: recipe section of the loss.
        provider: what provides the inputs, for the message.

    Raises:
        ValueError: naming the first unmet need, its section and its remedy.
    """
    for missing in unmet(config, available, section):
        remedy = remedies.get(missing.need, "")
        raise ValueError(
            f"[{missing.section}] type = {missing.loss!r} needs {missing.need}, "
            f"which {provider} does not provide. {remedy}".rstrip()
        )
