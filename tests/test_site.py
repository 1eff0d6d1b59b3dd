"""The documentation site: what its pages may load, and that each loss has its formula.

``mkdocs build --strict`` proves the rest: links, anchors, formulas as MathML.
"""

import importlib.util
import re
from pathlib import Path

import pytest

import prime_composer
from prime_composer.losses import LOSS_TYPES

ROOT = Path(__file__).parents[1]


def external(text: str, suffix: str = ".html") -> list[str]:
    spec = importlib.util.spec_from_file_location("loaded", ROOT / "docs" / "loaded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.external(text, suffix)


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        '<script src="//cdn.example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://cdn.example.org/a.css">',
        '<img src="https://example.org/badge.svg" alt="">',
        '<img srcset="a.png 1x, https://example.org/b.png 2x">',
        "<style>@font-face { src: url('https://fonts.example.org/a.woff2') }</style>",
        '<p style="background: url(https://example.org/a.png)"></p>',
        '<iframe src="https://example.org"></iframe>',
    ],
)
def test_page_that_loads_from_elsewhere_is_seen(tag: str) -> None:
    assert len(external(f"<html><head>{tag}</head></html>")) == 1


def test_page_with_links_and_own_files_loads_nothing() -> None:
    page = (
        '<a href="https://arxiv.org/abs/2306.13649">paper</a><img src="../picture.png">'
        '<link rel="canonical" href="https://example.org"><script src="assets/a.js"></script>'
        '<link rel="stylesheet" href="../site.css"><style>a { color: var(--x) }</style>'
    )
    assert external(page) == []


def test_style_sheet_that_loads_from_elsewhere_is_seen() -> None:
    assert external('@import "https://example.org/a.css"; a { src: url(b.woff) }', ".css") == [
        "https://example.org/a.css"
    ]


def test_every_loss_has_its_formula() -> None:
    """formulas.md has a heading for each, or names it under "Reverse and forward KL"."""
    text = (ROOT / "prime_composer" / "losses" / "formulas.md").read_text(encoding="utf-8")
    named = {*re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    named |= {"topk_reverse_kl", "topk_forward_kl"}
    assert "`topk_reverse_kl`, `topk_forward_kl`." in text
    assert named - {"Reverse"} == {name for name in LOSS_TYPES if ":" not in name}


def test_page_of_the_api_has_every_public_name() -> None:
    text = (ROOT / "docs" / "pages" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in prime_composer.__all__ if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_navigation_names_pages_that_exist() -> None:
    text = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r"([\w/]+\.md)$", text.partition("nav:")[2].partition("plugins:")[0], re.M)
    assert len(pages) > 18
    for page in pages:
        source = page.replace(".md", ".ipynb") if page.startswith("docs/notebooks/") else page
        assert (ROOT / source).exists() or (ROOT / "docs" / "pages" / page).exists(), page
