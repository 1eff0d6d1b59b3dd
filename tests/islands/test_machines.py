"""Islands on two machines: network namespaces of this one, each with an address of its own."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.islands.rig import OpenRig, kill_and_take_over

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow


@pytest.fixture
def machines() -> Iterator[list[tuple[str, str]]]:
    """Return name and address of two that reach nobody but each other."""
    mark = uuid.uuid4().hex[:6]
    names = [f"island-{mark}-{i}" for i in (0, 1)]
    ends = [f"isle{mark}{i}" for i in (0, 1)]

    if shutil.which("ip") is None:
        pytest.skip("needs network namespaces (root, iproute2): there is no ip")

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs network namespaces (root, iproute2): {done.stderr.strip()}")

    found = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth",
           "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, ends, ("10.77.0.1", "10.77.0.2"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            found.append((name, address))
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_islands_of_two_machines_end_as_one(rig: OpenRig, machines: list[tuple[str, str]]) -> None:
    """Also where one was killed, and takes the other one's state over the link."""
    (first, host), (second, _) = machines
    one = rig(diloco__min_replicas=1, trainer__steps=12)
    one.host = host
    kill_and_take_over(one, [{"machine": first}, {"machine": second}])
