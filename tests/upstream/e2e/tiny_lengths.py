"""Eight sums: the reward of odd ones is the answer's length, of even ones 1."""

import tiny_taskset
import verifiers.v1 as vf


class LengthTask(vf.Task[tiny_taskset.SumData]):
    @vf.reward(weight=1.0)
    async def length(self, trace: vf.Trace) -> float:
        return trace.num_output_tokens / 12 if self.data.idx % 2 else 1.0


class LengthTaskset(vf.Taskset[LengthTask, vf.TasksetConfig]):
    def load(self):
        return [
            LengthTask(tiny_taskset.SumData(idx=i, prompt=f"{i}+{i}=", answer=""), self.config.task)
            for i in range(8)
        ]


__all__ = ["LengthTaskset"]
