"""The Markdown pages: their links and anchors exist, and the guide's snippets are valid."""

import ast
import functools
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "prime_composer", "recipes", "tests")
PAGES = sorted(
    path
    for folder in FOLDERS
    for path in ((ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        copies = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere in this repository."""
    text = re.sub(r"^    .*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(link)
        elif anchor and anchor not in anchors(target):
            wrong.append(link)
    return wrong


def test_page_links_lead_to_files_and_headings() -> None:
    assert {page.name: links for page in PAGES if (links := broken(page))} == {}


def snippets() -> list[dict[str, Any]]:
    """Return the tables of a recipe that the guide shows, a snippet each."""
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"(?:^(?:    .*)?\n)+", text, re.MULTILINE):
        try:
            tables = tomllib.loads(textwrap.dedent(block))
        except tomllib.TOMLDecodeError:  # a command, or Python
            continue
        if tables and "variants" not in tables:
            found.append(tables)
    return found


def test_guide_shows_tables_of_a_recipe() -> None:
    assert len(snippets()) == 12


@pytest.mark.parametrize("tables", snippets(), ids=lambda tables: "-".join(tables))
def test_snippet_of_the_guide_is_valid(tables: dict[str, Any]) -> None:
    """Each is whole as soon as it has a student, a teacher and data."""
    recipe: dict[str, Any] = {
        "student": {"model": "student"},
        "loss": {"type": "topk_reverse_kl"},
        "trainer": {"steps": 60},
    }
    if "environments" not in tables:
        recipe["data"] = {"path": "questions.jsonl"}
    if "teachers" not in tables:
        recipe["teacher"] = {"model": "teacher"}
    elif "environments" not in tables:
        recipe["data"]["teacher_key"] = "teacher"
    for name, table in tables.items():
        recipe[name] = recipe.get(name, {}) | table
    if recipe.get("teacher", {}).get("base"):
        del recipe["teacher"]["model"]
    parse_recipe(recipe)


def test_version_is_the_same_in_every_document() -> None:
    """pyproject.toml has it; the newest heading of the changelog and CITATION.cff repeat it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([\d.]+)\] - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert newest is not None and newest[1] == project["version"]
    assert f"\nversion: {newest[1]}\ndate-released: {newest[2]}\n" in citation


@functools.cache
def imported_by(module: Path) -> set[Path]:
    """Return the files of the package that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prime_composer"):
            folder = ROOT / str(node.module).replace(".", "/")
            found |= {folder / f"{one.name}.py" for one in node.names}
            found.add(folder.with_suffix(".py"))
    return found


@pytest.mark.parametrize(
    ("walk", "most"),
    [("**A training step**", 7), ("**A key, from", 3), ("**The teacher's top K inside", 19)],
)
def test_each_file_of_a_walk_imports_another_one_of_it(walk: str, most: int) -> None:
    """Or is imported by one that comes before it. A walk never becomes longer than it is."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paragraph = text[text.index(walk) :].partition("\n\n")[0]
    files = [ROOT / "prime_composer" / name for name in re.findall(r"`([\w/]+\.py)`", paragraph)]
    assert 2 < len(files) <= most
    for place, file in enumerate(files[1:], 1):
        before = set(files[:place])
        others = {one for one in before if file in imported_by(one)}
        assert imported_by(file) & before or others, file


def test_pages_use_the_words_of_the_field() -> None:
    """Those of the table in CONTRIBUTING.md, outside of code, history and generated pages."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| write | instead of |")[2].partition("\n\n")[0]
    ours = [
        word for row in table.splitlines()[2:] for word in row.split("|")[2].strip().split(", ")
    ]
    assert len(ours) > 10
    generated = ("CONTRIBUTING", "CHANGELOG", "reference", "architectures")
    wrong = []
    for page in PAGES:
        if page.stem in generated or page.parent.name == "mutation":
            continue
        prose = re.sub(r"^    .*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        prose = re.sub(r"`[^`]*`", "", prose)
        wrong += [f"{page.name}: {word}" for word in ours if re.search(rf"\b{word}\b", prose)]
    assert wrong == []
