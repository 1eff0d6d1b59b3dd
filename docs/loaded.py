"""Find what a page loads from other servers: scripts, style sheets, fonts and pictures."""

import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

LOADING = {"stylesheet", "preload", "preconnect", "dns-prefetch", "icon", "modulepreload"}
"""Links that a browser follows by itself."""


def external(text: str, suffix: str) -> list[str]:
    """Return the URLs of other servers that a page (".html") or a style sheet loads."""
    if suffix != ".html":
        return [url for url in _in_css(text) if urlsplit(url).netloc]
    resources = _Resources()
    resources.feed(text)
    return [url for url in resources.urls if urlsplit(url).netloc]


class _Resources(HTMLParser):
    """Collects the URLs that a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.urls += _in_css(values.get("style", ""))
        self.urls += [one.split()[0] for one in values.get("srcset", "").split(",") if one.strip()]
        if tag == "link" and LOADING & set(values.get("rel", "").split()):
            self.urls.append(values.get("href", ""))
        self.urls += [values[name] for name in ("src", "data", "poster") if name in values]

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.urls += _in_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def _in_css(text: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", text)
    return [url or imported for url, imported in found]
