"""Eight sums with a random reward, so that groups of a tiny model have advantages."""

import tiny_taskset
import verifiers.v1 as vf


class DiceTask(vf.Task[tiny_taskset.SumData]):
    @vf.reward(weight=1.0)
    async def lucky(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2)


class DiceTaskset(vf.Taskset[DiceTask, vf.TasksetConfig]):
    def load(self):
        return [
            DiceTask(tiny_taskset.SumData(idx=i, prompt=f"{i}-{i}=", answer="0"), self.config.task)
            for i in range(8)
        ]


__all__ = ["DiceTaskset"]
