"""Memory and time of a restart, the report and the board do not grow with the run: measured in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.observe.samples import TRAINED, Samples, append_rows, choose, evaluated_file
from asyncrl.types import Lease, Prompt
from tests.helpers.replay import make_group, small_config

pytestmark = pytest.mark.slow

MEASURE = """
import sys, time
from pathlib import Path
{imports}
def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
run_dir = Path(sys.argv[1])
before_mib, started_s = peak_mib(), time.monotonic()
{code}
print(peak_mib() - before_mib, time.monotonic() - started_s)
"""


def measure(run_dir: Path, imports: str, code: str) -> tuple[float, float]:
    """Growth of the peak of memory in MiB, and seconds, of the code in a new process."""
    script = MEASURE.format(imports=textwrap.dedent(imports), code=textwrap.dedent(code))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(run_dir)],
        capture_output=True, text=True, timeout=300, check=True, env=environment,
    )  # fmt: skip
    mib, seconds = map(float, done.stdout.split()[-2:])
    print(f"{mib:.0f} MiB, {seconds:.2f} s")
    return mib, seconds


def test_a_restart_after_100_000_steps(tmp_path: Path) -> None:
    metrics = {f"section/metric_number_{number}": 1.0 / (number + 3) for number in range(100)}
    row = json.dumps({"step": 0, **metrics}).removeprefix('{"step": 0')
    empty, long = tmp_path / "empty", tmp_path / "long"
    for folder in (empty, long):
        folder.mkdir()
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            evaluated = f', "eval/version": {step}.0' if step % 100 == 0 else ""
            file.write(f'{{"step": {step}{evaluated}{row}\n')
    assert (long / "metrics.jsonl").stat().st_size > 400e6
    imports = """
        from asyncrl.observe.trackers import make_trackers
        from tests.helpers.replay import small_config
    """
    code = "trackers = make_trackers(small_config(), run_dir); trackers.log(100_001, {}); trackers.close()"
    mib, seconds = measure(long, imports, code)
    other_mib, other_seconds = measure(empty, imports, code)
    assert mib - other_mib < 50 and seconds - other_seconds < 1


@pytest.mark.parametrize("what", ["report", "board"])
def test_pages_of_400_000_evaluated_completions(tmp_path: Path, what: str) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(small_config(model__path=str(tmp_path / "model")).to_yaml())
    file = evaluated_file(tmp_path, 1)
    for row in range(500):
        prompt = Prompt(row, np.arange(3, dtype=np.int32), "1", "test")
        group = make_group(Lease(row, 0, prompt), 1, rewards=(0.0, 0.5, 0.75, 1.0), completion_tokens=(600,) * 4)
        append_rows(file, Samples.of_groups([group], outcome="evaluated"))
        if row < 300:
            append_rows(tmp_path / "samples" / TRAINED, choose([group], step=row + 1))
    per_version = len(file.read_bytes().splitlines())
    versions = -(-400_000 // per_version)
    for version in range(2, versions + 1):
        os.link(file, evaluated_file(tmp_path, version))
    imports = """
        from asyncrl.observe.board import WatchedRun
        from asyncrl.observe.run_report import document_of
        from asyncrl.observe.page import write_report
    """
    code = {
        "report": """
            document = document_of(run_dir)
            assert document["samples"]["evaluated"]
            write_report(run_dir / "report.html", [document])
        """,
        "board": """
            assert WatchedRun(run_dir).since(0)["document"]["samples"]["evaluated"]
        """,
    }[what]
    mib, _ = measure(tmp_path, imports, code)
    assert mib < 300
