"""One chat completion in this process; prime-rl's `null` harness needs PyPI at run time."""

import httpx
import verifiers.v1 as vf


class TinyHarnessConfig(vf.HarnessConfig):
    pass


class TinyHarness(vf.Harness[TinyHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data=None):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{endpoint.rstrip('/')}/chat/completions"
            reply = await client.post(url, headers={"Authorization": f"Bearer {secret}"}, json=body)
        if reply.status_code == 200:
            return vf.ProgramResult(0, reply.text[:200], "")
        return vf.ProgramResult(1, reply.text[:200], reply.text[:500])


__all__ = ["TinyHarness"]
