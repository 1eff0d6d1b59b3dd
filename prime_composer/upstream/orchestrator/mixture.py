"""Several teachers in the place of the one that prime-rl is configured with, and their mixture."""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prime_composer.backends.alignment import tensor_of
from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.recipe.urls import public_url
from prime_composer.teachers.mixture import mix
from prime_composer.upstream.settings import Teacher


@functools.cache
def client_of(url: str, api_key_var: str) -> Any:
    """Return the openai client of a teacher's server, one per server."""
    from openai import AsyncOpenAI

    key = os.environ.get(api_key_var) or "EMPTY"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=5)


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
