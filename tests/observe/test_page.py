"""The HTML pages: what they escape, and that their templates come with the package."""

from __future__ import annotations

import json
import re
import tomllib
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from asyncrl.observe.document import run_document
from asyncrl.observe.page import render_page, web_file, write_report

ROOT = Path(__file__).parents[2]
HOSTILE = "</title></pre><script>alert('&amp;\"')</script>"


class Elements(HTMLParser):
    """The elements of a page, as a browser reads them: (tag, text up to the next tag)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, text = self.found[-1]
            self.found[-1] = (tag, text + data)

    def texts(self, tag: str) -> list[str]:
        return [text.strip() for found, text in self.found if found == tag]


def write_page(folder: Path, text: str) -> tuple[Elements, str]:
    """The report of a run in which everything that a user or a library names is `text`."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "reward/mean": 1.0, f"reward_part/{text}": 0.5}) + "\n"
    )
    (folder / "config.yaml").write_text(f"run: {text}\n")
    counts = {"generated": 1, "trained": 1, "refunded": {text: 0}, "returned": 0, "in_flight": 0}
    ledger = {"leased": 1, "trained": 1, "refunded": {text: 0}, "in_flight": 0}
    evaluation = {"version": 0, "reward": 0.5, f"{text}/reward": 0.5, f"{text}2/reward": 0.5}
    summary = {
        "error": text, text: [text], "eval": [evaluation], "bias": [text],
        "ledger": ledger | {"trajectories": counts, "tokens": counts}, "simulated_gains": {text: 0.5},
    }  # fmt: skip
    write_report(folder / "report.html", [run_document(folder, summary)])
    page = (folder / "report.html").read_text()
    return Elements(page), page


def test_names_and_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    page, _ = write_page(tmp_path / HOSTILE.replace("/", ""), HOSTILE)
    plain, _ = write_page(tmp_path / "plain", "plain")
    assert [tag for tag, _ in page.found] == [tag for tag, _ in plain.found], "a text made an element"
    assert page.texts("title") == [f"asyncrl {HOSTILE.replace('/', '')}"]
    (data,) = [text for text in page.texts("script") if text.startswith("[{")]
    (document,) = json.loads(data)
    assert document["error"] == HOSTILE and document["bias"] == [HOSTILE] and document["config"] == f"run: {HOSTILE}\n"


def test_the_report_is_small_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    _, page = write_page(tmp_path / "plain", "plain")
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=(?!.data:,)|@import|url\(", page)
    assert len(page.encode()) < 200_000
    assert "innerHTML" not in page.replace(web_file("uplot.min.js"), ""), "texts of a run become text nodes only"


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'data' is undefined"):
        render_page("run.html.j2", name="try", styles=[], scripts=[])


def test_the_package_data_has_every_template() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    observe = ROOT / "asyncrl" / "observe"
    patterns = project["tool"]["setuptools"]["package-data"]["asyncrl.observe"]
    assert {file for pattern in patterns for file in observe.glob(pattern)} == {
        *(observe / "templates").iterdir(),
        *(observe / "web").iterdir(),
    }
    installed = {file.name for file in (files("asyncrl.observe") / "templates").iterdir()}
    assert installed >= {"board.html.j2", "run.html.j2"}
    assert web_file("uplot.min.js")
