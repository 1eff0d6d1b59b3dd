"""The generated word problems as an environment of one turn, for the benchmark of what it costs."""

import verifiers.v1 as vf

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import load_problems
from prime_composer.problems.metrics import reward


class SumsData(vf.TaskData):
    question: str
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        problem = Problem(self.data.question, self.data.answer)
        return reward(trace.last_reply, problem, DataConfig())


class SumsTasksetConfig(vf.TasksetConfig):
    size: int = 100


class SumsTaskset(vf.Taskset[SumsTask, SumsTasksetConfig]):
    def load(self):
        problems, _ = load_problems(DataConfig(size=self.config.size))
        return [
            SumsTask(
                SumsData(prompt=one.question, question=one.question, answer=one.answer),
                self.config.task,
            )
            for one in problems
        ]


__all__ = ["SumsTaskset"]
