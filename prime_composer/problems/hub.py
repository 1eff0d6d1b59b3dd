"""Read problems from a data set of the Hugging Face hub."""

from typing import Any

from prime_composer.extras import pip_install
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.rows import parse_rows, problem_or_none


def load_hub(config: DataConfig) -> tuple[list[Problem | None], list[Problem | None]]:
    """Return the problems of the splits ``train`` and ``test``, None for rows that are left out."""
    splits = _load_dataset(config)
    train, held_out = (
        _split(splits, name, config) if wanted else []
        for name, wanted in (("train", config.trains), ("test", config.evaluates))
    )
    return train, held_out


def _load_dataset(config: DataConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f'[data] source = "hub" needs the datasets library: {pip_install("hub")}'
        ) from error
    return datasets.load_dataset(config.hub_id, config.hub_name)


def _split(splits: Any, name: str, config: DataConfig) -> list[Problem | None]:
    if name not in splits:
        raise ValueError(f"{config.hub_id} has no split {name!r}; its splits are {sorted(splits)}")
    rows = enumerate(splits[name], start=1)
    return parse_rows(
        ((f"{config.hub_id}, split {name}, row {number}", row) for number, row in rows),
        lambda row: problem_or_none(row, config),
        config.limit,
    )
