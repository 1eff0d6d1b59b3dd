"""Eight sums."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [
            SumTask(SumData(idx=i, prompt=f"{i}+{i}=", answer=str(2 * i)), self.config.task)
            for i in range(8)
        ]


__all__ = ["SumTaskset"]
