"""A user's own file: executed once in a process, however it is named; its errors are reported each time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.util.user_code import resolve

pytestmark = pytest.mark.timeout(60)

COUNTS = """
import pathlib

with pathlib.Path(__file__).with_suffix(".executed").open("a") as file:
    file.write("x")

calls = []

def first():
    calls.append("first")

def second():
    return calls
"""


def executions(file: Path) -> int:
    return len(file.with_suffix(".executed").read_text())


def test_functions_of_one_file_share_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "mine.py").write_text(COUNTS)
    (tmp_path / "link.py").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    first, second = resolve("rewards", "mine.py:first", {}), resolve("rewards", f"{file}:second", {})
    first()
    assert second() == ["first"]
    assert resolve("algorithm.loss", "link.py:second", {}) is second
    assert sys.modules[first.__module__].first is first
    assert executions(file) == 1


def test_files_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(COUNTS)
    one, other = (resolve("rewards", f"{file}:first", {}) for file in files)
    assert one is not other and sys.modules[one.__module__].first is one
    assert [executions(file) for file in files] == [1, 1]


@pytest.mark.parametrize("raises", ["1 / 0", "raise SystemExit(3)"])
def test_an_error_in_a_file_is_reported_each_time(tmp_path: Path, raises: str) -> None:
    (file := tmp_path / "broken.py").write_text(f"{COUNTS}\n{raises}\n")
    texts: list[str] = []
    for key in ("rewards", "algorithm.loss"):
        with pytest.raises(ConfigError, match=rf"^{key} = '.*broken\.py:second': cannot import") as raised:
            resolve(key, f"{file}:second", {})
        texts.append(str(raised.value).removeprefix(key))
    assert texts[0] == texts[1]
    assert executions(file) == 2
    assert not [name for name in sys.modules if name.startswith("asyncrl_user_broken")]
