"""Assemble the site from the repository's own Markdown. MkDocs calls the functions ``on_*``.

A page has the path that its file has in the repository, so that links between pages stay as they
are. What a page links to besides becomes a page too: a source file with its text, a folder with its
list. Pictures are copied. A link that leads nowhere fails the strict build, and so does whatever
would load something from another server.
"""

import html
import json
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from loaded import external  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "*.md",
    "docs/notebooks/*.ipynb",
    "recipes/**/*.md",
    "prime_composer/**/*.md",
    "tests/**/*.md",
)
"""Where the pages are."""

PICTURES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".yml": "yaml"}

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)$\n?"
    r"|(?<=\n\n)(?:    [^\n]*\n|\n(?=    ))*    [^\n]*(?:\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""A block of code: between fences, or lines indented by four spaces after an empty one."""

COMMANDS = r"(?:prime-rl|pip|python|pytest|git|uv|inference|export|vllm|ruff|[A-Z_]+=\S+) "
STARTS = {
    "toml": r"\[[\w.\"-]+\]|\w+ = ",
    "python": r'import |from |class |def |@|"""',
    "bash": COMMANDS,
}
"""How a block of code in a language begins."""

OUTSIDE = re.compile(r"[a-z]+:|#")
"""How a link begins that is none to a file."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every page of the repository, and what they link to."""
    for pattern in PARTS:
        for path in sorted(ROOT.glob(pattern)):
            _add(files, config, path.relative_to(ROOT))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Color code, and lead links to the pages that source files and folders have become."""
    folder = PurePosixPath(page.file.src_uri).parent
    parts, end = [], 0
    for block in CODE.finditer(markdown):
        parts.append(_relink(markdown[end : block.start()], folder))
        parts.append(block[0] if block["fence"] else _fenced(block[0]))
        end = block.end()
    return "".join([*parts, _relink(markdown[end:], folder)])


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write formulas as MathML, which browsers draw without a script."""
    content = re.sub(
        r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>',
        lambda found: _mathml(html.unescape(found[3]), found[2] == "["),
        content,
        flags=re.DOTALL,
    )
    if "arithmatex" in content or "<merror" in content:
        raise PluginError(f"{page.file.src_uri}: a formula was not converted")
    return content


def on_post_build(config: MkDocsConfig) -> None:
    """Fail where a page loads a script, a style sheet, a font or a picture from elsewhere."""
    site = Path(config.site_dir)
    loaded = [
        f"{path.relative_to(site)}: {url}"
        for path in [*site.rglob("*.html"), *site.rglob("*.css")]
        for url in external(path.read_text(encoding="utf-8"), path.suffix)
    ]
    if loaded:
        raise PluginError("loaded from other servers:\n" + "\n".join(loaded[:20]))


def _add(files: Files, config: MkDocsConfig, path: Path) -> None:
    """Add a file of the repository as a page or a picture, and what it links to."""
    uri = _uri(PurePosixPath(path.as_posix()))
    if files.get_file_from_path(uri) is not None:
        return
    source = ROOT / path
    if path.suffix in PICTURES:
        files.append(File.generated(config, uri, content=source.read_bytes()))
        return
    text = source_page(path)
    files.append(File.generated(config, uri, content=text))
    if path.suffix in {".md", ".ipynb"} or source.is_dir():
        place = PurePosixPath(path.as_posix())
        for link in LINK.findall(CODE.sub("", text)):
            target = _target(place if source.is_dir() else place.parent, link)
            if target is not None and (ROOT / target).exists():
                _add(files, config, Path(target))


def source_page(path: Path) -> str:
    """Return the Markdown of a file or a folder of the repository."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(
            one.name for one in source.iterdir() if one.suffix in {".toml", ".py", ".md"}
        )
        return f"# {path.as_posix()}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = source.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return notebook_page(path)
    return f"# {path.as_posix()}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown, with the figures that ``execute.py`` wrote beside it."""
    parts, figures = [], 0
    for cell in json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        if "plt.show()" in text:
            figures += 1
            parts.append(f"![Figure {figures}]({path.stem}_{figures}.png)")
    return "\n\n".join(parts) + "\n"


def _target(folder: PurePosixPath, link: str) -> PurePosixPath | None:
    """Return the path in the repository that a link of a page in ``folder`` leads to."""
    path = link.partition("#")[0]
    if not path or OUTSIDE.match(link):
        return None
    parts: list[str] = []
    for part in (folder / path).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def _uri(path: PurePosixPath) -> str:
    """Return the path of a file of the repository within the site's sources."""
    source = ROOT / path
    if source.is_dir():
        readme = path / "README.md"
        return str(readme if (ROOT / readme).exists() else path / "index.md")
    if path.suffix in PICTURES | {".md"}:
        return str(path)
    if path.suffix == ".ipynb":
        return str(path.with_suffix(".md"))
    return f"{path}.md"


def _relink(text: str, folder: PurePosixPath) -> str:
    def lead(found: re.Match[str]) -> str:
        target = _target(folder, found[1])
        if target is None or target.suffix in PICTURES | {".md"} or not (ROOT / target).exists():
            return found[0]
        up = "../" * len(folder.parts)
        return f"]({up}{_uri(target)})"

    # GitHub needs a backslash before a bar in a table's code, and Python-Markdown shows it.
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), text)
    return LINK.sub(lead, text)


def _fenced(block: str) -> str:
    """Return an indented block of code between fences, with the language that it seems to be."""
    text = "\n".join(line[4:] for line in block.rstrip("\n").split("\n"))
    language = next((name for name, start in STARTS.items() if re.match(start, text)), "text")
    return f"````{language}\n{text}\n````\n"


def _mathml(latex: str, block: bool) -> str:
    converted: Any = latex2mathml.converter.convert(latex, display="block" if block else "inline")
    return str(converted)
