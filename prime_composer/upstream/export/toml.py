"""Write TOML with the library tomli-w, which prime-rl depends on as well."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_composer.losses.shared.dialect import plain_name
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.urls import has_credentials
from prime_composer.upstream.versions.records import OLD, VERSIONS


def to_toml(table: Mapping[str, Any]) -> str:
    """Return tables as a TOML document."""
    try:
        import tomli_w
    except ImportError:
        raise RecipeError("writing a TOML file needs tomli-w: pip install tomli-w") from None
    return tomli_w.dumps(table)


def as_text(table: Mapping[str, Any], head: Sequence[str]) -> str:
    """Return tables as a TOML document under a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return f"{comment}\n{to_toml(table)}" if head else to_toml(table)


def write_text(path: Path, text: str, replace: bool = True) -> None:
    """Write a document, 0600 if it has a password; ``FileExistsError`` without ``replace``."""
    private = has_credentials(text)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
    with open(os.open(path, flags, 0o600 if private else 0o666), "w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)  # the file that is overwritten may have another mode
        file.write(text)


def toml_value(value: Any) -> Any:
    """Return a value with tuples and sets as lists, the types that TOML has."""
    if isinstance(value, Mapping):
        return {key: toml_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [toml_value(item) for item in value]
    return value


def merge_native(target: dict[str, Any], native: Mapping[str, Any], version: str) -> None:
    """Merge a recipe's native settings, of all versions and of this one, into a table, in place."""
    own = {key: plain_name(key) for key in native if plain_name(key) in (*VERSIONS, *OLD)}
    for key, name in own.items():
        if name in OLD:
            raise RecipeError(
                f"prime_rl.{key} is for a version that no recipe is exported for: leave the table "
                "out"
            )
    for name in own.values():
        spellings = [key for key, plain in own.items() if plain == name]
        if len(spellings) > 1:
            raise RecipeError(f"prime_rl: {' and '.join(spellings)} are one version: keep one")
    merge(target, {key: value for key, value in native.items() if key not in own})
    for key, name in own.items():
        if not isinstance(native[key], Mapping):
            raise RecipeError(f"prime_rl.{key} is named after a version: write a table there")
        if name == version:
            merge(target, native[key], f"prime_rl.{key}")


def merge(target: dict[str, Any], source: Mapping[str, Any], place: str = "prime_rl") -> None:
    """Merge ``source`` into ``target``, table by table. Lists and values are replaced."""
    for key, value in source.items():
        if not isinstance(target.get(key), dict):
            target[key] = toml_value(value)
        elif isinstance(value, Mapping):
            merge(target[key], value, f"{place}.{key}")
        else:
            raise RecipeError(f"{place}.{key} is a value, and the export has a table there")
