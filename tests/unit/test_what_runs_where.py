"""The README's table of what was shown to work where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.what_runs_where import FEATURES, Feature, figures, gpu_cell, read_results, table
from tests.gpu_check import updated

ROOT = Path(__file__).parents[2]


def result(card: str, **outcomes: str) -> dict[str, Any]:
    checks = [{"name": name, "outcome": outcome} for name, outcome in outcomes.items()]
    return {"date": "2026-01-02", "machine": {"gpus": [card]}, "checks": checks}


def test_the_readme_has_the_table_of_the_results() -> None:
    assert table(FEATURES, read_results()) in (ROOT / "README.md").read_text()
    assert figures(read_results()) in (ROOT / "docs" / "performance.md").read_text()


def test_the_tests_and_checks_exist() -> None:
    checks = "\n".join(file.read_text() for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
    for feature in FEATURES:
        assert not feature.cpu or (ROOT / "tests" / feature.cpu).is_file(), feature.cpu
        for name in feature.gpu:
            file, _, function = name.partition("::")
            assert (ROOT / "tests" / "gpu" / file).is_file(), name
            assert f"def {function.partition('*')[0]}" in checks, name


def test_a_feature_is_proven_by_checks_that_all_passed() -> None:
    feature = Feature("one", "", ("a.py::test_x*",))
    assert gpu_cell(feature, [result("Card", **{"a.py::test_x[1]": "passed", "a.py::test_x[2]": "passed"})]) == (
        "Card, 2026-01-02"
    )
    for other, cell in {"failed": "1 of 2 checks failed: Card, 2026-01-02", "skipped": "written only"}.items():
        found = result("Card", **{"a.py::test_x[1]": "passed", "a.py::test_x[2]": other})
        assert gpu_cell(feature, [found]) == cell
    assert gpu_cell(feature, [result("Card", **{"a.py::test_y": "passed"})]) == "written only"
    assert gpu_cell(Feature("none", ""), [result("Card", **{"a.py::test_x": "passed"})]) == "written only"


def test_results_of_stages_that_do_not_run_stay() -> None:
    def check(stage: str, name: str, commit: str) -> dict[str, str]:
        return {"stage": stage, "name": name, "commit": commit}

    before = [check("learner", "a", "1"), check("run", "moves to weights", "1"), check("run", "b", "1")]
    before += [check("weights", "is no longer", "1"), check("no such stage", "c", "1")]
    now = [check("weights", "moves to weights", "2")]
    assert updated(before, now) == [check("learner", "a", "1"), *now, check("run", "b", "1")]
