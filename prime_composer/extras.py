"""Say what pip installs to add an extra of this package, wherever the package itself came from."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "prime-composer"
PACKAGE = Path(__file__).resolve().parent


def pip_install(extra: str) -> str:
    """Return the command that installs this package with an extra, ready to paste.

    It is ``pip install -e '.[local]'`` in a checkout's folder.
    """
    if checkout() == Path.cwd():
        return f"pip install -e '.[{extra}]'"
    return f"pip install {requirement(extra)}"


def requirement(extra: str = "") -> str:
    """Return the words after ``pip install``, the same in every folder.

    The package index knows the name of a released wheel alone. What was installed from a folder is
    named by this folder.

    Args:
        extra: name of an extra; empty: the package alone.
    """
    suffix = f"[{extra}]" if extra else ""
    if (folder := checkout()) is not None:
        return f"-e {shlex.quote(f'{folder}{suffix}')}"
    return shlex.quote(f"{installed_from() or NAME}{suffix}")


def checkout() -> Path | None:
    """Return the checkout that Python imports this package from; None for an installed copy."""
    folder = PACKAGE.parent
    try:
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return folder if f'name = "{NAME}"' in project else None


def installed_from() -> Path | None:
    """Return the folder or the file that pip made the installed copy from, if it is still there."""
    try:
        # PEP 610: pip and uv note where a package came from that no index has given them.
        url = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")["url"]
    except (metadata.PackageNotFoundError, KeyError):
        return None
    parts = urlsplit(url)
    path = Path(url2pathname(parts.path))
    return path if parts.scheme == "file" and path.exists() else None
