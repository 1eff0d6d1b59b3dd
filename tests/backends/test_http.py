"""The connection against servers of this test that are away, slow, too large, or no server."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from prime_composer.backends import http
from prime_composer.backends.http import Connection, RequestRefused, ServerError
from prime_composer.recipe.backends import Served
from tests.stand_in import DROPPED, Reply, StandIn, free_port


class Answers(StandIn):
    """A server whose answers a test scripts: each request takes the next one, the last one stays.

    An answer is a reply, or a function that writes to the connection itself.
    """

    def __init__(self, *script: Any, port: int = 0):
        super().__init__(self.next_answer, port)
        self.script = list(script)
        self.seen: list[tuple[float, Any]] = []
        self.start()

    def next_answer(self, _: str, __: str, ___: bytes, headers: Mapping[str, str]) -> Reply:
        self.seen.append((time.monotonic(), headers))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return answer if isinstance(answer, Reply) else Reply((), None, raw=answer)


GOOD = Reply.of(b"good")


def status(code: int, **headers: str) -> Reply:
    """Return a scripted error."""
    return Reply.of({"error": {"message": f"told {code}"}}, status=code, **headers)


BACK_OFF = http.back_off  # the one of the package; tests have a shorter one


def test_pause_is_bounded_however_long_a_server_is_away() -> None:
    """Python computes a power before its minimum, and a float has no 2**1024."""
    assert 0.02 <= BACK_OFF(0) <= 0.1 and max(BACK_OFF(tries) for tries in range(5000)) <= 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(http, "back_off", lambda tries: 0.02)
    monkeypatch.setattr(http, "FIRST_WAIT", 0.2)
    monkeypatch.setattr(http, "TICK", 0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., Answers]]:
    """Return a function that starts a server with a script."""
    servers = []

    def start(*script: Any, port: int = 0) -> Answers:
        servers.append(Answers(*script, port=port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    """Return a function that opens a connection for a table, [teacher] unless it is named."""
    opened = []

    def connect(
        url: str,
        section: str = "[teacher]",
        starting: bool = False,
        status: Any = None,
        wait: float = 5.0,
        **table: Any,
    ) -> Connection:
        served = Served(url=url, wait=wait, **table)
        served.model_fields_set.discard("wait")  # where it is set, a server may be starting
        opened.append(Connection(served, section, starting=starting, status=status))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def ask(connection: Connection, **bounds: Any) -> memoryview:
    return connection.run(connection.request("POST", "/v1/completions", {"a": 1}, **bounds))


def test_status_of_a_busy_server_is_asked_again(serve, connect):
    server = serve(*map(status, (408, 429, 500, 502, 503, 504)), GOOD)
    assert ask(connect(server.url)) == b"good"
    assert len(server.seen) == 7


@pytest.mark.parametrize("code", [301, 400, 501])
def test_status_of_a_refusal_is_never_asked_again(code, serve, connect):
    server = serve(status(code), GOOD)
    with pytest.raises(RequestRefused) as refused:
        ask(connect(server.url))
    assert (refused.value.status, refused.value.reason) == (code, f"told {code}")
    assert len(server.seen) == 1


def test_restarted_server_is_waited_for(serve, connect):
    server = serve(GOOD)
    connection = connect(server.url)
    assert ask(connection) == b"good" and connection.outages == 0
    server.stop()
    later = threading.Timer(0.4, lambda: serve(Reply.of(b"again"), port=server.port))
    later.start()
    assert ask(connection) == b"again"
    assert connection.outages == 1
    later.join()


def test_connection_that_is_dropped_mid_answer_is_retried(serve, connect):
    def cut(write):
        write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

    server = serve(DROPPED, cut, GOOD)
    assert ask(connect(server.url)) == b"good"
    assert len(server.seen) == 3


def test_server_that_never_answered_ends_soon_and_names_wait(connect):
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    refused = r"No vLLM server answers at .*\(connection refused\).* set wait in \[teacher\]"
    with pytest.raises(ServerError, match=refused) as gone:
        ask(connect(url, wait=600.0))
    assert time.monotonic() - started < 10 and gone.value.key == "teacher.wait"
    with pytest.raises(ServerError, match=r" within 0.5 s .* raise wait in \[teacher\]"):
        ask(connect(url, wait=0.5, starting=True))


def test_server_that_is_starting_is_waited_for(serve, connect):
    """It comes up after the wait for a server that may not exist is over."""
    port = free_port()
    connection = connect(f"http://127.0.0.1:{port}", starting=True)
    later = threading.Timer(3 * http.FIRST_WAIT, lambda: serve(GOOD, port=port))
    later.start()
    assert ask(connection) == b"good"
    later.join()


def test_wait_that_is_over_names_server_and_key(serve, connect):
    server = serve(GOOD, status(503))
    connection = connect(server.url, wait=0.3, section="[teachers.big]")
    ask(connection)
    started = time.monotonic()
    with pytest.raises(ServerError) as gone:
        ask(connection)
    assert 0.25 < time.monotonic() - started < 10
    assert "503: told 503" in str(gone.value) and server.url in str(gone.value)
    assert (gone.value.url, gone.value.section) == (server.url, "[teachers.big]")
    assert gone.value.key == "teachers.big.wait"


def test_wait_counts_from_a_requests_first_failure(serve, connect):
    """A request that worked for longer than ``wait`` and then failed is still asked again."""

    def slowly(write):
        time.sleep(0.3)
        write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")

    assert ask(connect(serve(slowly, GOOD).url, wait=0.2)) == b"good"


def test_retry_after_is_honored(serve, connect):
    server = serve(status(429, Retry_After="1"), GOOD)
    assert ask(connect(server.url)) == b"good"
    (first, _), (second, _) = server.seen
    assert second - first >= 1.0


def test_retry_after_beyond_the_wait_ends_at_once(serve, connect):
    server = serve(status(503, Retry_After="900"))
    with pytest.raises(ServerError, match=r"come back after 900 s, .* wait = 5 in \[teacher\]"):
        ask(connect(server.url))
    assert len(server.seen) == 1


def test_dripping_answer_ends_at_the_deadline(serve, connect):
    """A byte now and then resets a read's time-out; the time for the whole answer counts."""

    def drip(write):
        write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            for _ in range(1000):
                write(b" ")
                time.sleep(0.05)
        except OSError:
            pass

    started = time.monotonic()
    with pytest.raises(ServerError, match=r"within 0.4 s.*raise timeout = 0.3 in \[t") as slow:
        ask(connect(serve(drip).url, timeout=0.3), seconds=0.1)
    assert slow.value.key == "teacher.timeout" and time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["announced", "chunked", "compressed"])
def test_huge_answer_is_not_read(kind, serve, connect):
    """300 MB, or what would become 300 MB, are refused after at most a few chunks."""
    sent = [0]

    def huge(write):
        head = b"HTTP/1.1 200 OK\r\n"
        if kind == "announced":
            write(head + b"Content-Length: 314572800\r\n\r\n")
        elif kind == "chunked":
            write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        else:
            bomb = gzip.compress(b" " * 50_000_000)
            write(head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)
            return
        block = b"x" * 2**16
        for _ in range(4800):
            write(b"10000\r\n" + block + b"\r\n" if kind == "chunked" else block)
            sent[0] += len(block)

    server = serve(huge)
    connection = connect(server.url)
    if kind == "compressed":  # never unpacked: what comes is the small body itself
        assert len(ask(connection)) < 100_000
        assert server.seen[0][1]["Accept-Encoding"] == "identity"
        return
    with pytest.raises(ServerError, match=r"answers /v1/completions with more than 100,000 bytes"):
        ask(connection, max_bytes=100_000)
    assert sent[0] < 20_000_000  # what the buffers of both sides hold


def test_outage_of_many_requests_is_reported_once(serve, connect, monkeypatch):
    """32 requests wait for one server: some lines at growing intervals, and one at the end."""
    monkeypatch.setattr(http, "AWAY_SECONDS", 0.1)
    lines: list[str] = []
    server = serve(GOOD)
    url = server.url
    connection = connect(url, status=lines.append, wait=60.0)
    ask(connection)
    server.script = [status(503)]
    healed = threading.Timer(0.9, lambda: setattr(server, "script", [GOOD]))
    healed.start()

    async def once(_):
        return await connection.request("POST", "/v1/completions", {})

    assert connection.map(once, range(32)) == [b"good"] * 32
    healed.join()
    told = [line for line in lines if line.startswith(f"waiting for the teacher's server at {url}")]
    # On a busy machine a late 503 may come after the first good answer.
    assert len(told) >= 2 and len(lines) <= 10 and connection.outages < 32
    assert lines[-1].startswith(f"the teacher's server at {url} is back after ")


def test_server_without_a_sign_of_life_is_reported(serve, connect, monkeypatch):
    monkeypatch.setattr(http, "QUIET_SECONDS", 0.1)
    lines: list[str] = []

    def late(write):
        time.sleep(0.5)
        write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")

    connection = connect(serve(late).url, status=lines.append, section="[rollout]")
    assert ask(connection) == b"good"
    assert lines and all("the student's server" in line for line in lines)
    assert lines[0].endswith("no answer yet (0 of 600 s)")


def test_outages_leave_out_a_busy_server(serve, connect):
    connection = connect(serve(status(429), status(408), GOOD).url)
    assert ask(connection) == b"good" and connection.outages == 0


def test_error_of_one_request_ends_the_others(serve, connect):
    """The others are not waited for, neither in flight nor between two tries."""
    server = serve(GOOD)
    connection = connect(server.url, wait=600.0)
    ask(connection)
    server.script = [status(503)] * 3 + [status(404)] + [status(503)]

    async def once(_):
        return await connection.request("POST", "/v1/completions", {})

    started = time.monotonic()
    with pytest.raises(RequestRefused, match="told 404"):
        connection.map(once, range(8))
    assert time.monotonic() - started < 10


def test_credentials_are_sent_and_never_shown(serve, connect):
    server = serve(status(503))
    url = server.url.replace("//", "//us%20er:p%40ss@") + "/v1"
    connection = connect(url, wait=0.0)
    with pytest.raises(ServerError) as error:
        ask(connection)
    assert connection.url == server.url.replace("//", "//***@")
    assert connection.url in str(error.value) and "p%40ss" not in str(error.value)
    # "us er:p@ss" in base 64
    assert server.seen[0][1]["Authorization"] == "Basic dXMgZXI6cEBzcw=="


def test_credentials_of_both_kinds_are_refused(connect, monkeypatch):
    monkeypatch.setenv("A_KEY", "key-1")
    with pytest.raises(ServerError) as error:
        connect("http://me:secret@host:1", api_key_var="A_KEY")
    assert "url in [teacher]" in str(error.value) and "variable A_KEY" in str(error.value)
    assert "secret" not in str(error.value) and "key-1" not in str(error.value)


def test_api_key_that_no_header_carries_is_refused(connect, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret\n")
    with pytest.raises(ServerError, match="environment variable A_KEY") as error:
        connect("http://host:1", api_key_var="A_KEY")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "name,value",
    [("https_proxy", "ftp://x"), ("SSL_CERT_FILE", "/nowhere/ca.pem")],
)
def test_unusable_environment_names_its_variable(name, value, connect, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ServerError, match=f"because of the environment variable .*{name}"):
        connect("http://me:secret@host:1")


def test_proxy_that_is_gone_is_named(connect, monkeypatch):
    """A proxy that does not answer looks like a server that does not."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("http_proxy", raising=False)
    with pytest.raises(ServerError, match="asked through the proxy that HTTP_PROXY names"):
        ask(connect("http://192.0.2.1:8000"))
