"""Take outer steps through torchft's DiLoCo: quorum, mean of the pseudo-gradients, outer SGD."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener, install_opener

import torch
from torch import nn
from torch.distributed import TCPStore

from prime_composer.extras import pip_install
from prime_composer.recipe.diloco import DilocoConfig


class OuterStepFailed(ValueError):
    """No outer step could be taken. The weights of the last one are those of the islands."""


def import_torchft() -> Any:
    """Return the module torchft, which then logs errors alone."""
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        import torchft
        import torchft.coordination
        import torchft.local_sgd
    except ImportError as error:
        raise ImportError(
            f"[diloco] needs torchft, whose wheels are for Linux on x86_64 and Python 3.11 to "
            f"3.13 ({error}): {pip_install('diloco')}"
        ) from None
    # A failed outer step is a sentence of ours, and no traceback.
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft


class _Threads(Executor):
    """Runs calls in threads that do not keep the process alive.

    A quorum that was given up still waits for the other islands, for an hour where it has to.
    """

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=run, daemon=True).start()
        return future


class OuterSteps:
    """The outer loop of one island; ``state`` is of a checkpoint that has ``trained``'s weights."""

    def __init__(
        self,
        config: DilocoConfig,
        index: int,
        lighthouse: str,
        trained: Sequence[nn.Parameter],
        save: Callable[[], Any],
        load: Callable[[Any], None],
        state: Mapping[str, Any] | None = None,
    ):
        torchft, timeout = import_torchft(), timedelta(seconds=config.timeout)
        host, interface = own_address(lighthouse)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would guess
        self.config = config
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._transport = _transport(host, timeout)
        self.manager = torchft.Manager(
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
            checkpoint_transport=self._transport,
            init_sync=False,  # islands have compared their weights
            max_retries=3,  # outer steps that may fail in a row
            # A lighthouse that is restarted loses nothing. Each try has this part of the time.
            quorum_retries=20,
        )
        self.manager._executor = _Threads()
        momentum = config.outer_momentum
        self.sgd = torch.optim.SGD(
            trained, lr=config.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        if state is not None:
            self.sgd.load_state_dict(state["sgd"])
            self.manager.load_state_dict(state["manager"])
        # torchft takes its outer step in a hook of the inner optimizer. With AdamW this would be
        # before the weights are checked, and exploded ones would be averaged. This one only counts.
        self._inner = torch.optim.SGD([torch.zeros(1)])
        self._diloco = torchft.local_sgd.DiLoCo(
            self.manager,
            [nn.ParameterList(trained)],
            self._inner,
            self.sgd,
            sync_every=config.every,
        )
        self._diloco.__enter__()

    @property
    def failure(self) -> str:
        """Why the last outer step was not taken, as torchft says it."""
        error = self.manager.errored()
        return "too few islands" if error is None else _first_line(error.original_exception)

    def count_step(self) -> None:
        """Count a step of this island. Every ``config.every``-th ends with the outer step.

        Where that fails, the weights are those of the last outer step again. An island that cannot
        take over the state of the others ends: each try would cost them an outer step.
        """
        config = self.config
        try:
            self._inner.step()
            if self._transport.lost:
                raise RuntimeError("the state of the others, which are ahead, did not arrive")
        except (RuntimeError, TimeoutError) as error:
            raise OuterStepFailed(
                f"no outer step with at least {config.fewest} of {config.replicas} islands "
                f"({_first_line(error)}; {self.failure}): start the others within diloco.wait = "
                f"{config.wait:g} s, let the machines reach each other's ports in both directions, "
                f"or raise diloco.timeout = {config.timeout:g} s on all of them"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state and torchft's counters."""
        return {"sgd": self.sgd.state_dict(), "manager": self.manager.state_dict()}

    def close(self) -> None:
        """Leave the other islands."""
        self._diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _transport(host: str, timeout: timedelta) -> Any:
    """Return what sends an island's state to one that comes back, at an address that it reaches.

    torchft's own names this machine's host name, which the other machine may not know. It fetches
    by urllib, which must not ask a proxy for an island.
    """
    install_opener(build_opener(ProxyHandler({})))
    from torchft.checkpointing import HTTPTransport

    class AtAddress(HTTPTransport):
        lost = False  # a state was not received

        def address(self) -> str:
            return super().address().replace(socket.gethostname(), host, 1)

        def recv_checkpoint(self, *words: Any, **how: Any) -> Any:
            self.lost = True
            state = super().recv_checkpoint(*words, **how)
            self.lost = False
            return state

    return AtAddress(timeout=timeout, num_chunks=0)


def own_address(lighthouse: str) -> tuple[str, str]:
    """Return this machine's IPv4 address on the way to the lighthouse, and its interface."""
    import fcntl  # not on Windows, where torchft is not either

    parts, ask_address = urlsplit(lighthouse), 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        address = str(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, ask_address, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return address, name
    raise OuterStepFailed(f"no network interface of this machine has the address {address}")
