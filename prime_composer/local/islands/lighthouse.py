"""Start torchft's lighthouse with the numbers of a recipe, and the board beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

from prime_composer.local.islands.board import Board
from prime_composer.local.islands.outer import import_torchft
from prime_composer.recipe.diloco import DilocoConfig

HEARTBEAT_MS = 5000
"""Silence after which the lighthouse takes an island for dead."""

TRIES = 20
"""Pairs of free ports that are tried."""


@contextmanager
def open_lighthouse(config: DilocoConfig, host: str, port: int) -> Iterator[str]:
    """Run a lighthouse and a board within the block, and yield its URL.

    Nobody chooses its numbers by hand: one that waits too shortly for a slow island lets it train
    on alone, and every process would end well with other weights.

    Args:
        config: the recipe's ``[diloco]``.
        host: address to listen at.
        port: the board has the next one. 0: a free pair.

    Raises:
        ImportError: torchft is not installed.
        ValueError: a port is taken, or the host is an IPv6 address.
    """
    import_torchft()
    from torchft.coordination import LighthouseServer

    if ":" in host:
        raise ValueError(
            f"--host {host}: islands connect to each other by IPv4; name such an address or 0.0.0.0"
        )
    for attempt in range(1, TRIES + 1):
        try:
            server = LighthouseServer(
                bind=f"{host}:{port}",
                min_replicas=config.fewest,
                join_timeout_ms=int(config.wait * 1000),
                quorum_tick_ms=50,
                heartbeat_timeout_ms=HEARTBEAT_MS,
            )
        except RuntimeError as error:
            raise ValueError(f"--host {host} --port {port}: {str(error).splitlines()[0]}") from None
        chosen = int(server.address().rpartition(":")[2])
        try:
            board = Board(host, chosen + 1, config.of_lighthouse)
            break
        except OSError as error:
            server.shutdown()
            if port or attempt == TRIES:
                raise ValueError(
                    f"--port {port}: its next one, {chosen + 1}, is taken ({error.strerror}); "
                    "name another port"
                ) from None
    try:
        yield f"http://{host}:{chosen}"
    finally:
        board.close()
        server.shutdown()
