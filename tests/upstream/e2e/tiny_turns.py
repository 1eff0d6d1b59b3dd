"""Numbers to spell, with settings of its own, which prime-rl's parser reads. Id: "tiny-turns"."""

import verifiers.v1 as vf


class TurnsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def spelled(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2)


class TurnsConfig(vf.TasksetConfig):
    first: int = 0


class TurnsTaskset(vf.Taskset[TurnsTask, TurnsConfig]):
    def load(self):
        first = self.config.first
        return [
            TurnsTask(vf.TaskData(idx=i, prompt=f"spell {first + i}"), self.config.task)
            for i in range(8)
        ]


__all__ = ["TurnsTaskset"]
