"""`asyncrl report`: pages of one run or several, and wrong folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import asyncrl
from tests.plan.made_runs import make_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "two" / "summary.json").unlink()
    return tmp_path


def documents(page: Path) -> list[dict[str, object]]:
    _, _, rest = page.read_text().partition('id="data">')
    return json.loads(rest.partition("</script>")[0])


def test_one_run_has_its_report_and_several_are_compared(folder: Path) -> None:
    assert asyncrl("report", "runs/one", cwd=folder) == (0, "report     runs/one/report.html\n")
    (only,) = documents(folder / "runs" / "one" / "report.html")
    assert (only["name"], only["status"]) == ("one", "finished") and only["timeline"]
    code, output = asyncrl("report", "runs/one", "runs/two", "--out", "both.html", cwd=folder)
    assert code == 0, output
    shown = documents(folder / "both.html")
    assert [(run["name"], run["status"]) for run in shown] == [("one", "finished"), ("two", "unfinished")]


def test_a_folder_that_is_no_run_is_refused(folder: Path) -> None:
    code, output = asyncrl("report", "runs/one", "runs", cwd=folder)
    assert (code, output) == (2, "error: runs: not the folder of a run, config.yaml is missing; give runs/NAME\n")
    code, output = asyncrl("report", "runs/one", "--out", "runs", cwd=folder)
    assert code == 2 and "--out runs: is a folder; give the name of a file" in output
    assert not (folder / "runs" / "one" / "report.html").exists()
