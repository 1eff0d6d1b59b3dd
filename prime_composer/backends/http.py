"""A connection to one HTTP server that may be away for a moment, slow, or wrong.

A request is sent again, with exponential back-off and jitter, where the server may come back: the
connection fails, or the status is one of ``RETRIED``. ``Retry-After`` is honored. Each request
waits at most ``wait`` seconds, counted from its first failure. Every answer is bounded in time and
in size while it is read. The calling thread leaves at once when it is interrupted.
"""

import asyncio
import concurrent.futures
import email.utils
import json
import os
import random
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from prime_composer.backends.errors import RequestRefused, ServerError, check_wanted
from prime_composer.extras import pip_install
from prime_composer.recipe.backends import Served
from prime_composer.recipe.urls import public_url, two_credentials

try:
    import httpx
except ModuleNotFoundError as error:
    raise ImportError(f"A server needs {error.name}: {pip_install('engine')}.") from error

T = TypeVar("T")
Item = TypeVar("Item")

RETRIED = frozenset({408, 429, 500, 502, 503, 504})  # Statuses of a server that may answer later

FIRST_WAIT = 2.0  # Seconds for a server that has never answered: its URL may be wrong

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 4.0  # Idle ones are closed before vLLM does it (5 s)

ALIGNED = 64  # Bytes. An address for every dtype is a multiple of this.
SHORT_ANSWER = 2**20  # Bytes that any answer may have, whatever was asked

ERROR_BYTES = 2**16  # Bytes that are read of an answer that is an error

TICK = 0.25  # Seconds between two looks at a pending request

AWAY_SECONDS = 2.0  # Age at which a server that is away is reported first

QUIET_SECONDS = 60.0  # The same for a server that does not answer

NO_ANSWER = "no answer yet"


@dataclass(eq=False)
class Away(Exception):
    """A try failed, and another one may succeed, after the seconds that the server asks for."""

    reason: str
    status: int | None = None
    retry_after: float = 0.0
    details: str = ""


@dataclass
class Waiting:
    """What the run waits for: why, how long at most, at which age it is shown next, since when."""

    reason: str
    limit: float
    due: float
    since: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        return time.monotonic() - self.since

    def is_due(self) -> bool:
        """Return whether to show it now: at twice the age, at most a minute later."""
        if self.age < self.due:
            return False
        self.due = min(2 * self.due, self.due + 60.0)
        return True


def back_off(tries: int) -> float:
    """Return the seconds before another try, drawn, so that many requests do not come at once."""
    return random.uniform(0.02, min(10.0, 0.1 * 2 ** min(tries, 7)))


class Incoming:
    """The bytes of an answer as they come; the last ``tail`` begin at an aligned address."""

    def __init__(self, length: int | None, tail: int):
        self.size = 0
        self._grown: bytearray | None = bytearray() if length is None else None
        if length is not None:
            space = np.empty(length + ALIGNED, np.uint8)
            first = -(space.ctypes.data + length - tail) % ALIGNED
            self._view = space.data[first : first + length]

    def add(self, chunk: bytes) -> None:
        begin, self.size = self.size, self.size + len(chunk)
        if self._grown is not None:
            self._grown += chunk
        else:
            self._view[begin : self.size] = chunk

    def view(self) -> memoryview:
        whole = self._view if self._grown is None else memoryview(self._grown)
        return whole[: self.size]


class Connection:
    """Sends requests to the server of a table, many at once.

    A user and a password in its ``url`` are sent as Basic authentication, and not shown.
    ``section`` is the recipe's table, for messages. ``outages`` counts how often the server was
    away and came back: it may be another process since. ``ServerError`` is raised where key or
    environment cannot be used.
    """

    def __init__(
        self,
        served: Served,
        section: str,
        *,
        starting: bool = False,  # wait in full for a server that has never answered
        status: Callable[[str], None] | None = None,  # shown whom the run waits for
        concurrency: int = 32,  # requests sent at once
    ):
        assert served.url is not None
        self.served = served
        self.section = section
        self.concurrency = concurrency
        self.outages = 0
        self._starting = starting or served.may_be_starting
        self._status = status
        self._met = False
        self._outage: Waiting | None = None
        self._announced: Waiting | None = None
        self._quiet = Waiting(NO_ANSWER, served.timeout, QUIET_SECONDS)
        base = served.url.rstrip("/").removesuffix("/v1")
        self.url = public_url(base)
        self._client = self._open_client(base)
        self._turns = asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        owners = {"[teacher]": "the teacher's server", "[rollout]": "the student's server"}
        return f"{owners.get(self.section, f'the server of {self.section}')} at {self.url}"

    def error(self, message: str, key: str | None = None) -> ServerError:
        """Return an error about this server, where a ``key`` of its table is the remedy."""
        sentence = message[0].upper() + message[1:]
        key = None if key is None else f"{self.section.strip('[]')}.{key}"
        return ServerError(sentence, url=self.url, section=self.section, key=key)

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status(text)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, and meanwhile report for whom the run waits."""
        self._heard()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=TICK).done:
                check_wanted()
                self._report()
            self._report()
            return future.result()
        finally:
            future.cancel()

    def map(
        self, function: Callable[[Item], Coroutine[Any, Any, T]], items: Sequence[Item]
    ) -> list[T]:
        """Return ``function`` of each item, run concurrently, in order. An error stops the rest."""
        return self.run(gather_all([function(item) for item in items]))

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        max_bytes: int = SHORT_ANSWER,
        seconds: float = 0.0,  # for the answer, in addition to the table's time-out
        retried: frozenset[int] = RETRIED,  # statuses after which the request is sent again
        tail: int = 0,  # bytes at the end that begin at an aligned address, if the length is told
    ) -> memoryview:
        """Send one request, again while the server is away, and return the answer's body.

        The answer is in memory once, while and after it comes. ``ServerError``: it is away for too
        long, too slow, or its answer too large. ``RequestRefused``: an error that is not retried.
        """
        content = None if body is None else json.dumps(body).encode()
        request = self._client.build_request(
            method, path, content=content, extensions={"trace": keep_alive}
        )
        since, tries = None, 0
        async with self._turns:
            while True:
                try:
                    return await self._try(
                        request, max_bytes, self.served.timeout + seconds, retried, tail
                    )
                except Away as away:
                    since, tries = since or time.monotonic(), tries + 1
                    left = since + self._patience(away) - time.monotonic()
                    if left <= away.retry_after:
                        raise self._gave_up(away) from away.__cause__
                    pause = max(min(back_off(tries), left), away.retry_after)
                await asyncio.sleep(pause)

    def close(self) -> None:
        """Cancel what is pending and close the connections. Closing twice is harmless."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._client.aclose()

    async def _try(
        self,
        request: httpx.Request,
        max_bytes: int,
        seconds: float,
        retried: frozenset[int],
        tail: int,
    ) -> memoryview:
        self._quiet.limit = seconds
        path = request.url.path
        try:
            async with asyncio.timeout(seconds):
                response, answer = await self._exchange(request, max_bytes, tail)
        except httpx.TransportError as error:
            error.__traceback__ = None  # it holds what came of the answer
            if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
                raise self.error(f"{self.name} cannot be asked: {error}.") from error
            raise self._away(Away(words_of(error))) from error
        except TimeoutError as error:
            raise self.error(
                f"{self.name} did not finish its answer to {path} within {seconds:g} s; is it "
                f"overloaded or hung? If it is only slow, raise timeout = {self.served.timeout:g} "
                f"in {self.section}.",
                "timeout",
            ) from error
        status = response.status_code
        if status in retried:
            wanted = seconds_of(response.headers.get("Retry-After", ""))
            raise self._away(Away(str(status), status, wanted, reason_of(answer)))
        self._heard()
        if self._outage is not None:
            # A server that has too much to do (408, 429) is still the same one.
            self.outages += self._outage.reason not in ("408", "429")
            self._outage = None
        if not response.is_success:
            raise RequestRefused(status, reason_of(answer))
        return answer

    async def _exchange(
        self, request: httpx.Request, max_bytes: int, tail: int
    ) -> tuple[httpx.Response, memoryview]:
        """Return a response and its body, of an error the first ``ERROR_BYTES``."""
        response = await self._client.send(request, stream=True)
        try:
            self._met = True
            limit = max_bytes if response.is_success else ERROR_BYTES
            announced = response.headers.get("Content-Length", "")
            length = int(announced) if announced.isdecimal() else None
            is_too_long = length is not None and length > limit
            answer = Incoming(None if is_too_long else length, tail)
            if not (is_too_long and response.is_success):
                async for chunk in response.aiter_raw():
                    answer.add(chunk)
                    is_too_long = answer.size > limit
                    if is_too_long:
                        break
        finally:
            await response.aclose()
        if is_too_long and response.is_success:
            begins = f"; the answer begins {excerpt(answer.view())}" if answer.size else ""
            raise self.error(
                f"{self.name} answers {request.url.path} with more than {limit:,} bytes, the most "
                f"that this request can need{begins}."
            )
        return response, answer.view()[:limit]

    def _heard(self) -> None:
        """Count anew how long the server has been quiet."""
        self._quiet = Waiting(NO_ANSWER, self._quiet.limit, QUIET_SECONDS)

    def _away(self, away: Away) -> Away:
        if self._outage is None:
            self._outage = Waiting(away.reason, self.served.wait, AWAY_SECONDS)
        self._outage.reason = away.reason
        return away

    def _patience(self, away: Away) -> float:
        """Return the seconds that a request waits in all, from its first failure on."""
        in_full = self._starting or self._met or away.status
        return self.served.wait if in_full else min(self.served.wait, FIRST_WAIT)

    def _gave_up(self, away: Away) -> ServerError:
        wait, section = self.served.wait, self.section
        proxy = proxy_of(self.url)
        if not self._met:
            waited, verb = (f" within {wait:g} s", "raise") if self._starting else ("", "set")
            message = (
                f"No vLLM server answers at {self.url}{waited} ({away.reason}{proxy}); start one, "
                f"`vllm serve MODEL --port ...`, or correct the url in {section}, or {verb} wait "
                f"in {section} to wait for a server that is still starting."
            )
        elif away.retry_after:
            message = (
                f"{self.name} answered {away.status} and asks to come back after "
                f"{away.retry_after:g} s, which is more than is left of wait = {wait:g} in "
                f"{section}; raise it."
            )
        else:
            details = f": {away.details}" if away.details else ""
            message = (
                f"{self.name} was away for {wait:g} s ({away.reason}{details}{proxy}); start it "
                f"again, or raise wait in {section}."
            )
        return self.error(message, "wait")

    def _report(self) -> None:
        outage = self._outage
        if self._announced is not None and self._announced is not outage:
            self.show(f"{self.name} is back after {self._announced.age:.0f} s")
            self._announced = None
        waiting = outage or self._quiet
        if waiting.is_due():
            self._announced = outage
            self.show(
                f"waiting for {self.name}: {waiting.reason} ({waiting.age:.0f} of "
                f"{waiting.limit:g} s)"
            )

    def _open_client(self, base: str) -> httpx.AsyncClient:
        parts = urlsplit(base)
        login, _, host = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        variable, api_key = self.served.api_key_var, self.served.api_key
        if api_key:
            if login:
                raise self.error(two_credentials(f"The url in {self.section}", variable))
            check_api_key(api_key, variable, self.section)
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            return httpx.AsyncClient(
                base_url=urlunsplit(parts._replace(netloc=host)),
                auth=httpx.BasicAuth(unquote(user), unquote(password)) if login else None,
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(
                    max_connections=self.concurrency,
                    max_keepalive_connections=self.concurrency,
                    keepalive_expiry=KEEPALIVE_SECONDS,
                ),
            )
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            # An OSError is one of certificates, the others are of proxies.
            kind = "SSL_CERT" if isinstance(error, OSError) else "_PROXY"
            names = [name for name in environment_of_requests() if kind in name.upper()]
            if not names:
                raise
            raise self.error(
                f"No request can be sent to {self.url}, because of the environment variable "
                f"{' or '.join(names)} ({public_url(str(error))}); correct or unset it."
            ) from error


async def keep_alive(event: str, info: dict[str, Any]) -> None:
    """Let the kernel probe each new connection, so that a host that died is noticed in a minute."""
    if event == "connection.connect_tcp.complete":
        connected = info["return_value"].get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def environment_of_requests() -> list[str]:
    """Return the variables that are set and change how a request is sent."""
    names = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
    return [each for name in names for each in (name, name.upper()) if os.environ.get(each)]


def proxy_of(url: str) -> str:
    """Return a note about the proxy that requests to ``url`` go through; empty for none."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    for kind in (parts.scheme, "all"):
        for name in (f"{kind}_proxy", f"{kind.upper()}_PROXY"):
            if os.environ.get(name):
                return f", asked through the proxy that {name} names"
    return ""


def check_api_key(api_key: str, variable: str, section: str) -> None:
    """Check that an HTTP header can carry the key."""
    wrong = re.search(r"[^\x21-\x7e]", api_key)
    if wrong is not None:
        raise ServerError(
            f"The environment variable {variable}, the API key of {section}, has "
            f"{ascii(wrong[0])} at position {wrong.start() + 1} of {len(api_key)}, which a request "
            "cannot carry; set it again, without line break, spaces or letters other than ASCII.",
            section=section,
        )


def seconds_of(retry_after: str) -> float:
    """Return the seconds of a ``Retry-After`` header, a number or an HTTP date; 0.0 for others."""
    try:
        if retry_after.isdecimal():
            return float(retry_after)
        date = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def reason_of(answer: memoryview) -> str:
    """Return the words of an error's body."""
    try:
        reason = json.loads(bytes(answer))["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return excerpt(answer)
    return reason[:1000] if isinstance(reason, str) else excerpt(answer)


def words_of(error: BaseException) -> str:
    """Return why a connection failed, in the operating system's words where it has some."""
    words = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror | ssl.SSLError):
            words = cause.strerror or str(cause)
        elif isinstance(cause, OSError) and cause.errno:
            words = os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return public_url(words.rstrip("."))


def excerpt(content: bytes | memoryview) -> str:
    """Return how an answer begins: printable, at most 200 characters."""
    if not content:
        return "with nothing: it is empty"
    shown = ascii(bytes(content[:200]).decode("utf-8", "replace"))
    return shown if len(shown) <= 200 else shown[:196] + "...'"
