"""A skipped test fails where nothing may be skipped, as in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_A_TEST = "import pytest\ndef test_it():\n    pytest.skip('no such machine')\n"
AT_IMPORT = "import pytest\npytest.skip('no such machine', allow_module_level=True)\n"
NO_TESTS = 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("code", "may_skip", "expected"),
    [(IN_A_TEST, "1", 0), (IN_A_TEST, "0", 1), (AT_IMPORT, "1", NO_TESTS), (AT_IMPORT, "0", 2)],
)
def test_a_skip_is_a_failure_where_none_is_allowed(tmp_path: Path, code: str, may_skip: str, expected: int) -> None:
    (tmp_path / "test_it.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"ASYNCRL_MAY_SKIP": may_skip}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    assert ("Nothing may be skipped here" in done.stdout) is (may_skip == "0")
