"""Take outer steps through torchft's DiLoCo: quorum, mean of the pseudo-gradients, outer SGD."""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener, install_opener

import torch
from torch import nn
from torch.distributed import TCPStore

from prime_composer.extras import pip_install
from prime_composer.recipe.diloco import DilocoConfig

if TYPE_CHECKING:
    from torchft.checkpointing import HTTPTransport

QUORUM_RETRIES = 20
"""How often the lighthouse is asked again, so that one that is restarted loses nothing. torchft
gives each try this part of the time that a quorum may take."""

FAILURES_IN_A_ROW = 3
"""Outer steps that may fail in a row before an island gives up."""


class OuterStepFailed(ValueError):
    """No outer step could be taken. The weights of the last one are those of the islands."""


def import_torchft() -> Any:
    """Return the module torchft. It logs errors alone.

    Raises:
        ImportError: it is not installed; the message has the pip line.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        import torchft
        import torchft.local_sgd
    except ImportError as error:
        raise ImportError(
            f"[diloco] needs torchft, whose wheels are for Linux on x86_64 and Python 3.11 to "
            f"3.13 ({error}): {pip_install('diloco')}"
        ) from None
    # A failed outer step is a sentence of ours, and no traceback.
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft


class InnerSteps(torch.optim.Optimizer):
    """Counts the steps of an island.

    torchft takes its outer step in a hook of the inner optimizer. With AdamW this would be before
    the weights are checked, and exploded ones would be averaged.
    """

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Any = None) -> Any:
        """Count one step. The hook does the rest."""


class _Threads:
    """Runs calls in threads that do not keep the process alive.

    A quorum that was given up still waits for the other islands, for an hour where it has to.
    """

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=run, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing."""


class OuterSteps:
    """The outer loop of one island.

    Args:
        config: the recipe's ``[diloco]``.

    Attributes:
        sgd: the outer optimizer.
    """

    def __init__(
        self,
        config: DilocoConfig,
        index: int,
        lighthouse: str,
        trained: Sequence[nn.Parameter],
        save: Callable[[], Any],
        load: Callable[[Any], None],
        taken: int = 0,
    ):
        torchft = import_torchft()
        host = own_address(lighthouse)
        timeout = timedelta(seconds=config.timeout)
        self.config = config
        self.sgd = torch.optim.SGD(
            trained,
            lr=config.outer_lr,
            momentum=config.outer_momentum,
            nesterov=config.outer_momentum > 0,
        )
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timeout),
            load_state_dict=load,
            state_dict=save,
            min_replica_size=config.fewest,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"island_{index}",
            hostname=host,
            timeout=timeout,
            # Longer than the lighthouse waits for the slowest island.
            quorum_timeout=timedelta(seconds=config.wait + config.timeout),
            checkpoint_transport=_transport(host, timeout),
            init_sync=False,  # islands have compared their weights
            max_retries=FAILURES_IN_A_ROW,
            quorum_retries=QUORUM_RETRIES,
        )
        self._manager._executor = _Threads()
        self._manager.load_state_dict({"step": taken, "batches_committed": 0})
        self._inner = InnerSteps()
        self._diloco = torchft.local_sgd.DiLoCo(
            self._manager,
            [nn.ParameterList(trained)],
            self._inner,
            self.sgd,
            sync_every=config.every,
        )
        self._diloco.__enter__()

    @property
    def taken(self) -> int:
        """Outer steps that the islands have taken since the run's start."""
        return self._manager.current_step()

    @property
    def islands(self) -> int:
        """Islands that took part in the last outer step."""
        return self._manager.num_participants()

    @property
    def failure(self) -> str:
        """Why the last outer step was not taken; empty where it was."""
        error = self._manager.errored()
        return "" if error is None else str(error.original_exception).strip().split("\n")[0]

    def count_step(self) -> None:
        """Count a step of this island. Every ``config.every``-th ends with the outer step.

        Where that fails, the weights are those of the last outer step again.
        """
        try:
            self._inner.step()
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).strip().split("\n")[0]
            if "max_retries" in reason:
                raise OuterStepFailed(
                    f"{FAILURES_IN_A_ROW + 1} outer steps in a row failed "
                    f"({self.failure or reason}): let the machines reach each other's ports in "
                    f"both directions, or raise diloco.timeout = {self.config.timeout:g} s"
                ) from error
            raise OuterStepFailed(
                f"no outer step with at least {self.config.fewest} of {self.config.replicas} "
                f"islands within diloco.wait = {self.config.wait:g} s ({reason})"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state and torchft's counters."""
        return {"sgd": self.sgd.state_dict(), "manager": self._manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. The parameters have the outer step's values."""
        self.sgd.load_state_dict(state["sgd"])
        self._manager.load_state_dict(state["manager"])

    def close(self) -> None:
        """Leave the other islands."""
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)


def _transport(host: str, timeout: timedelta) -> "HTTPTransport":
    """Return what sends an island's state to one that comes back, at an address that it reaches.

    torchft's own names this machine's host name, which the other machine may not know. It fetches
    by urllib, which must not ask a proxy for an island.
    """
    install_opener(build_opener(ProxyHandler({})))
    from torchft.checkpointing import HTTPTransport

    class AtAddress(HTTPTransport):
        def address(self) -> str:
            return super().address().replace(socket.gethostname(), host, 1)

    return AtAddress(timeout=timeout, num_chunks=0)


def own_address(lighthouse: str) -> str:
    """Return the IPv4 address of this machine on the way to the lighthouse, which others reach."""
    parts = urlsplit(lighthouse)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        except socket.gaierror:
            raise ValueError(
                f"--lighthouse {lighthouse}: islands connect to each other by IPv4, and "
                f"{parts.hostname} has no such address; name one that all islands reach"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface with an IPv4 address, which gloo would guess."""
    import fcntl  # not on Windows, where torchft is not either

    ask_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, ask_address, name.encode().ljust(256, b"\0"))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise OuterStepFailed(f"no network interface of this machine has the address {address}")
