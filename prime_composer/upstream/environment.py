"""The recipe's [data], or one of its [environments], as a prime-rl environment: a cluster practises on the same problems as
one machine.

prime-rl finds it by the id "prime-composer-problems" (the module of that name beside the package, which the wheel puts
there): ``load_environment`` for v0.6, ``ProblemTaskset`` for v0.7 and newer. Settings are those of ``[data]``; the reward
is the recipe's own answer check. prime-rl renders the prompt as a user message with the model's chat template.
"""

from typing import Any

from prime_composer.problems.answers import is_correct
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import load_problems
from prime_composer.problems.prompts import prompt_text

NAME = "prime-composer-problems"
EXPORTED = ("source", "path", "hub_id", "hub_name", "size", "seed", "operations", "hold_out", "calculator_annotations",
            "prompt_template", "answer_check", "teacher_key")  # fmt: skip
"""Fields of ``[data]`` that an environment has; ``chat_template`` is prime-rl's renderer's business, and ``ratio`` and
``teacher`` stand beside the environment in prime-rl's config."""


def load_split(config: DataConfig, split: str, rows_of: str | None) -> list[Problem]:
    """The problems of a split, "train" or "test"; with ``rows_of``, those whose row names that teacher ("": names none)."""
    train, held_out = load_problems(config)
    problems = held_out if split == "test" else train
    return [
        problem for problem in problems if rows_of is None or (problem.teacher or "") == rows_of
    ]


def data_settings(config: DataConfig) -> dict[str, Any]:
    """``[data]`` as environment settings: what differs from the defaults, and the source."""
    values = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {
        "source": config.source,
        **{key: value for key, value in values.items() if key in EXPORTED},
    }


def load_environment(split: str = "train", rows_of: str | None = None, **settings: Any) -> Any:
    """A single-turn environment of verifiers' first API, for prime-rl v0.6."""
    import verifiers as vf
    from datasets import Dataset

    config = DataConfig.model_validate(settings)

    def rows(problems: list[Problem]) -> Any:
        return Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": prompt_text(problem, config)}],
                    "answer": problem.answer,
                    "info": {"question": problem.question},
                }
                for problem in problems
            ]
        )

    def correct(completion: Any, answer: str, info: dict[str, Any], **_: Any) -> float:
        text = (
            completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
        )
        return float(is_correct(text, Problem(info["question"], answer), config))

    first, second = load_split(config, split, rows_of), load_split(config, "test", rows_of)
    held_out = rows(second) if second else None  # no held-out row may name the teacher of rows_of
    return vf.SingleTurnEnv(
        dataset=rows(first), eval_dataset=held_out, rubric=vf.Rubric(funcs=[correct])
    )


CLASSES = ("ProblemData", "ProblemTask", "ProblemTaskset", "ProblemTasksetConfig")


def make_classes() -> dict[str, type]:
    """The taskset of verifiers' second API with the classes it is made of, by the names of ``CLASSES``. Its config has
    the fields of ``[data]``, ``split`` and ``rows_of``."""
    from typing import Literal

    import verifiers.v1 as vf
    from pydantic import create_model

    class ProblemData(vf.TaskData):
        question: str
        answer: str
        data: dict[str, Any]

    class ProblemTask(vf.Task[ProblemData]):
        @vf.reward(weight=1.0)
        async def correct(self, trace: vf.Trace) -> float:
            problem = Problem(self.data.question, self.data.answer)
            return float(
                is_correct(
                    trace.last_reply or "", problem, DataConfig.model_validate(self.data.data)
                )
            )

    fields: dict[str, Any] = {
        name: (DataConfig.model_fields[name].annotation, DataConfig.model_fields[name].default)
        for name in EXPORTED
    }
    fields["path"] = (str | None, None)
    fields["split"] = (Literal["train", "test"], "train")
    fields["rows_of"] = (str | None, None)
    config_class = create_model("ProblemTasksetConfig", __base__=vf.TasksetConfig, **fields)

    class ProblemTaskset(vf.Taskset[ProblemTask, config_class]):
        def load(self) -> list[Any]:
            values = {name: getattr(self.config, name) for name in EXPORTED}
            config = DataConfig.model_validate(
                {key: value for key, value in values.items() if value is not None}
            )
            problems = load_split(config, self.config.split, self.config.rows_of)
            settings = data_settings(config)
            return [
                ProblemTask(
                    ProblemData(
                        idx=i, prompt=prompt_text(problem, config), question=problem.question, answer=problem.answer,
                        data=settings,
                    ),
                    self.config.task,
                )
                for i, problem in enumerate(problems)
            ]  # fmt: skip

    classes = (ProblemData, ProblemTask, ProblemTaskset, config_class)
    for cls in classes:
        # Workers of an env server, and pickle, find classes again by module and name.
        cls.__module__, cls.__qualname__ = "prime_composer_problems", cls.__name__
    return dict(zip(CLASSES, classes, strict=True))
