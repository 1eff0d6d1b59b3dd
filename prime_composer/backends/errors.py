"""What is raised where a server cannot be used, or refuses, and what installs a backend."""

INSTALL = (
    "pip install 'prime-composer[local]' on a CPU machine, 'prime-composer[gpu]' on a GPU machine"
)
"""Pip lines of the one-machine engine, and of vLLM."""


class ServerError(ValueError):
    """The server cannot be used; the message names the remedy.

    Args:
        message: what is wrong.
        url: the server's, without credentials.
        section: the recipe's table that describes the server.
        key: the recipe's key to change, where there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        section: str | None = None,
        key: str | None = None,
    ):
        super().__init__(message)
        self.url = url
        self.section = section
        self.key = key


class Refused(Exception):
    """The server answered with an error that another try does not change.

    Args:
        status: of the answer.
        reason: the server's own words.
    """

    def __init__(self, status: int, reason: str):
        super().__init__(status, reason)
        self.status = status
        self.reason = reason
