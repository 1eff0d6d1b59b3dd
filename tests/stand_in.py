"""A server on 127.0.0.1 that answers what a test says, byte for byte.

``tests.faults.server`` is the one that answers as vLLM does, from a model.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def free_port() -> int:
    """Return a port where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass
class Reply:
    """An answer."""

    parts: Iterable[bytes | memoryview]
    length: int | None  # that the server says; None: it says none
    status: int = 200

    @classmethod
    def of(cls, *parts: Any, status: int = 200) -> "Reply":
        """Return the whole answer of these bytes, or of what is written as JSON."""
        whole = [
            part if isinstance(part, bytes | memoryview) else json.dumps(part).encode()
            for part in parts
        ]
        return cls(whole, sum(map(len, whole)), status)


@contextmanager
def serving(
    answer: Callable[[str, Any], Reply], allows: Callable[[str | None], bool] = lambda _: True
) -> Iterator[str]:
    """Start a server, and give its base URL.

    ``answer`` gets path and JSON body of a request; a ConnectionError hangs up. ``allows`` says
    whether a request with this Authorization is answered; 401 otherwise.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = Reply.of({"error": "Unauthorized"}, status=401)  # vLLM's own words
            if allows(self.headers.get("Authorization")):
                try:
                    reply = answer(self.path, json.loads(body or b"null"))
                except ConnectionError:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
            self.send_response(reply.status)
            if reply.length is None:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(reply.length))
            self.end_headers()
            try:
                written = self.write(reply)
            except OSError:  # the client is gone
                written = -1
            self.close_connection = reply.length not in (None, written)

        do_GET = do_POST

        def write(self, reply: Reply) -> int:
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
            return written

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
