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
"""Scripts that draw documents, in their order; a report and a board each add their own."""


def write_report(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Writes a page with these runs, each as `run_document` describes it; it needs nothing from elsewhere."""
    names = ", ".join(document["name"] for document in documents)
    # A "<" in a script element could end it, or start a comment.
    data = json.dumps(documents, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = render_page(
        "run.html.j2",
        name=names,
        data=data,
        styles=[web_file(name) for name in STYLES],
        scripts=[web_file(name) for name in (*SCRIPTS, "report.js")],
    )
    replace_file(path, page)


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
