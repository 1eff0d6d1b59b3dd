"""Check the URLs of servers, and keep the passwords in them out of files and messages."""

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer

MASK = "***"  # What stands where a user and a password were

_CREDENTIALS = re.compile(r"""(?<=://)[^\s'"]*@""")


def public_url(text: str) -> str:
    """Return a URL, or a text with URLs in it, with ``***`` in the place of user and password."""
    return _CREDENTIALS.sub(f"{MASK}@", text)


def without_passwords(value: Any) -> Any:
    """Return nested tables and lists with the URLs in them as ``public_url`` shows them."""
    if isinstance(value, dict):
        return {key: without_passwords(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_passwords(item) for item in value]
    return public_url(value) if isinstance(value, str) else value


def has_credentials(text: str) -> bool:
    """Return whether a URL, or a text with URLs in it, contains a user or a password."""
    return public_url(text) != text


def two_credentials(owner: str, api_key_var: str) -> str:
    """Return the message for a server that has both a password and an API key."""
    return (
        f"{owner} has a user or password, and the environment variable {api_key_var} has an API "
        "key. A request carries one of them: take the one out of the url, unset the variable, or "
        "name another one in api_key_var."
    )


def checked_url(url: str) -> str:
    """Return a server's base URL as it is. The error does not repeat it: it may have a password."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        whole = False
    if not whole or re.search(r"""[\s'"\\?#]|[^\x20-\x7e]""", url):
        raise ValueError(
            'not the base URL of a server; write it as "http://HOST:PORT", without query and '
            "fragment, and with other letters than ASCII, spaces and quotes percent-encoded"
        )
    if url.partition("://")[2].startswith(f"{MASK}@"):
        raise ValueError(
            f"{MASK} stands for a password that was kept out of this file; write the password again"
        )
    return url


Url = Annotated[str, AfterValidator(checked_url), PlainSerializer(public_url)]
"""A server's base URL. It is written into files and shown without user and password."""
