"""A server on 127.0.0.1 that answers what a test says, byte for byte.

``tests.faults.server`` is the one that answers as vLLM does, from a model.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


def free_port() -> int:
    """Return a port where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass
class Reply:
    """An answer. The connection is cut behind it where its parts are not as long as it says."""

    parts: Iterable[bytes | memoryview]
    length: int | None  # that the server says; None: it says none
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: Callable[[Callable[[bytes], Any]], Any] | None = None
    """Instead of all this, it writes to the connection, which is cut behind it."""

    @classmethod
    def of(cls, *parts: Any, status: int = 200, **headers: str) -> Self:
        """Return the whole answer of these bytes, or of what is written as JSON.

        ``Retry_After`` becomes the header Retry-After.
        """
        whole = [
            part if isinstance(part, bytes | memoryview) else json.dumps(part).encode()
            for part in parts
        ]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(whole, sum(map(len, whole)), status, named)

    @property
    def body(self) -> bytes:
        """All parts."""
        return b"".join(self.parts)


DROPPED = Reply((), None, raw=lambda write: None)
UNAUTHORIZED = Reply.of({"error": "Unauthorized"}, status=401)  # vLLM's own words


class StandIn:
    """A server that can be stopped and started. As a context manager it does both.

    Args:
        answer: gets method, path, body and headers of a request.
        port: 0 for a free one, which stays the same over ``stop`` and ``start``.
    """

    def __init__(
        self, answer: Callable[[str, str, bytes, Mapping[str, str]], Reply], port: int = 0
    ):
        self.respond = answer
        self.port = port
        self.connections: set[socket.socket] = set()
        self._server: _Listener | None = None

    @property
    def url(self) -> str:
        """Base URL, without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen."""
        self._server = _Listener(("127.0.0.1", self.port), _Handler)
        self._server.owner = self
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop at once, as a killed process: connections are cut. Stopping twice is harmless."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self.hang_up()

    def hang_up(self) -> None:
        """Cut all connections, whatever their state."""
        for connection in [*self.connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: StandIn

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a client is gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.owner.connections.add(self.connection)

    def finish(self) -> None:
        self.server.owner.connections.discard(self.connection)
        super().finish()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self.server.owner.respond(self.command, self.path, content, self.headers)
        self.close_connection = True
        with suppress(OSError):  # the client is gone
            if reply.raw is not None:
                reply.raw(self.wfile.write)
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.length is None:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(reply.length))
            self.end_headers()
            self.close_connection = self.write(reply) != (reply.length or 0)

    do_GET = do_POST

    def write(self, reply: Reply) -> int:
        """Send all parts; return how many bytes they have, or 0 in chunks."""
        written = 0
        for part in reply.parts:
            for first in range(0, len(part), 2**20):
                piece = part[first : first + 2**20]
                written += len(piece)
                if reply.length is None:
                    piece = b"%x\r\n%b\r\n" % (len(piece), bytes(piece))
                self.wfile.write(piece)
        if reply.length is None:
            self.wfile.write(b"0\r\n\r\n")
            return 0
        return written

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(
    answer: Callable[[str, Any], Reply], allows: Callable[[str | None], bool] = lambda _: True
) -> Iterator[str]:
    """Start a server, and give its base URL.

    ``answer`` gets path and JSON body of a request. ``allows`` says whether a request with this
    Authorization is answered; 401 otherwise.
    """

    def respond(_: str, path: str, content: bytes, headers: Mapping[str, str]) -> Reply:
        if not allows(headers.get("Authorization")):
            return UNAUTHORIZED
        return answer(path, json.loads(content or b"null"))

    with StandIn(respond) as server:
        yield server.url
