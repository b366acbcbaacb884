"""Checks a built site: links lead to pages and headings that are there, and nothing is loaded from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that make a browser load a file, and the attribute with its address."""
CSS_ADDRESS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}
"""Relations of a `link` element that name a page and load nothing."""


class _Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and values.get(LOADED[tag]) and not NOT_LOADED & set(values.get("rel", "").split()):
            self.loaded.append(values[LOADED[tag]])


def check_site(site: Path) -> list[str]:
    """Returns a line for each broken link and each file that would be loaded from another host."""
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    problems: list[str] = []
    for file, page in pages.items():
        place = file.relative_to(site).as_posix()
        problems += [f"{place}: loads {address}" for address in page.loaded if _is_elsewhere(address)]
        inside = [link for link in [*page.links, *page.loaded] if not _is_elsewhere(link)]
        problems += [f"{place}: {link}: {fault}" for link in inside if (fault := _fault(link, file, site, pages))]
    for file in sorted(site.rglob("*.css")):
        for address in CSS_ADDRESS.findall(file.read_text(encoding="utf-8")):
            problems.append(f"{file.relative_to(site).as_posix()}: loads {address}")
    return problems


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc or (parts.scheme and parts.scheme not in ("data", "javascript")))


def _fault(link: str, file: Path, site: Path, pages: dict[Path, _Page]) -> str:
    """The fault of a link of the page to the same site; empty if there is none."""
    parts = urlsplit(link)
    if parts.scheme:
        return ""
    # The page for addresses that do not exist is shown at any address: its links start at the root.
    start = site if parts.path.startswith("/") else file.parent
    target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such heading"
    return ""
