"""Look at a model's files before anything is loaded: what is missing.

This file imports neither torch nor transformers, so that a wrong path is refused at once.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

WEIGHTS = {".safetensors", ".bin"}
CONTENT = {".json", ".txt", ".model", ".jinja", *WEIGHTS}  # Endings of a model's files

SAMPLES, SAMPLE_BYTES = 1024, 4096  # Pieces of a file in its fingerprint, evenly spaced

CACHE_VARIABLE = "PRIME_COMPOSER_CACHE"  # Environment variable that names the cache folder


def is_path(model: str) -> bool:
    """Return whether a model's name can only be a path: no hub id is written like that."""
    written_as_path = model.startswith((".", "/", "~")) or HUB_ID.fullmatch(model) is None
    return written_as_path or os.path.lexists(model)


def missing_folder(model: str) -> str | None:
    """Return why a path is no folder on this machine; None for a folder, or for a hub id."""
    if not is_path(model) or Path(model).is_dir():
        return None
    if Path(model).exists():
        return "is a file; name the folder that it is in"
    return "is neither a directory on this machine nor written as a hub id"


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(
        (folder / name).exists() for name in ("vocab.json", "spiece.model")
    )


def why_not_on_hub(model: str) -> str | None:
    """Return why a hub id cannot be loaded: it is not cached, and no hub is asked."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE or cached_file(model, "config.json") is not None:
        return None
    return (
        "it is neither a directory nor in the Hugging Face cache, and HF_HUB_OFFLINE is set, so "
        "the hub was not contacted; name a local copy in the model's table, for example --set "
        "student.model=DIR, or unset HF_HUB_OFFLINE."
    )


def cached_file(model: str | Path, name: str) -> Path | None:
    """Return a file of a model in a folder or in the hub's cache; None where it is not there."""
    if is_path(str(model)):
        file = Path(model) / name
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(model), name)
    return Path(cached) if isinstance(cached, str) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def fingerprint(model: str) -> str | None:
    """Return a text that changes with a model's content; None for one that is not on this machine.

    For a hub id it is the cached commit. For a folder it is a hash over names and sizes of the
    files, and over ``SAMPLES`` pieces of each. One changed weight may be missed.
    """
    folder = Path(model)
    if not folder.is_dir():
        cached = cached_file(model, "config.json")
        return None if cached is None else cached.parent.name
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in CONTENT or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        spacing = max(SAMPLE_BYTES, size // SAMPLES)
        with path.open("rb") as file:
            for offset in range(0, size, spacing):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def is_without_weights(model: str) -> bool:
    """Return whether a model is a folder without a file of weights, as of a tokenizer alone."""
    folder = Path(model)
    return folder.is_dir() and not any(one.suffix in WEIGHTS for one in folder.iterdir())


def cache_root() -> Path:
    """Return ``$PRIME_COMPOSER_CACHE``, or ``prime_composer`` in the user's cache folder."""
    own = os.environ.get(CACHE_VARIABLE)
    folder = own or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/prime_composer"
    return Path(os.path.expanduser(folder))
