"""The board over a real run, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.board import serving
from tests.helpers.browser import Browser
from tests.helpers.runs import SMALL, Launched

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

STEP = "Number(document.querySelector('.title .note')?.textContent.match(/step ([0-9]+)/)?.[1] ?? 0)"


def test_a_demo_run_is_seen_from_its_start_to_its_end(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("--steps", "25", *SMALL)
    run.wait_for_step(2)
    with serving(run.folder / "runs") as board, Browser(tmp_path / "browser") as browser:
        browser.open(f"{board.address}#run/{run.run}")
        early = browser.wait_for(STEP, timeout_s=60)
        browser.wait_for(f"{STEP} > arguments[0]", early, timeout_s=60)
        browser.wait_for("[...document.querySelectorAll('h2')].some((one) => one.textContent.startsWith('Ledger'))")
        browser.wait_for("document.querySelectorAll('tr.opens').length", timeout_s=60)
        browser.click("tr.opens td:first-child")
        browser.wait_for("document.querySelectorAll('dialog .completion').length === 4", timeout_s=60)
        assert "sampled by" in browser.run("return document.querySelector('dialog').innerText")
        code, output = run.end(timeout_s=250)
        assert code == 0, output
        browser.wait_for("document.querySelector('.status')?.textContent === 'finished'", timeout_s=30)
        assert "bound" in browser.text() or "balanced" in browser.text()
        assert browser.errors() == []
