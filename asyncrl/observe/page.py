"""Renders the HTML pages from the templates in `templates/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

STYLES = ("uplot.min.css", "page.css")
SCRIPTS = ("uplot.min.js", "charts.js", "samples.js", "page.js")
"""Scripts that draw documents, in their order; a report and a board each add their own."""


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
