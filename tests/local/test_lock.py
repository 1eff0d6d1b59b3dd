"""A run directory has one owner, which the kernel forgets when it dies."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_composer.local.run_dir import InUse, check_free, lock_run_dir

HOLDER = """
import sys, time
from pathlib import Path
from prime_composer.local.run_dir import lock_run_dir
lock = lock_run_dir(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_lock_names_its_holder_and_ends_when_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder = f"is in use by process {process.pid} on {socket.gethostname()}; wait for that run"
        for refused in (lock_run_dir, check_free):
            with pytest.raises(InUse) as caught:
                refused(tmp_path)
            assert holder in str(caught.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while True:
        try:
            lock_run_dir(tmp_path).release()
            break
        except InUse:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_file_system_without_locks_is_used_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS ``flock`` is a POSIX lock: EBADF for a descriptor that cannot be written."""

    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock_run_dir(tmp_path).release()
    check_free(tmp_path)


def test_lock_that_may_not_be_written_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the answer of the system is made up."""
    lock = lock_run_dir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check_free(tmp_path)
    lock.release()
