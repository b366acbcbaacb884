"""`report.html`: the results of one run or several on one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.page import SCRIPTS, STYLES, render_page, web_file
from asyncrl.util.files import replace_file


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
