"""Let the student talk to an environment and its tools, in this process.

verifiers' own harnesses install and start a program per rollout, with uv and a network. This one is
the same plain chat loop, until an answer calls no tool. Importing this module imports verifiers.
"""

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic_core import to_json
from verifiers.v1.dialects.chat import message_to_wire

ANSWERED = (-32700, -32600, -32601, -32602, -32603)  # JSON-RPC: one call or its result fails

ID = "prime_composer_chat"  # The harness's id. verifiers imports a module of this name.


class ChatHarnessConfig(vf.HarnessConfig):
    """The harness has no settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """A chat loop with the tools of the environment."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Run the conversation to its end."""
        async with AsyncExitStack() as stack:
            stack.enter_context(first_of_a_group())
            # No proxy of the environment variables: both ends are in this process.
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=endpoint,
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=None,
                    verify=False,
                    trust_env=False,
                )
            )
            tools = await Tools.connect(mcp_urls, stack)
            messages = first_messages(*self.resolve_prompt(data))
            while True:
                body = {"model": ctx.model, "messages": messages}
                if tools.schemas:
                    body["tools"] = tools.schemas
                reply = await client.post("chat/completions", json=body)
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text[-2000:])
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    function = call["function"]
                    content = await tools.call(function)
                    # The tokenizer reads the call again with the conversation.
                    function["arguments"] = readable_arguments(function.get("arguments") or "{}")
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


def first_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return what a conversation begins with; ``prompt`` is a text or messages of verifiers."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *map(message_to_wire, prompt or ())]


@contextmanager
def first_of_a_group() -> Iterator[None]:
    """Raise what failed in place of the groups that mcp puts around it, which do not say it."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group


class Tools:
    """The tools of a rollout, on the environment's servers; ``schemas`` as in a chat request."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._calls: dict[str, tuple[Any, str]] = {}

    @classmethod
    async def connect(cls, urls: dict[str, str], stack: AsyncExitStack) -> "Tools":
        """Open a session with each server; ``stack`` closes them."""
        tools = cls()
        if not urls:
            return tools
        from mcp import ClientSession
        from mcp.client import streamable_http

        library: Any = vars(streamable_http).get("httpx2", httpx)  # of mcp 2, and of mcp 1
        # mcp's own client reads all certificates of the machine, a third of a rollout's time. It
        # keeps connections, which the server closes while a rollout waits for the others.
        client = await stack.enter_async_context(
            library.AsyncClient(
                timeout=None,  # a rollout has its own
                verify=any(url.startswith("https:") for url in urls.values()),
                trust_env=False,
                limits=library.Limits(max_keepalive_connections=0),
            )
        )
        for server, url in urls.items():
            streams = await stack.enter_async_context(
                streamable_http.streamable_http_client(url, http_client=client)
            )
            session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
            await session.initialize()
            for tool in (await session.list_tools()).tools:
                name = f"{server}_{tool.name}" if server else tool.name
                # The names of the fields differ between mcp 1 and 2, those on the wire do not.
                described = tool.model_dump(by_alias=True)
                function = {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": described["inputSchema"],
                }
                tools.schemas.append({"type": "function", "function": function})
                tools._calls[name] = session, tool.name
        return tools

    async def call(self, function: dict[str, Any]) -> str:
        """Return what a tool answers. A call that no tool understands is told so."""
        name = function["name"]
        try:
            arguments = json.loads(function.get("arguments") or "{}")
            to_json(arguments)  # as mcp writes it, and with its bounds
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON ({whole_letters(str(error))})"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        if name not in self._calls:
            return f"error: unknown tool {name!r}"
        session, own_name = self._calls[name]
        try:
            result = await session.call_tool(own_name, arguments)
        except Exception as error:
            # mcp 1 has the code in an object of its own.
            code = getattr(getattr(error, "error", error), "code", None)
            if code not in ANSWERED:
                raise
            return f"error: {whole_letters(str(error))}"
        texts = [getattr(block, "text", str(block)) for block in result.content]
        return whole_letters("\n".join(texts))


def readable_arguments(arguments: str) -> str:
    """Return the arguments of a call as written, unless half of a letter is in them."""
    try:
        written = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    whole = whole_letters(written)
    return arguments if whole == written else whole


def whole_letters(text: str) -> str:
    """Return a text with U+FFFD for each half of a letter (a lone surrogate), which none reads."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


__all__ = ["ChatHarness"]
