"""The HTML pages, rendered from the templates in `templates/`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.util.files import replace_file

if TYPE_CHECKING:
    from jinja2 import Environment

STYLES = ("uplot.min.css", "page.css")
SCRIPTS = ("uplot.min.js", "charts.js", "samples.js", "page.js")
"""Scripts that draw documents, in their order; each kind of page adds its own."""


def write_report(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Writes a page with these runs, each as `run_document` describes it."""
    write_page(path, ", ".join(document["name"] for document in documents), documents, "report.js")


def write_page(path: Path, title: str, data: Any, script: str) -> None:
    """Writes a page that needs nothing from elsewhere: its data, and the scripts that draw them."""
    # A "<" in a script element could end it, or start a comment.
    encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    styles, scripts = ([web_file(name) for name in names] for names in (STYLES, (*SCRIPTS, script)))
    replace_file(path, render_page("run.html.j2", name=title, data=encoded, styles=styles, scripts=scripts))


def render_page(template: str, **values: Any) -> str:
    """The page of a template, with every value escaped that the template does not mark as HTML. Raises
    jinja2.UndefinedError when the template uses a value that is not given."""
    return _templates().get_template(template).render(values)


@cache
def web_file(name: str) -> str:
    """A style or script of the pages."""
    return (files("asyncrl.observe") / "web" / name).read_text()


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("asyncrl.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
