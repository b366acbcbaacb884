"""`python -m tests`, on small folders of tests: every part runs, and nothing that fails is hidden."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.__main__ import GENERATOR, LEARNER, PROCESSES, SYSTEM, WEIGHTS

REPOSITORY = Path(__file__).parents[2]
PARTS = {
    "others": "tests/unit/test_others.py",
    "processes": "tests/launch/test_processes.py",
    "learner": "tests/learner/test_learner.py",
    "weights": "tests/weights/test_weights.py",
    "generator": "tests/generator/test_generator.py",
    "system": "tests/system/test_system.py",
}
"""In the order in which they start."""
CONFTEST = "from tests.helpers.skips import pytest_make_collect_report, pytest_runtest_makereport\n"
SETTINGS = "[pytest]\nmarkers =\n  slow: -\n  system: -\n"
TEST = """
import os, time
from pathlib import Path
import pytest

def await_file(name):
    deadline_s = time.monotonic() + 60
    while not Path(name).exists():
        assert time.monotonic() < deadline_s, name
        time.sleep(0.01)

{marks}
def test():
    Path("{part}.pid").write_text(str(os.getpid()))
    {body}
    Path("{part}").touch()
"""


def write_tests(folder: Path, *, mark: str = "", **bodies: str) -> None:
    """One test for each part; it leaves a file of the part's name when its body passes."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(SETTINGS)
    for other in (*GENERATOR, *LEARNER, *WEIGHTS, *PROCESSES, *SYSTEM):
        (folder / other).mkdir(parents=True)
    plugin = folder / "tests/helpers/second_runner.py"
    plugin.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests/helpers/skips.py", plugin.parent)
    plugin.write_text("def pytest_collection_modifyitems(items):\n    items.clear()\n")
    for part, file in PARTS.items():
        marks = [mark] if mark else []
        marks += ["@pytest.mark.system"] if part == "system" else []
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(TEST.format(part=part, marks="\n".join(marks), body=bodies.get(part, "pass")))


def start(folder: Path, *arguments: str, may_skip: bool = True, in_background: bool = False) -> subprocess.Popen[str]:
    """The runner; with `in_background` it ignores SIGINT from its start, as a shell's background job does."""
    environment = {**os.environ, "ASYNCRL_MAY_SKIP": "1" if may_skip else "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tests" / "__main__.py"), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if in_background else None,
    )


def run(folder: Path, *arguments: str, may_skip: bool = True) -> tuple[int, str, list[str]]:
    """Exit code, output, and the parts whose tests passed."""
    process = start(folder, *arguments, may_skip=may_skip)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output, [part for part in PARTS if (folder / part).exists()]


def test_five_parts_run_at_a_time_and_the_next_starts_when_one_has_ended(tmp_path: Path) -> None:
    write_tests(
        tmp_path,
        others="await_file('system.pid')",
        processes="await_file('system.pid')",
        learner="await_file('system.pid')",
        weights="await_file('system.pid')",
        generator="[await_file(f'{part}.pid') for part in ('others', 'processes', 'learner', 'weights')]",
        system="assert Path('generator').exists()",
    )
    code, output, passed = run(tmp_path)
    assert (code, passed) == (0, list(PARTS)), output
    *lines, total = output.splitlines()[-7:]
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert all("1 passed" in line for line in lines)
    assert total.startswith("total ") and total.endswith(" s, passed")


def test_a_part_that_fails_hides_no_other_and_skips_fail_only_where_they_are_not_allowed(tmp_path: Path) -> None:
    write_tests(tmp_path, others="pytest.skip('not here')")
    for may_skip, expected in ((True, 0), (False, 1)):
        code, output, passed = run(tmp_path, may_skip=may_skip)
        assert (code, passed) == (expected, list(PARTS)[1:]), output
    assert output.endswith(" s, failed: others\n")


def test_slow_tests_of_the_system_run_alone(tmp_path: Path) -> None:
    write_tests(
        tmp_path,
        mark="@pytest.mark.slow",
        others="await_file('generator'); time.sleep(1.5); assert not Path('system.pid').exists()",
    )
    code, output, passed = run(tmp_path, "all")
    assert (code, passed) == (0, list(PARTS)), output
    assert output.splitlines()[-2].startswith("system ")


def test_slow_tests_run_in_all_and_a_part_may_have_none(tmp_path: Path) -> None:
    write_tests(tmp_path)
    (tmp_path / "tests" / "unit" / "test_slow.py").write_text(
        "import pytest\nfrom pathlib import Path\n@pytest.mark.slow\ndef test():\n    Path('slow').touch()\n"
    )
    code, output, passed = run(tmp_path, "all")
    assert (code, passed, (tmp_path / "slow").exists()) == (0, [], True), output
    (tmp_path / "slow").unlink()
    (tmp_path / PARTS["system"]).unlink()
    code, output, passed = run(tmp_path)
    assert (code, passed, (tmp_path / "slow").exists()) == (1, list(PARTS)[:-1], False), output
    assert output.endswith(" s, failed: system\n"), "a part without tests has lost them"


def test_an_interrupted_runner_leaves_no_part(tmp_path: Path) -> None:
    write_tests(tmp_path, others="time.sleep(100)", learner="time.sleep(100)")
    process = start(tmp_path, in_background=True)
    pids = [tmp_path / f"{part}.pid" for part in ("others", "learner")]
    deadline_s = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in pids):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)  # less than the grace of both parts
    assert process.returncode == 130, output
    assert output.endswith("interrupted\n")
    assert not any(psutil.pid_exists(int(file.read_text())) for file in pids)
