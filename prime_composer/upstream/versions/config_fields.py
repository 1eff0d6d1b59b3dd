"""Which version the installed prime-rl is like, and which keys its config classes take.

prime-rl moves keys between its releases, so what is installed may lie between two ``records``. The
classes say what they take. Some parts of a TOML take any key: a dict, a class with extra keys
allowed, a class that another key chooses.

Importing this module imports neither prime-rl nor torch.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel, SerializeAsAny

from prime_composer.upstream.versions.records import (
    CONFIGS,
    LOSS_MODULE,
    NEWEST_RUN,
    Version,
    config_surface,
    match_version,
)
from prime_composer.upstream.versions.toml_shapes import PLACES, PLACES_OF_MAIN, Places

Classes = list[type[BaseModel]]  # That a table may be of; empty: they do not say all keys


class ConfigFields:
    """The keys of a config class and of those within it."""

    def __init__(self, root: type[BaseModel]):
        self._root = root

    def has(self, path: str) -> bool:
        """Return whether a TOML may have the key at a dotted path."""
        classes: Classes = [self._root]
        for key in path.split("."):
            if not _takes(classes, key):
                return False
            classes = _below(classes, key)
        return True

    def unknown(self, table: Mapping[str, Any]) -> list[str]:
        """Return the dotted paths of all keys of a TOML that no class has, in its order."""
        return list(_unknown(table, [self._root], ""))


def has_prime_rl() -> bool:
    """Return whether prime-rl's trainer can be imported, without importing it."""
    return _is_there(LOSS_MODULE)


def importable_fields() -> ConfigFields | None:
    """Return what the importable prime-rl's ``rl @ FILE`` takes, None where there is none."""
    module, name = CONFIGS["rl"]
    return ConfigFields(_class(module, name)) if _is_there(module) else None


def probe_version() -> Version:
    """Return the version of the importable prime-rl, by the fields of its config classes."""
    version, fields = match_version(config_surface(_annotations_of)), importable_fields()
    return version if fields is None else fitted(version, fields)


def fitted(version: Version, fields: ConfigFields) -> Version:
    """Return a record with each key that main moved where the config classes have it, if at all."""
    places = {}
    for name, at_main in PLACES_OF_MAIN._asdict().items():
        candidates = (at_main, getattr(PLACES, name), getattr(version.places, name))
        found = (place for place in candidates if fields.has(f"orchestrator.{place}"))
        places[name] = next(found, candidates[-1])
    keep = NEWEST_RUN.zero_advantages
    if not fields.has(f"orchestrator.{keep}"):
        keep = None
    changed = replace(version, places=Places(**places), zero_advantages=keep)
    return version if changed == version else changed


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, None)


def _annotations_of(module: str, name: str) -> dict[str, str]:
    """Return the types of a class's fields, as ``SourceTree.annotations`` reads them."""
    owner = _class(module, name) if _is_there(module) else None
    kinds = {field: info.annotation for field, info in getattr(owner, "model_fields", {}).items()}
    return {
        field: kind.__name__ if isinstance(kind, type) else str(kind)
        for field, kind in kinds.items()
    }


def _unknown(table: Mapping[str, Any], classes: Classes, place: str) -> Iterator[str]:
    classes = [cls for cls in classes if _is_of_type(cls, table)] or classes
    for key, value in table.items():
        if not _takes(classes, key):
            yield f"{place}{key}"
            continue
        for below in value if isinstance(value, list) else [value]:
            if isinstance(below, Mapping):
                yield from _unknown(below, _below(classes, key), f"{place}{key}.")


def _takes(classes: Classes, key: str) -> bool:
    return not classes or any(
        key in _annotations(cls) or cls.model_config.get("extra") == "allow" for cls in classes
    )


def _below(classes: Classes, key: str) -> Classes:
    """Return the classes of a key's own table."""
    annotations = [_annotations(cls).get(key) for cls in classes]
    return [found for annotation in annotations for found in _classes(annotation)]


def _annotations(cls: type[BaseModel]) -> dict[str, Any]:
    """Return the annotation of each field, by its name and by its other names."""
    annotations = {}
    for name, field in cls.model_fields.items():
        alias = field.validation_alias
        others = alias.choices if isinstance(alias, AliasChoices) else [alias]
        chosen = any(type(item) is SerializeAsAny for item in field.metadata)
        for key in (name, *others):
            annotations[key] = None if chosen else field.annotation
    return annotations


def _classes(annotation: Any) -> Classes:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _classes(get_args(annotation)[0])
    parts = [] if get_origin(annotation) is dict else get_args(annotation)
    if any(part is Any or get_origin(part) is dict for part in parts):
        return []
    return [cls for part in parts for cls in _classes(part)]


def _is_of_type(cls: type[BaseModel], table: Mapping[str, Any]) -> bool:
    """Return whether a table names this member of a union by its ``type``."""
    field = cls.model_fields.get("type")
    return field is not None and table.get("type", field.default) in get_args(field.annotation)
