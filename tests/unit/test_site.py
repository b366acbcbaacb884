"""The documentation site: it has the pages of the repository, links work, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts.site.check import check_site
from scripts.site.notebook import notebook_page
from scripts.site.pages import MADE, ROOT, homes, with_links
from scripts.site.source import definitions, source_page

NOTEBOOK = ROOT / "docs" / "first_run.ipynb"


def links_of(text: str, path: str = "docs/tour.md", home: str = "tour.md") -> tuple[str, set[str]]:
    sources: set[str] = set()
    return with_links(text, path, home, ROOT, sources), sources


def test_links_to_pages_lead_to_their_places_in_the_site() -> None:
    mapped, sources = links_of("[a](docs/data.md#formats) [b](docs/tour.md)", "README.md", "index.md")
    assert (mapped, sources) == ("[a](data.md#formats) [b](tour.md)", set())
    assert links_of("[home](../README.md) ![p](pictures/x.png)")[0] == "[home](index.md) ![p](pictures/x.png)"
    unchanged = "[a](https://arxiv.org/abs/1) [b](#here)\n```\n[c](../asyncrl/types.py)\n```\n"
    assert links_of(unchanged) == (unchanged, set())


def test_links_to_code_lead_to_the_line_of_what_they_name() -> None:
    mapped, sources = links_of("[`Ledger.can_lease`](../asyncrl/replay/ledger.py), [`types.py`](../asyncrl/types.py)")
    line = definitions(ROOT / "asyncrl" / "replay" / "ledger.py")["Ledger.can_lease"]
    assert f"(source/asyncrl/replay/ledger.py.md#L-{line})" in mapped
    assert "(source/asyncrl/types.py.md)" in mapped
    assert sources == {"asyncrl/replay/ledger.py", "asyncrl/types.py"}
    assert f'id="L-{line}"' in source_page(ROOT, "asyncrl/replay/ledger.py")


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted([*homes(ROOT).values(), *MADE])


def test_a_notebook_becomes_a_page_with_its_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["x = 1"],
            "outputs": [
                {"output_type": "stream", "text": ["printed\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["1"], "text/html": ["<b>1</b>\n\n", "<i/>"]}},
            ],
        },
    ]
    page = notebook_page(json.dumps({"cells": cells}))
    assert page == (
        "# Title\ntext\n\n```python\nx = 1\n```\n\n```text\nprinted\n```\n\n"
        '<div class="notebook-table">\n<b>1</b>\n<i/>\n</div>\n'
    )


def test_the_check_finds_broken_links_and_files_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#there">x</a><a href="c.html">x</a><a href="#top">x</a>'
        '<a href="https://arxiv.org">x</a><script src="https://cdn.example/x.js"></script><img src="no.png">'
    )
    (tmp_path / "b.html").write_text('<a id="here" href="a.html#top">x</a><link rel="stylesheet" href="s.css">')
    (tmp_path / "s.css").write_text("@import url(//fonts.example/f.css); a { background: url(x.svg) }")
    assert sorted(check_site(tmp_path)) == [
        "a.html: b.html#there: no such heading",
        "a.html: c.html: no such file",
        "a.html: loads https://cdn.example/x.js",
        "a.html: no.png: no such file",
        "s.css: loads //fonts.example/f.css",
    ]


def test_the_saved_notebook_has_run_without_errors() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert NOTEBOOK.stat().st_size < 100_000
