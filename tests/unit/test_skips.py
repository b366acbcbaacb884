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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("may_skip", "expected", "counts"), [("1", 0, "2 skipped"), ("0", 1, "1 failed, 1 error")])
def test_a_skip_is_a_failure_where_none_is_allowed(tmp_path: Path, may_skip: str, expected: int, counts: str) -> None:
    (tmp_path / "test_it.py").write_text(IN_A_TEST)
    (tmp_path / "test_module.py").write_text(AT_IMPORT)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", str(tmp_path)]
    # In CI pytest repeats the complete message in its summary.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment["ASYNCRL_MAY_SKIP"] = may_skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == expected, done.stdout + done.stderr
    assert counts in done.stdout.splitlines()[-1], done.stdout
    assert done.stdout.count("Nothing may be skipped here") == (2 if may_skip == "0" else 0), done.stdout
