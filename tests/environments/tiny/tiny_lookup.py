"""Four look-ups of a capital's river in two calls of a tool, for the tests of the engine."""

import verifiers.v1 as vf

TABLE = {"ada": "paris", "bob": "rome", "paris": "seine", "rome": "tiber"} | {
    "half": "half \ud800 a letter"
}


class LookupData(vf.TaskData):
    answer: str


class LookupTask(vf.Task[LookupData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class LookupToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def get(self, key: str) -> str:
        """Look a key up."""
        return TABLE.get(key, "unknown")


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self):
        return [
            LookupTask(
                LookupData(prompt=f"river of {name}?", answer=TABLE[TABLE[name]]), self.config.task
            )
            for name in ("ada", "bob")
        ]

    @classmethod
    def toolsets(cls, config):
        return [LookupToolset(vf.SharedToolsetConfig())]


__all__ = ["LookupTaskset"]

if __name__ == "__main__":
    LookupToolset.run()
