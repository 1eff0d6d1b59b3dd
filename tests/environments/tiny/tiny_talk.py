"""A conversation by script, for the tests of the engine: what is said, and what goes wrong.

``args.script`` is a list of what happens after each answer of the student. A string is said as
the user. ``{"messages": [...]}`` replaces the whole conversation. ``{"raise": ...}``,
``{"sleep": ...}``, ``{"block": ...}``, ``{"leave": ...}`` and ``{"forever": ...}`` are what they
say.
"""

import asyncio
import time
from typing import Any

import httpx
import verifiers.v1 as vf


class TalkData(vf.TaskData):
    script: list[Any] = []
    reward: str = "length"


class TalkTask(vf.Task[TalkData]):
    @vf.reward(weight=1.0)
    async def judged(self, trace: vf.Trace) -> float:
        match self.data.reward:
            case "nan":
                return float("nan")
            case "raise":
                raise KeyError("no judge")
            case "none":
                return None
            case "length":
                return float(len(trace.last_reply))
        return float(self.data.reward)


class TalkTasksetConfig(vf.TasksetConfig):
    script: list[Any] = []
    reward: str = "length"
    tasks: int = 2


class TalkTaskset(vf.Taskset[TalkTask, TalkTasksetConfig]):
    def load(self):
        config = self.config
        return [
            TalkTask(
                TalkData(prompt=f"task {i}", script=config.script, reward=config.reward),
                config.task,
            )
            for i in range(config.tasks)
        ]


class TalkHarnessConfig(vf.HarnessConfig):
    pass


class TalkHarness(vf.Harness[TalkHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(base_url=endpoint, timeout=None, trust_env=False) as client:

            async def say() -> httpx.Response:
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                return await client.post("chat/completions", json=body, headers=headers)

            for event in [*data.script, None]:
                match event:
                    case {"raise": message}:
                        raise KeyError(message)
                    case {"sleep": seconds}:
                        await asyncio.sleep(seconds)
                        continue
                    case {"block": seconds}:
                        time.sleep(seconds)
                        continue
                    case {"leave": _}:
                        break
                reply = await say()
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                answer = reply.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": answer})
                match event:
                    case str():
                        messages.append({"role": "user", "content": event})
                    case {"messages": replaced}:
                        messages[:] = replaced
                    case {"forever": text}:
                        while reply.status_code == 200:
                            messages.append({"role": "user", "content": text})
                            reply = await say()
                            if reply.status_code == 200:
                                answer = reply.json()["choices"][0]["message"]["content"]
                                messages.append({"role": "assistant", "content": answer})
                        return vf.ProgramResult(1, "", reply.text)
        return vf.ProgramResult(0, "", "")


__all__ = ["TalkHarness", "TalkTaskset"]
