"""The pages of the site: the Markdown files of the repository with their links mapped, and pages made from the code."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from scripts.site.notebook import notebook_page
from scripts.site.reference import api_page, config_page, parts_page
from scripts.site.source import definitions, source_page

ROOT = Path(__file__).parents[2]
HOMES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "benchmarks/README.md": "benchmarks.md"}
"""The pages of the site that are elsewhere in the repository than in docs/."""
MADE = {"config.md": config_page, "api.md": api_page, "custom.md": parts_page}
"""Pages that are made from the code."""
STYLE = Path(__file__).with_name("site.css")
BLOCK = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")


def write_pages(root: Path, out: Path) -> None:
    """Writes all pages of the site to the folder, which is emptied before."""
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(root / "docs", out, ignore=shutil.ignore_patterns("*.md", "*.ipynb"))
    shutil.copy(STYLE, out)
    sources: set[str] = set()
    for path, home in homes(root).items():
        text = (root / path).read_text(encoding="utf-8")
        text = notebook_page(text) if path.endswith(".ipynb") else text
        _write(out / home, with_links(text, path, home, root, sources))
    for home, make in MADE.items():
        _write(out / home, make())
    written: set[str] = set()
    while left := sources - written:
        for path in left:
            text, home = source_page(root, path), source_home(path)
            if (root / path).is_dir():
                text = with_links(text, f"{path}/", home, root, sources)
            _write(out / home, text)
        written |= left


def homes(root: Path) -> dict[str, str]:
    """Returns the path of each page in the repository, and its path in the site."""
    pages = sorted([*(root / "docs").glob("*.md"), *(root / "docs").glob("*.ipynb")])
    return HOMES | {f"docs/{page.name}": page.with_suffix(".md").name for page in pages}


def source_home(path: str) -> str:
    """Returns the path in the site of the page with the source of a file or folder."""
    return f"source/{path}.md"


def with_links(text: str, path: str, home: str, root: Path, sources: set[str]) -> str:
    """Returns the text of the file `path`, which is the page `home` of the site, with links that work there.

    Adds the files and folders whose source the page links to.
    """
    pages = homes(root)
    folder = path.rpartition("/")[0]

    def mapped(match: re.Match[str]) -> str:
        label, target = match.groups()
        name, _, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", target):
            return match[0]
        linked = os.path.normpath(os.path.join(folder, name))
        if linked in pages:
            place = pages[linked]
        elif linked.startswith("docs/"):
            place = linked.removeprefix("docs/")
        else:
            sources.add(linked)
            place = source_home(linked)
            anchor = anchor or _anchor(root / linked, label)
        return f"[{label}]({os.path.relpath(place, os.path.dirname(home))}{'#' if anchor else ''}{anchor})"

    parts: list[str] = []
    end = 0
    for block in BLOCK.finditer(text):
        parts += [LINK.sub(mapped, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(mapped, text[end:])])


def _anchor(file: Path, label: str) -> str:
    """Returns the anchor of the line that defines what a link to code names; empty if it names the file."""
    if file.suffix != ".py":
        return ""
    line = definitions(file).get(label.strip("`").removesuffix("()"))
    return f"L-{line}" if line else ""


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
