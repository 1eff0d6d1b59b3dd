"""Signals: which end a run at once, which after its step, and which it never sees."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from prime_composer.local.signals import (
    StepAbandoned,
    Stopped,
    StopRequest,
    finishing_the_step,
    stopping_at_once,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_in_a_step_is_noted_and_a_second_one_stops(signum: int) -> None:
    stop = StopRequest()
    with finishing_the_step(stop):
        stop.wait_begins()
        send(signum)
        assert stop.requested and stop.signum == signum
        stop.wait_begins()
        with pytest.raises(StepAbandoned), stop.may_interrupt():
            stop.wait_begins()
        with pytest.raises(Stopped) as caught:
            send(signal.SIGTERM)
    assert caught.value.signum == signal.SIGTERM and isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_that_a_library_renames_still_stops(signum: int) -> None:
    """transformers reports whatever ends one of its imports as a missing module."""
    with pytest.raises(Stopped) as caught, stopping_at_once():
        try:
            send(signum)
        except BaseException as error:
            raise ModuleNotFoundError("could not import accelerate") from error
    assert caught.value.signum == signum
    with pytest.raises(ModuleNotFoundError), stopping_at_once():
        raise ModuleNotFoundError("truly missing")


def test_ignored_signal_stays_ignored() -> None:
    """``nohup`` starts a process with SIGHUP ignored: a closed terminal does not end it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    try:
        with stopping_at_once(), finishing_the_step(stop):
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not stop.requested


def test_signals_in_another_thread_stay_the_callers() -> None:
    """Only the main thread can set handlers; a run in another one is left as it is."""
    finished = []

    def run() -> None:
        with stopping_at_once(), finishing_the_step(StopRequest()):
            finished.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert finished == [before]


SWALLOWS = """
import runpy, signal, sys, time
stopping_at_once = runpy.run_path(sys.argv[1])["stopping_at_once"]
with stopping_at_once():
    word = "ready"
    while True:
        try:
            print(word, flush=True)
            time.sleep(60)
        except BaseException:
            word = "swallowed"
"""


def test_second_signal_ends_a_process_that_swallowed_the_first() -> None:
    """Libraries catch everything during their imports; the second signal asks nobody."""
    module = sys.modules[StopRequest.__module__].__file__
    command = [sys.executable, "-c", SWALLOWS, str(module)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("ready\n", "swallowed\n"):
            assert process.stdout.readline() == line
            process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
