"""Tables: what no key takes, in the whole package."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import prime_composer.cli.study_file
import prime_composer.upstream.settings  # noqa: F401
from prime_composer.losses import LOSS_TYPES
from prime_composer.recipe.schema import Recipe
from prime_composer.tables import Table


def package_tables(base: type[Table] = Table) -> Iterator[type[Table]]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith("prime_composer."):
            yield cls
        yield from package_tables(cls)


TABLES = sorted(set(package_tables()), key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def test_tables_are_all_of_the_package() -> None:
    assert {Recipe, *LOSS_TYPES.values()} <= set(TABLES)
    ours = {cls for cls in BaseModel.__subclasses__() if cls.__module__.startswith("prime_comp")}
    assert ours == {Table}


PATHS = [
    (cls, name)
    for cls in TABLES
    for name, schema in cls.model_json_schema().get("properties", {}).items()
    if '"format": "path"' in json.dumps(schema)
]


def messages(cls: type[Table], name: str, value: Any) -> list[str]:
    with pytest.raises(ValidationError) as refusal:
        cls.model_validate({name: value})
    return [error["msg"] for error in refusal.value.errors() if error["loc"][0] == name]


def test_key_of_a_path_refuses_a_url() -> None:
    """As a path, ``http://me:secret@host`` would lose a slash, and show its password."""
    expected = ["Value error, a URL is no path; write the path of a file or folder"]
    assert PATHS
    for cls, name in PATHS:
        assert messages(cls, name, "http://me:secret@host") == expected, (cls, name)
