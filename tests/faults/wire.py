"""Two servers of a run, which name every request and disturb one of them."""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.msgpack import decode as unpack

from tests.faults import modes
from tests.faults.points import (
    BUSY,
    CUT,
    EXCHANGED,
    KILL_ANSWERED,
    KILL_ASKING,
    LOST,
    OTHER_FACTS,
    RESTARTED,
    Point,
)
from tests.faults.server import SpoilingServer, played, refusal, road_of_request
from tests.fork_server import Fork
from tests.stand_in import DROPPED, Reply


@dataclass(frozen=True)
class Request:
    """A request as it is known in every run: requests that are sent at once come in any order."""

    server: str  # whom it went to
    path: str  # the last part of its URL's path
    content: str  # a hash of its body, without what is random in it
    time: int  # how often this content was sent before, plus one


class Wire:
    """Servers of a teacher with the scoring plugin and of a student, and the log of their requests.

    Attributes:
        process: the run; killed by a fault.
        reached: whether the request to be disturbed has come.
    """

    def __init__(self, teacher: Path, student: Path):
        self.teacher = NamingServer("teacher", self, teacher, other=student, plugin=True)
        self.student = NamingServer("student", self, student)
        self.process: Fork | None = None
        self.reached = False
        self.replies: dict[tuple[str, str, str], Reply] = {}
        """What was computed before: (server and weights, path, body) -> reply."""
        self._names: dict[Request, str] = {}
        self._disturbed: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self.begin()

    @classmethod
    @contextmanager
    def of_folder(cls, models: Path) -> Iterator["Wire"]:
        """Start the servers of a folder's models, and stop them."""
        wire = cls(models / "teacher", models / "student")
        with wire.teacher, wire.student:
            yield wire

    def begin(self) -> None:
        """Be ready for a new run, with right servers."""
        self.process, self.reached, self._disturbed = None, False, None
        self._log: list[Request] = []
        self._times: Counter[tuple[str, str, str]] = Counter()
        self.heal()
        self.student.restart()

    def heal(self) -> None:
        """Answer right from now on. The student's server keeps the weights that it was sent."""
        self.process, self._disturbed = None, None
        for server in (self.teacher, self.student):
            server.heal()
        self.teacher.exchange(back=True)

    def disturb(self, name: str, fault: str) -> None:
        """Show a fault at the request of that name."""
        self._disturbed = (name, fault)

    def points(self) -> list[Point]:
        """Name the requests since ``begin``.

        Those of one path that follow each other form a round. In it they are numbered by content.
        """
        rounds: list[list[Request]] = []
        for request in self._log:
            last = rounds[-1][0] if rounds else None
            if last is None or (last.server, last.path) != (request.server, request.path):
                rounds.append([])
            rounds[-1].append(request)
        numbers: Counter[tuple[str, str]] = Counter()
        points: list[Point] = []
        for requests in rounds:
            one = requests[0]
            numbers[one.server, one.path] += 1
            number = numbers[one.server, one.path]
            ordered = sorted(requests, key=lambda request: (request.content, request.time))
            for place, request in enumerate(ordered, start=1):
                name = f"request {one.path} of {one.server}, round {number}, {place}/{len(ordered)}"
                self._names[request] = name
                kind = f"request {one.path} of {one.server}, round {number}"
                scores = numbers["teacher", "score"]
                # In the first round it only says whether it has the plugin.
                is_first = scores <= 1 or (scores == 2 and one.path == "score")
                points.append(Point(name, kind, one.server, is_first))
        return points

    def arrived(self, server: str, path: str, body: Any) -> str:
        """Note a request, and return the fault that it has to show; "" for none."""
        text = json.dumps(body, sort_keys=True)
        text = re.sub(r'"[^"]*(prime_composer_weights_)[^"/]*"', r'"\1"', text)
        text = re.sub(r'"(model|new_version)": "[^"]*"', "", text)
        key = (server, path.rsplit("/", 1)[-1], hashlib.sha256(text.encode()).hexdigest()[:16])
        with self._lock:
            self._times[key] += 1
            request = Request(*key, self._times[key])
            self._log.append(request)
            if self._disturbed is None or self._names.get(request) != self._disturbed[0]:
                return ""
            self.reached = True
            return self._disturbed[1]

    def kill(self) -> None:
        """Kill the run."""
        while self.process is None:
            time.sleep(0.01)
        self.process.kill()


class NamingServer(SpoilingServer):
    """A stand-in server that asks the wire what to do with each request."""

    def __init__(self, name: str, wire: Wire, checkpoint: Path, **settings: Any):
        super().__init__(checkpoint, **settings)
        self._name, self._wire = name, wire
        self._served = self._right
        self._weights = "first"
        self._first = {key: value.clone() for key, value in self._right.model.state_dict().items()}
        if self._other is not None:
            self._other.path = self._right.path

    def restart(self) -> None:
        """Have the weights that it was started with."""
        self._right.model.load_state_dict(self._first)
        self._right.begin()
        self._weights = "first"

    def exchange(self, back: bool = False) -> None:
        """Serve another model of the same name; or the right one again."""
        self._right = self._served if back or self._other is None else self._other
        self._weights = "first" if self._right is self._served else "other"

    def answer(self, method: str, path: str, body: Any) -> Reply:
        """Return the reply to a request; the disturbed one's as the fault wants it."""
        fault = self._wire.arrived(self._name, path, body)
        if fault in (RESTARTED, EXCHANGED):
            with self._lock:
                (self.restart if fault == RESTARTED else self.exchange)()
                self.hang_up()
        if fault == KILL_ASKING:
            self._wire.kill()
        if fault in (LOST, KILL_ASKING, RESTARTED, EXCHANGED):
            return DROPPED
        if fault == BUSY:
            return refusal(503, "busy")
        reply = self._right_answer(method, path, body)
        if fault == KILL_ANSWERED:
            self._wire.kill()
            return DROPPED
        if fault == CUT:
            return played(reply, "cut")
        if fault == OTHER_FACTS and road_of_request(path, body) == "models":
            (card,) = json.loads(reply.body)["data"]
            return Reply.of({"data": [card | {"id": "another", "root": None}]})
        if fault == OTHER_FACTS:
            return Reply.of(modes.pack(modes.PACKED["packed_model"](unpack(reply.body))))
        return reply

    def _right_answer(self, method: str, path: str, body: Any) -> Reply:
        """Return an answer, computed once for each request and weights."""
        if road_of_request(path, body) == "reload":
            reply = super().answer(method, path, body)
            digest = hashlib.sha256()
            for value in self._right.model.state_dict().values():
                digest.update(value.numpy().tobytes())
            self._weights = digest.hexdigest()
            return reply
        if path in ("/update_weight_version", "/weight_info", "/metrics"):
            return super().answer(method, path, body)
        key = (f"{self._name} {self._weights}", path, json.dumps(body))
        if key not in self._wire.replies:
            self._wire.replies[key] = super().answer(method, path, body)
        return self._wire.replies[key]
