"""Serve the recipe's [data], or one of its [environments], as an environment of prime-rl.

A cluster then trains on the same problems as one machine. prime-rl imports environments by id: the
wheel puts a top-level module ``prime_composer_problems`` beside the package, and its id is
"prime-composer-problems".

The settings are those of ``[data]``. The reward is the recipe's own metric of one answer, which
prime-rl logs as ``correct``, or by the name of a graded metric. prime-rl's evaluation is the mean
of these rewards, so that BLEU and chrF are means over sentences there. With ``metric = "none"`` an
answer has no reward, and nothing is evaluated. prime-rl renders the messages of a prompt, one or a
whole conversation, with the model's chat template.
"""

import asyncio
from typing import Any

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import load_problems
from prime_composer.problems.metrics import require_library, reward
from prime_composer.problems.prompts import prompt_messages, prompt_text

NAME = "prime-composer-problems"
MODULE = "prime_composer_problems"
# Fields of [data] that are settings of an environment. ``ratio`` and ``teacher`` are written beside
# it in prime-rl's config, and prime-rl always applies a chat template.
SETTINGS = (
    *("source", "path", "hub_id", "hub_name", "prompt_key", "answer_key", "limit", "prompt_chars"),
    *("clean", "kind", "size", "seed", "operations", "topics", "hold_out", "use"),
    *("calculator_annotations", "prompt_template", "metric", "teacher_key"),
    *("messages_key", "system", "system_key"),
)


def load_split(config: DataConfig, split: str, rows_of: str | None) -> list[Problem]:
    """Load "train" or "test": all rows, or those that name the teacher ``rows_of`` ("": none)."""
    require_library(config.metric)
    train, held_out = load_problems(config)
    problems = held_out if split == "test" else train
    return [
        problem for problem in problems if rows_of is None or (problem.teacher or "") == rows_of
    ]


def data_settings(config: DataConfig) -> dict[str, Any]:
    """Return ``[data]`` as environment settings: the source, and what differs from the defaults."""
    values = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    changed = {key: value for key, value in values.items() if key in SETTINGS}
    if config.messages_key is not None:  # which implies another template than the default one
        changed["prompt_template"] = config.prompt_template
    place = {"hub_id": config.hub_id, "hub_name": config.hub_name}
    return {"source": config.source, **(place if config.source == "hub" else {}), **changed}


def opening(problem: Problem, config: DataConfig) -> str | list[dict[str, str]]:
    """Return a prompt for verifiers: the user's text, or the messages of a longer conversation."""
    messages = prompt_messages(problem, config)
    return prompt_text(problem, config) if len(messages) == 1 else messages


CLASSES = ("ProblemData", "ProblemTask", "ProblemTaskset", "ProblemTasksetConfig")


def make_classes() -> dict[str, type]:
    """Return the taskset and its parts, by the names of ``CLASSES``."""
    from typing import Literal

    import verifiers.v1 as vf
    from pydantic import create_model

    class ProblemData(vf.TaskData):
        question: str
        answer: str
        data: dict[str, Any]

    class ProblemTask(vf.Task[ProblemData]):
        @vf.reward(weight=1.0)
        async def correct(self, trace: vf.Trace) -> float | dict[str, float]:
            problem = Problem(self.data.question, self.data.answer)
            config = DataConfig.model_validate(self.data.data)
            if not config.scored:
                return {}
            # In a thread: Math-Verify may take seconds, and the loop serves other rollouts.
            own = await asyncio.to_thread(reward, trace.last_reply or "", problem, config)
            return {config.metric: own} if config.graded else own

    fields: dict[str, Any] = {
        name: (DataConfig.model_fields[name].annotation, DataConfig.model_fields[name].default)
        for name in SETTINGS
    }
    fields["path"] = (str | None, None)
    fields["split"] = (Literal["train", "test"], "train")
    fields["rows_of"] = (str | None, None)
    config_class = create_model("ProblemTasksetConfig", __base__=vf.TasksetConfig, **fields)

    class ProblemTaskset(vf.Taskset[ProblemTask, config_class]):
        def load(self) -> list[Any]:
            values = {name: getattr(self.config, name) for name in SETTINGS}
            given = {key: value for key, value in values.items() if value is not None}
            config = DataConfig.model_validate(given)
            settings = data_settings(config)
            return [
                ProblemTask(
                    ProblemData(
                        idx=index,
                        prompt=opening(problem, config),
                        question=problem.question,
                        answer=problem.answer,
                        data=settings,
                    ),
                    self.config.task,
                )
                for index, problem in enumerate(
                    load_split(config, self.config.split, self.config.rows_of)
                )
            ]

    classes = (ProblemData, ProblemTask, ProblemTaskset, config_class)
    for cls in classes:
        # Workers of an env server, and pickle, look classes up by module and name.
        cls.__module__, cls.__qualname__ = MODULE, cls.__name__
    return dict(zip(CLASSES, classes, strict=True))
