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
    try:
        return datasets.load_dataset(config.hub_id, config.hub_name)
    except ValueError as error:  # no such configuration; the message names those that there are
        raise ValueError(
            f"[data] hub_id = {config.hub_id!r}, hub_name = {config.hub_name!r}: {error}"
        ) from error
    # Without a network: ConnectionError, in offline mode too. Without the data set:
    # FileNotFoundError.
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"[data] hub_id = {config.hub_id!r} could not be read from the Hugging Face hub: "
            f'{reason}. With a local copy, set [data] source = "files" and path = "FOLDER" '
            "(train and test, JSONL or parquet), or on the command line: "
            "--set data.source=files --set data.path=FOLDER"
        ) from error


def _split(splits: Any, name: str, config: DataConfig) -> list[Problem | None]:
    if name not in splits:
        raise ValueError(f"{config.hub_id} has no split {name!r}; its splits are {sorted(splits)}")
    rows = enumerate(splits[name], start=1)
    return parse_rows(
        ((f"{config.hub_id}, split {name}, row {number}", row) for number, row in rows),
        lambda row: problem_or_none(row, config),
        config.limit,
    )
