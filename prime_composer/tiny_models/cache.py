"""Small models prepared on the spot, for recipes that need no download: what they are, and where they are cached.

Only the description, the cache key and the cache live here; ``backends/prepare.py`` trains. Two models of one recipe
get the same tokenizer, a byte-level BPE with single digits trained on the recipe's own data, whenever their
``vocab_size`` agrees.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import load_environments
from prime_composer.problems.prompts import prompt_text
from prime_composer.recipe.prepare import PrepareConfig

FORMAT = 1
"""Goes into the cache key. Raise it when ``backends/prepare.py`` makes other models of the same description."""

DESCRIPTION = "prepare.json"
"""The file beside the weights that says how they were made, and the training loss at the end."""

Progress = Callable[[int, int, float], None]
"""Called after every step of fine-tuning with the steps done, the steps in all, and the loss."""


def cache_root() -> Path:
    """The per-user cache folder: ``$PRIME_COMPOSER_CACHE``, or ``prime_composer`` in ``$XDG_CACHE_HOME`` (~/.cache)."""
    if own := os.environ.get("PRIME_COMPOSER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prime_composer"


def cache_key(
    config: PrepareConfig, sources: Mapping[str, DataConfig], problems: Sequence[Problem]
) -> str:
    """A readable name and a hash of all that decides what the model learns: its description, the training texts
    (contents, not paths), and the format version."""
    digest = hashlib.sha256(
        json.dumps(
            [FORMAT, config.model_dump(mode="json", exclude_none=True)], sort_keys=True
        ).encode()
    )
    for problem in problems:
        texts = [prompt_text(problem, sources[problem.environment]), problem.answer]
        if config.environments is not None:
            texts.append(str(problem.environment in config.environments))
        digest.update(json.dumps(texts).encode())
    return f"qwen3-{config.layers}x{config.hidden_size}-{digest.hexdigest()[:16]}"


def cached_path(
    config: PrepareConfig, sources: Mapping[str, DataConfig], cache_dir: Path | None = None
) -> Path | None:
    """The prepared model's folder if it is cached, else None. Imports nothing heavy; reads the data.

    Raises:
        ValueError: the data cannot be read.
    """
    train, _ = load_environments(sources)
    path = (cache_dir or cache_root()) / "models" / cache_key(config, sources, train)
    return path if path.is_dir() else None


def prepare_model(
    config: PrepareConfig,
    sources: Mapping[str, DataConfig],
    cache_dir: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
) -> Path:
    """A Hugging Face folder with the model and its tokenizer: from the cache, or trained now and cached.

    The model is built in a folder of its own and renamed when it is whole, so that no reader ever finds half a model.
    Runs that want the same model at once wait for the first one to finish it. A pruned model is made from the unpruned
    one of the same description, which is cached too: where that one is the teacher, it is trained once.

    Args:
        config: the model.
        sources: the recipe's environments, by name.
        rebuild: train again, and replace what is cached.
        progress: called after every step of fine-tuning.

    Raises:
        ValueError: the data cannot be read, does not fit the model, or training libraries are missing.
    """
    train, _ = load_environments(sources)
    return _prepare(
        config, sources, train, (cache_dir or cache_root()) / "models", rebuild, progress or _silent
    )


def _silent(done: int, steps: int, loss: float) -> None:
    pass


def _prepare(
    config: PrepareConfig,
    sources: Mapping[str, DataConfig],
    train: list[Problem],
    models: Path,
    rebuild: bool,
    progress: Progress,
) -> Path:
    models.mkdir(parents=True, exist_ok=True)
    key = cache_key(config, sources, train)
    path = models / key
    if path.is_dir() and not rebuild:
        return path
    with _locked(models / f"{key}.lock"):
        if path.is_dir() and not rebuild:
            return path
        try:
            from prime_composer.tiny_models.training import build_model, prune_model
        except ImportError as error:
            raise ValueError(
                f'preparing a model on the spot needs {error.name}: pip install "prime-composer[local]"'
            ) from error
        unfinished = models / f"{key}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        if config.prune:
            whole = _prepare(
                config.model_copy(update={"prune": 0.0}), sources, train, models, rebuild, progress
            )
            loss = json.loads((whole / DESCRIPTION).read_text(encoding="utf-8"))["loss"]
            prune_model(whole, config.prune, unfinished)
            progress(config.sft_steps, config.sft_steps, loss)
        else:
            loss = build_model(config, sources, train, unfinished, progress)
        description = {
            "format": FORMAT,
            "prepare": config.model_dump(mode="json"),
            "data": {name: data.model_dump(mode="json") for name, data in sources.items()},
            "loss": loss,
        }
        (unfinished / DESCRIPTION).write_text(
            json.dumps(description, indent=2) + "\n", encoding="utf-8"
        )
        replaced = models / f"{key}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if path.is_dir():
            path.rename(replaced)
        unfinished.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock file; the operating system lets go of it if the process dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
