"""Numbers to spell, with a harness: one package for verifiers' v1 API. Its id is "tiny-turns".

Odd numbers take one turn, even ones as many as ``turns`` says.
"""

import httpx
import verifiers.v1 as vf


class TurnsData(vf.TaskData):
    turns: int


class TurnsTask(vf.Task[TurnsData]):
    @vf.reward(weight=1.0)
    async def spelled(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2)


class TurnsConfig(vf.TasksetConfig):
    turns: int = 1
    first: int = 0


class TurnsTaskset(vf.Taskset[TurnsTask, TurnsConfig]):
    def load(self):
        config = self.config
        return [
            TurnsTask(
                TurnsData(idx=i, prompt=f"spell {n}", turns=1 if n % 2 else config.turns),
                config.task,
            )
            for i, n in enumerate(range(config.first, config.first + 8))
        ]


class TurnsHarnessConfig(vf.HarnessConfig):
    pass


class TurnsHarness(vf.Harness[TurnsHarnessConfig]):
    """Ask, and ask again, in this process; prime-rl's `null` harness needs PyPI at run time."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data=None):
        url = f"{endpoint.rstrip('/')}/chat/completions"
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(
            timeout=60, headers={"Authorization": f"Bearer {secret}"}
        ) as client:
            for turn in range(1, data.turns + 1):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(url, json=body)
                if reply.status_code != 200:  # a limit of the rollout refuses a turn
                    return vf.ProgramResult(1, reply.text[:200], reply.text[:500])
                answer = reply.json()["choices"][0]["message"]["content"] or ""
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": f"again {turn}"})
        return vf.ProgramResult(0, "", "")


__all__ = ["TurnsHarness", "TurnsTaskset"]
