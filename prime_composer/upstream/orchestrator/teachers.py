"""Several teachers in the place of the one that prime-rl is configured with, and their mixture."""

import asyncio
import functools
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prime_composer.backends.alignment import tensor_of
from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.recipe.urls import has_credentials, public_url, two_credentials
from prime_composer.teachers.mixture import mix
from prime_composer.upstream.teachers import Teacher, read_entries
from prime_composer.upstream.versions.toml_shapes import HEADER


def teachers_of(header: str) -> list[Teacher]:
    """Return the teachers that a header names, with weights that add up to 1."""
    try:
        return read_entries(json.loads(header))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"The header {HEADER} of the teacher's client must be a JSON list of {{url, model, "
            f"weight}} ({public_url(repr(error))}). Its value is not shown: it may have passwords."
        ) from None


@functools.cache
def client_of(url: str, api_key_var: str) -> Any:
    """Return the openai client of a teacher's server, one per server."""
    from openai import AsyncOpenAI

    key = os.environ.get(api_key_var)
    if key and has_credentials(url):
        raise ValueError(two_credentials(f"The url {public_url(url)} of a teacher", api_key_var))
    return AsyncOpenAI(base_url=url, api_key=key or "EMPTY", max_retries=5)


async def score_by_each(
    ask: Callable[[Any, str], Awaitable[Scores]],
    teachers: Sequence[Teacher],
    token_ids: Sequence[int],
) -> Scores:
    """Return the mixture of the teachers' scores, from the second token on.

    ``ask`` asks a client for those of the model that it serves by a name.
    """

    async def score(teacher: Teacher) -> Scores:
        client = client_of(teacher.url, teacher.api_key_var)
        try:
            return await ask(client, teacher.model)
        except InvalidAnswer:
            raise  # it says all
        except Exception as error:
            remedy = "Start its server before the run, or correct its [teachers] table."
            if getattr(error, "status_code", None) == 401:
                remedy = (
                    "It wants an API key: put it into the environment variable "
                    f"{teacher.api_key_var}, its api_key_var."
                )
            raise ValueError(
                f"The teacher {teacher.model} at {public_url(teacher.url)} did not score: "
                f"{public_url(str(error))} {remedy}"
            ) from error

    scores = await asyncio.gather(*map(score, teachers))
    weights = [teacher.weight for teacher in teachers]
    return await asyncio.to_thread(mix, tensor_of(token_ids[1:]), scores, weights, trained=False)
