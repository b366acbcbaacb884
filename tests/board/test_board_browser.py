"""The board and the report in a real browser: a run that moves, a sample that opens, runs that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch.run_dir import lock_path
from asyncrl.observe.page import write_report
from asyncrl.observe.run_report import document_of
from asyncrl.plan.sweep import CellResult, LimitResult, Recommendation, SweepResults
from asyncrl.util.locks import try_lock
from tests.helpers.board import add_samples, append_metrics, made_run, rows_of, serving
from tests.helpers.browser import Browser
from tests.observe.test_page import HOSTILE
from tests.plan.made_runs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

CHARTS = "document.querySelectorAll('.chart canvas').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "new") as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    """No script may fail, and the content policy may block nothing."""
    yield
    ended = "ERR_CONNECTION_REFUSED"  # the page asks on when its board has ended
    assert [error for error in browser.errors() if ended not in error] == []


def press(browser: Browser, text: str) -> None:
    """Clicks the button with this text."""
    browser.run(
        "[...document.querySelectorAll('button')].find((one) => one.textContent === arguments[0]).click()", text
    )


def test_a_run_in_progress_moves(browser: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs" / "live")
    with lock_path(run).open("w") as lock, serving(tmp_path / "runs") as board:
        assert try_lock(lock.fileno(), lock_path(run))
        browser.open(board.address)
        browser.wait_for("document.querySelector('table.runs a')?.textContent === 'live'")
        browser.click("table.runs a")
        browser.wait_for("document.querySelector('.title .note')?.textContent === 'step 40'")
        browser.wait_for(CHARTS)
        browser.run("window.chart = document.querySelector('.chart canvas')")
        before = browser.run("return window.chart.toDataURL()")
        append_metrics(run, rows_of(30, first=41, reward=1.0))
        browser.wait_for("document.querySelector('.title .note').textContent === 'step 70'", timeout_s=10)
        browser.wait_for("window.chart.isConnected && window.chart.toDataURL() !== arguments[0]", before, timeout_s=10)
        browser.run("location.hash = ''")
        browser.wait_for("document.querySelector('table.runs')?.innerText.includes('70')")


def test_a_sample_opens_with_all_of_its_text(browser: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs" / "one", status="finished")
    add_samples(run, completion_tokens=6000)
    with serving(tmp_path / "runs") as board:
        browser.open(f"{board.address}#run/one")
        browser.wait_for("document.querySelectorAll('tr.opens').length")
        shown = browser.run(
            "return Math.max(...[...document.querySelectorAll('tr.opens td')].map((td) => td.textContent.length))"
        )
        browser.click("tr.opens td:first-child")
        browser.wait_for("document.querySelectorAll('dialog .completion').length === 2")
        longest = browser.run(
            "return Math.max(...[...document.querySelectorAll('dialog pre')].map((pre) => pre.textContent.length))"
        )
        assert longest > shown > 1000, "the text in the table is cut"
        text = browser.run("return document.querySelector('dialog').innerText")
        for part in ("step 6, ticket 6", "sampled by", "reward", "staleness"):
            assert part in text
        browser.click("dialog .close")
        browser.wait_for("!document.querySelector('dialog')")
        press(browser, "evaluations")
        browser.click("tr.opens td:first-child")
        browser.wait_for("document.querySelector('dialog')?.innerText.includes('evaluation of version 5')")
        browser.click("dialog .close")


def test_two_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    for name, reward in (("one", 0.5), ("two & 3", 0.9), ("other", 0.1)):
        made_run(tmp_path / "runs" / name, reward=reward, status="finished")
    with serving(tmp_path / "runs") as board:
        browser.open(board.address)
        browser.wait_for("document.querySelectorAll('table.runs a').length === 3")
        for name in ("one", "two & 3"):
            browser.click(f'input[aria-label="compare {name}"]')
        press(browser, "compare 2")
        browser.wait_for("document.querySelectorAll('h1').length === 2")
        browser.wait_for(CHARTS)
        legend = browser.run("return document.querySelector('.chart .legend').innerText")
        assert "one" in legend and "two & 3" in legend
        browser.run("location.hash = ''")
        browser.wait_for("document.querySelectorAll('table.runs a').length === 3")


def test_a_report_is_the_same_page_without_a_server(browser: Browser, tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_samples(make_run(tmp_path / name, bottleneck=HOSTILE))
    write_report(tmp_path / "both.html", [document_of(tmp_path / name) for name in ("one", "two")])
    browser.open((tmp_path / "both.html").as_uri())
    assert browser.run("return [...document.querySelectorAll('h1')].map((one) => one.textContent)") == ["one", "two"]
    browser.wait_for(CHARTS)
    browser.click("tr.opens td:first-child")
    browser.wait_for("document.querySelector('dialog .completion')")
    browser.click("dialog .close")
    assert browser.run("return document.querySelector('.verdict').textContent") == HOSTILE
    titles = browser.run("return [...document.querySelectorAll('h2')].map((one) => one.textContent)")
    assert {"What it writes", "Learning", "Timeline of a few steps", "Configuration"} <= set(titles)
    browser.run("window.scrollTo(0, document.body.scrollHeight)")
    browser.wait_for("document.querySelector('canvas[role=img]').width > 300")


def test_the_page_of_a_sweep_draws_its_table_and_curves(browser: Browser, tmp_path: Path) -> None:
    steps = [1, 2, 3]
    cells = [
        CellResult(limit, seed, 100.0 + limit, 0.5, 1.0, 0.9, 0.5, steps, [1.0, 2.0, 3.0], [0.1, 0.3, 0.5], "")
        for limit in (0, 2)
        for seed in (0, 1)
    ]
    limits = [LimitResult.of(cells[:2], 3.0), LimitResult.of(cells[2:], 3.0)]
    SweepResults(3.0, limits, Recommendation(2, HOSTILE, {0: 0.25, 2: 0.75}), cells).write(tmp_path, name="lr")
    browser.open((tmp_path / "sweep.html").as_uri())
    browser.wait_for(f"{CHARTS} === 2")
    assert browser.run("return document.querySelector('.verdict').textContent") == f"Use {HOSTILE}."
    assert "75%" in browser.run("return document.querySelector('table').innerText")


def test_a_collapse_is_at_the_top_of_the_page_and_in_the_list(browser: Browser, tmp_path: Path) -> None:
    collapse = {"sentence": f"collapsed at step 12 {HOSTILE}", "active": True, "alarms": []}
    run = made_run(tmp_path / "runs" / "one", status="finished", collapse=collapse, bottleneck=collapse["sentence"])
    append_metrics(run, [row | {"collapse/alarms": 1.0} for row in rows_of(1, first=41)])
    with serving(tmp_path / "runs") as board:
        browser.open(board.address)
        browser.wait_for("document.querySelector('table.runs .status.failed')?.textContent === 'collapse'")
        browser.click("table.runs a")
        browser.wait_for("document.querySelector('.warning.alarm')")
        assert browser.run("return document.querySelector('.warning.alarm').textContent") == collapse["sentence"]
        assert browser.run("return document.querySelector('.verdict')") is None, "not twice"
