"""A board beside the lighthouse, on which every island says once a second who it is.

torchft's lighthouse knows who is alive and when an outer step begins. What islands have to agree on
before that (recipe, checkpoints, teachers) stands on the board: one JSON object for each, its card.
The board keeps nothing on a disk. After a restart the cards are back within a second.

A card that has not changed is not sent again, in either direction. The board has neither TLS nor
authentication, like torchft's own traffic.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prime_composer.backends.errors import ServerError
from prime_composer.backends.http import httpx
from prime_composer.recipe.urls import public_url

ALIVE_SECONDS = 6.0
"""Age of a card from which on its island counts as gone."""

EVERY_SECONDS = 1.0
LONGEST_CARD = 2**24
"""Bytes. A teacher's known request has at most some thousand numbers."""

FIRST_SECONDS = 30.0
"""How long a lighthouse that has never answered is waited for: both may be started at once."""

Card = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """What an island last said, and whether it is still there."""

    card: Card
    alive: bool


class Board:
    """The server. It takes cards by ``PUT /INDEX/VERSION``, and returns those of all islands.

    VERSION is that of the cards which the island has seen. With the same one it gets none again.
    An empty card is the one of before.
    """

    def __init__(self, host: str, port: int, lighthouse: Mapping[str, float]):
        self._lighthouse = dict(lighthouse)
        self._cards: dict[str, tuple[Card, float]] = {}
        self._lock = threading.Lock()
        self._start, self._changes = uuid.uuid4().hex, 0
        board = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_PUT(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                if size > LONGEST_CARD:
                    self.send_error(413)
                    return
                island, _, version = self.path.strip("/").partition("/")
                status, answer = board.put(island, version, self.rfile.read(size))
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def put(self, island: str, version: str, content: bytes) -> tuple[int, bytes]:
        """Keep a card. Return an HTTP status and what the island has not seen.

        400: it is no card, or an empty one of an island that has none here. 409: another process
        that is alive has the same number.
        """
        now = time.monotonic()
        with self._lock:
            before, at = self._cards.get(island, ({}, 0.0))
            try:
                card = json.loads(content)
                process, is_same = card["process"], len(card) == 1
            except (ValueError, TypeError, KeyError, RecursionError):
                return 400, b""
            is_other = before.get("process", process) != process
            if is_other and now - at < ALIVE_SECONDS:
                return 409, b""
            if is_same and (is_other or not before):
                return 400, b""
            self._changes += not is_same
            self._cards[island] = before if is_same else card, now
            seen = f"{self._start}-{self._changes}"
            answer = {
                "version": seen,
                "lighthouse": self._lighthouse,
                "alive": [k for k, (_, at) in self._cards.items() if now - at < ALIVE_SECONDS],
                "cards": None if seen == version else {k: c for k, (c, _) in self._cards.items()},
            }
        return 200, json.dumps(answer).encode()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def board_url(lighthouse: str) -> str:
    """Return the URL of the board: that of the lighthouse, one port further."""
    parts = urlsplit(lighthouse)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"http://{host}:{(parts.port or 80) + 1}"


class Seat:
    """An island's place at the board. A thread renews its card until ``close``.

    Attributes:
        settings: those of the recipe that the lighthouse was started with.
    """

    def __init__(self, lighthouse: str, island: int):
        self.settings: Mapping[str, float] = {}
        self.island = island
        self.lighthouse = lighthouse
        self._card: dict[str, Any] = {"process": uuid.uuid4().hex, "island": island}
        self._is_new, self._version = True, ""
        self._cards: dict[str, Card] = {}
        self._alive: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._client = httpx.Client(base_url=board_url(lighthouse), trust_env=False, timeout=5.0)
        self._first_post()
        threading.Thread(target=self._renew, daemon=True).start()

    @property
    def others(self) -> Mapping[int, Seen]:
        """What the other islands last said, by number."""
        alive = self._alive
        return {
            int(index): Seen(card, index in alive)
            for index, card in self._cards.items()
            if int(index) != self.island
        }

    def say(self, **facts: Any) -> None:
        """Change the card. The others see it at once, or when the board is back."""
        with self._lock:
            self._card |= facts
            self._is_new = True
        self._post()

    def wait_for(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Wait until something stands on the board. Return whether it came in time."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
            self._post()
        return True

    def close(self) -> None:
        """Leave. The card stays, and its island counts as gone after a few seconds."""
        self._closed.set()
        self._client.close()

    def _first_post(self) -> None:
        deadline = time.monotonic() + FIRST_SECONDS
        while (problem := self._post()) is not None:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"--lighthouse {public_url(self.lighthouse)}: {problem}. Start it with "
                    "prime-rl lighthouse --config FILE, and let its port and the next one through"
                )
            time.sleep(0.5)

    def _renew(self) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            self._post()

    def _post(self) -> str | None:
        """Send the card. Return why that failed; None where it did not."""
        with self._lock:
            if self._closed.is_set():
                return "closed"
            card = self._card if self._is_new else {"process": self._card["process"]}
            path = f"/{self.island}/{self._version}"
            try:
                answer = self._client.put(path, content=json.dumps(card))
                self._is_new = answer.status_code != 200  # the board may have forgotten it
                if answer.status_code == 409:
                    return f"another process is island {self.island} already"
                seen = answer.raise_for_status().json()
            except (httpx.HTTPError, ValueError) as error:
                return f"no lighthouse answers there ({error})"
            self.settings = seen["lighthouse"]
            self._version, self._alive = seen["version"], frozenset(seen["alive"])
            self._cards = self._cards if seen["cards"] is None else seen["cards"]
        return None
