"""Which version the installed prime-rl is like, and which keys its config classes take.

prime-rl moves keys between its releases, so what is installed may lie between two ``records``. The
classes say what they take. Some parts of a TOML take any key: a dict, a class with extra keys
allowed, a class that another key chooses. A key that no class has is refused by prime-rl itself.

Importing this module imports neither prime-rl nor torch.
"""

import importlib
import importlib.util
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


def has_prime_rl() -> bool:
    """Return whether prime-rl's trainer can be imported, without importing it."""
    return _is_there(LOSS_MODULE)


def probe_version() -> Version:
    """Return the version of the importable prime-rl, by the fields of its config classes."""
    version = match_version(config_surface(_annotations_of))
    module, name = CONFIGS["rl"]
    return fitted(version, _class(module, name)) if _is_there(module) else version


def fitted(version: Version, root: type[BaseModel]) -> Version:
    """Return a record with each key that main moved where ``rl @ FILE`` has it, if at all."""
    places = {}
    for name, at_main in PLACES_OF_MAIN._asdict().items():
        candidates = (at_main, getattr(PLACES, name), getattr(version.places, name))
        found = (place for place in candidates if has_key(root, f"orchestrator.{place}"))
        places[name] = next(found, candidates[-1])
    keep = NEWEST_RUN.zero_advantages
    if not has_key(root, f"orchestrator.{keep}"):
        keep = None
    changed = replace(version, places=Places(**places), zero_advantages=keep)
    return version if changed == version else changed


def has_key(root: type[BaseModel], path: str) -> bool:
    """Return whether a config class and those within it take the key at a dotted path."""
    classes: Classes = [root]
    for key in path.split("."):
        if not _takes(classes, key):
            return False
        classes = _below(classes, key)
    return True


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
