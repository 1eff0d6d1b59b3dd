"""Read problems from files: JSONL, CSV and parquet, one or a folder of them."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prime_composer.extras import pip_install
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.rows import parse_rows, problem_or_none, read_rows

PARQUET = ".parquet"
CSV = ".csv"
ENDINGS = (".jsonl", ".jsonl.gz", CSV, PARQUET)  # Files of a folder that are read

LONGEST_FIELD = 2**31 - 1  # Characters of a value of a CSV file; the library's own limit is 2^17

DEFAULTS = DataConfig()

NAMED = re.compile(r"(train|test)(?![a-z])", re.IGNORECASE)  # ``train-00000-of-00002.parquet``


def files_at(path: Path, trains: bool = True) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those that are held out, if any are."""
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise ValueError(
            f"no such file: {path}. [data] path is a JSONL, CSV or parquet file, or a folder of "
            "them, such as train.jsonl and test.jsonl; GSM8K's are at "
            "https://github.com/openai/grade-school-math"
        )
    files = sorted(file for file in path.iterdir() if file.name.lower().endswith(ENDINGS))
    parts: dict[str, list[Path]] = {"train": [], "test": []}
    for file in files:
        if match := NAMED.match(file.name):
            parts[match[1].lower()].append(file)
    if trains and parts["test"] and not parts["train"]:
        raise ValueError(
            f"{path} has {parts['test'][0].name} and no file to train on, whose name begins with "
            "train; rename one"
        )
    train = parts["train"] or files
    if not train:
        raise ValueError(f"{path} has no file that ends in {', '.join(ENDINGS)}")
    return train, parts["test"]


def read_files(paths: Sequence[Path], config: DataConfig) -> list[Problem | None]:
    """Return the problems of files, None for rows that are left out; ``limit`` of them in all."""
    rows: list[Problem | None] = []
    for path in paths:
        left = None if config.limit is None else config.limit - len(rows)
        if left != 0:
            rows += read_file(path, config, left)
    return rows


def read_file(
    path: Path, config: DataConfig = DEFAULTS, limit: int | None = None
) -> list[Problem | None]:
    """Return the problems of one file, None for rows that are left out."""
    tables = {PARQUET: _parquet_rows, CSV: _csv_rows}
    rows = tables.get(path.suffix.lower())
    if rows is None:
        return read_rows(path, lambda row: problem_or_none(row, config), limit)
    return parse_rows(rows(path), lambda row: problem_or_none(row, config), limit)


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        csv.field_size_limit(LONGEST_FIELD)
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row or None in row.values():
                    raise ValueError(
                        f"{path}, row {number} has not as many values as the header has columns"
                    )
                yield f"{path}, row {number}", row
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(
            f"{path} needs the pyarrow library: {pip_install('parquet')}, or write the rows as "
            "JSONL"
        ) from error
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}, row {number}", row
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
