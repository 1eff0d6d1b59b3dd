"""Scratch folders: removed at the end, and by a later process where the owner was killed."""

import signal
import subprocess
import sys
from pathlib import Path

from prime_composer.backends.scratch import remove_left, scratch_folder

HOLDER = """
import sys, time
from pathlib import Path
from prime_composer.backends.scratch import scratch_folder
with scratch_folder("some_", Path(sys.argv[1])) as folder:
    (folder / "weights").touch()
    print(folder.name, flush=True)
    time.sleep(60)
"""


def test_scratch_of_a_killed_process_is_removed_later(tmp_path: Path) -> None:
    """While its process lives it stays; another name stays always."""
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        held = tmp_path / process.stdout.readline().strip()
        remove_left("some_", tmp_path)
        assert (held / "weights").exists()
        process.send_signal(signal.SIGKILL)
    with scratch_folder("some_", tmp_path) as folder:
        assert not held.exists() and folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_scratch_never_follows_a_link(tmp_path: Path) -> None:
    """A link with such a name is no folder of ours."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "some_link").symlink_to(tmp_path / "kept")
    remove_left("some_", tmp_path)
    assert (tmp_path / "some_link").is_symlink() and (tmp_path / "kept").is_dir()
