"""Islands tell each other what they have, by torchft's own quorums.

A quorum carries a JSON object of each member. Every island asks for one again and again while it
runs, and so does the lighthouse, so that each sees who is there, and one that comes late sees that
the others train. Nobody keeps anything: a lighthouse that is restarted loses nothing.

These quorums have a lighthouse of their own, at the next port. That of the outer steps would count
whoever asks as an island that averages.
"""

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from prime_composer.backends.errors import ServerError
from prime_composer.contract import given
from prime_composer.local.islands.outer import import_torchft
from prime_composer.recipe.schema import Recipe
from prime_composer.recipe.urls import public_url

HEARTBEAT_MS = 5000
"""Silence after which a lighthouse takes an island for dead."""

PAUSES = {"joining": 0.3, "running": 2.0}
"""Seconds between two questions of an island."""

JOIN_MS = 3000
"""How long a quorum waits for an island that pauses: longer than the pause."""

FIRST_SECONDS = 20.0
"""How long a lighthouse is waited for at first: both may be started at once."""

OWN_KEYS = re.compile(
    r"output_dir|logging(\..*)?"
    r"|(student|teacher|teachers\.[^.]+|reference)\.(model|tape)"
    r"|(teacher|teachers\.[^.]+|rollout)\.(url|api_key_var|wait|timeout|gpu_memory_utilization)"
    r"|rollout\.weights_dir|(data|environments\.[^.]+)\.path"
)
"""Keys in which islands may differ: where things are. What is there is compared by itself."""

Facts = Mapping[str, Any]  # what a member says of itself, as JSON takes it


class IslandRefused(ValueError):
    """Islands do not belong to one run. The message names both."""


def json_digest(value: Any) -> str:
    """Return the SHA-256 of what JSON takes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def recipe_digest(recipe: Recipe) -> str:
    """Return the digest of a recipe without the keys in which islands may differ."""

    def shared(table: Any, name: str = "") -> Any:
        if not isinstance(table, Mapping):
            return table
        kept = [key for key in table if not OWN_KEYS.fullmatch(name + key)]
        return {key: shared(table[key], f"{name}{key}.") for key in kept}

    return json_digest(shared(recipe.model_dump(mode="json")))


class Join:
    """A member of these quorums until ``leave``: an island, or the lighthouse."""

    def __init__(self, lighthouse: str, name: str, recipe: Recipe):
        torchft = import_torchft()
        self.lighthouse, self.name = lighthouse, name
        self.is_late = False  # others train already
        self._facts: Facts = {"name": name, "digests": {"recipe": recipe_digest(recipe)}}
        # what this member said in the last quorum, and the others, by name
        self._seen: tuple[Facts, dict[str, Facts]] = {}, {}
        self._closed = Event()
        parts, most = urlsplit(lighthouse), timedelta(seconds=FIRST_SECONDS)
        try:
            url = f"http://{parts.hostname}:{(parts.port or 80) + 1}"
            self._client = torchft.coordination.LighthouseClient(url, most)
        except (RuntimeError, TimeoutError) as error:
            raise ServerError(
                f"--lighthouse {public_url(lighthouse)}: no lighthouse answers there ({error}). "
                "Start it with prime-rl lighthouse --config FILE, and let its port and the next "
                "one through"
            ) from None
        self._asking = Thread(target=self._ask, daemon=True)
        self._asking.start()

    def say(self, key: str, value: Any, **digests: str) -> None:
        """Add a fact and digests, which the others see from the next quorum on."""
        digests = {**self._facts["digests"], **digests}
        self._facts = {**self._facts, key: value, "digests": digests}

    def gather(
        self, key: str, names: Sequence[str], wait: float, status: Callable[[str], None]
    ) -> dict[str, Facts]:
        """Wait until each of ``names`` has said something, and return what they have said so far.

        Digests are compared with those of everybody. Where others train already, theirs are
        returned at once.
        """
        begin, shown = time.monotonic(), set[str]()
        found: dict[str, Facts] = {}
        while True:
            said, others = self._seen
            others = others if said is self._facts else {}  # whoever is refused sees it too
            if key == "starts" and any("running" in facts for facts in others.values()):
                self.is_late = True
            for other, facts in others.items():
                if "running" in facts or not self.is_late:
                    self._compare(other, facts)
                    found |= {other: facts} if key in facts else {}
            missing = sorted({*names} - {self.name, *found})
            if not missing or self.is_late:
                return found
            if not shown.issuperset(missing):
                shown.update(missing)
                status(f"waiting for {', '.join(missing)}")
            if time.monotonic() - begin > wait:
                raise IslandRefused(
                    f"{', '.join(missing)} did not come within diloco.wait = {wait:g} s; start it "
                    "with --island and the same --lighthouse"
                )
            time.sleep(0.05)

    def leave(self) -> None:
        """Ask no more. After ``HEARTBEAT_MS`` nobody waits for this member.

        A thread that is inside torchft while Python ends aborts the process (signal 6).
        """
        self._closed.set()
        self._asking.join()

    def _compare(self, other: str, theirs: Facts) -> None:
        for name, own in self._facts["digests"].items():
            if theirs["digests"].get(name, own) != own:
                raise IslandRefused(
                    f"the {name} of {self.name} and {other} are not the same: give both the same "
                    "files and --set"
                )

    def _ask(self) -> None:
        member, most = f"{self.name}:{uuid.uuid4().hex}", timedelta(milliseconds=2 * JOIN_MS)
        while not self._closed.wait(PAUSES["running" if "running" in self._facts else "joining"]):
            with suppress(RuntimeError, TimeoutError):  # the lighthouse is away for a while
                own = self._facts
                found = self._client.quorum(member, most, data=own).participants
                facts = {one.data["name"]: one.data for one in found if one.data}
                self._seen = own, {name: facts[name] for name in facts if name != self.name}


@contextmanager
def open_lighthouse(recipe: Recipe, host: str, port: int) -> Iterator[str]:
    """Run the lighthouses of a recipe within the block, and yield the URL of the first one.

    ``port`` 0 is a free pair. Nobody chooses the other numbers by hand: a lighthouse that waits too
    shortly for a slow island lets the others go on without it.
    """
    torchft, config = import_torchft(), given(recipe.diloco)
    waits = (config.fewest, int(config.wait * 1000)), (1, JOIN_MS)
    ports = [port] if port else range(29510, 29610, 2)
    with ExitStack() as opened:
        for first in ports:
            try:
                for own, (fewest, wait) in enumerate(waits, first):
                    server = torchft.coordination.LighthouseServer(
                        bind=f"{host}:{own}",
                        min_replicas=fewest,
                        join_timeout_ms=wait,
                        quorum_tick_ms=50,
                        heartbeat_timeout_ms=HEARTBEAT_MS,
                    )
                    opened.callback(server.shutdown)
                break
            except RuntimeError as error:
                if first == ports[-1]:
                    reason = str(error).splitlines()[0]
                    raise ValueError(f"--host {host} --port {own}: {reason}") from None
        url = f"http://{host}:{first}"
        member = Join(url.replace("0.0.0.0", "127.0.0.1"), "the lighthouse", recipe)
        opened.callback(member.leave)
        yield url
