"""Files that change under a run: rows are refused or accepted, others are named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import run_dir as module
from asyncrl.launch.run_dir import RunFolder, check_resume, fingerprint, fingerprints
from tests.helpers.cli import asyncrl
from tests.helpers.inputs import make_inputs
from tests.helpers.replay import loopback_endpoints, small_config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    _, rows = make_inputs(tmp_path)
    pq.write_table(pa.Table.from_pylist(rows), "held.parquet")
    Path("mine.py").write_text("def score(): return 1.0\n")
    Path("more.py").write_text("def bonus(): return 1.0\n")
    return tmp_path


def config(**settings: object) -> Config:
    return small_config(
        run="one", model__path="model", data__train="data.parquet", data__eval="held.parquet",
        rewards={"mine.py:score": 1.0, "exact": 0.5}, eval__rewards="more.py:bonus", **settings,
    )  # fmt: skip


def start() -> None:
    with RunFolder(config()) as run:
        run.begin(config(), loopback_endpoints(1), [])
        run.write_summary(run.summary({"status": "stopped", "steps": 1, "wall_s": 1.0}))


def other_rows(file: str) -> None:
    """As many rows, in a file of the same size and time."""
    before = os.stat(file)
    table = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"prompt": "2+1="} for row in table]), file)
    assert os.stat(file).st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_as_many_other_rows_are_refused_unless_they_are_accepted() -> None:
    start()
    assert check_resume(config(resume="must"))
    other_rows("data.parquet")
    for resume in ("must", "auto"):
        with pytest.raises(ConfigError, match=r"^data\.train: data\.parquet has other content .* \(--accept-data\)"):
            check_resume(config(resume=resume))
    code, output = asyncrl("launch", "--accept-data", "--run", "one")
    assert code == 2 and "--accept-data: is for a run that goes on; give --resume too" in output
    code, output = asyncrl("launch", "--resume", "--accept-data", "--run", "one", "data.shuffle=false")
    assert code == 2 and "data.train" not in output and "data.shuffle: it was True" in output  # refused for that alone
    with RunFolder(config(resume="must")) as run:
        assert run.changed == ["data.train: data.parquet"]
        assert run.summary({"wall_s": 1.0})["changed_files"] == run.changed
        run.begin(run.config, loopback_endpoints(1), [])
    with RunFolder(config(resume="must")) as run:
        assert run.changed == [] and "changed_files" not in run.summary({"wall_s": 1.0})
    other_rows_again = pq.read_table("data.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"prompt": "3+1="} for row in other_rows_again]), "data.parquet")
    with pytest.raises(ConfigError, match=r"^data\.train: data\.parquet"):
        check_resume(config(resume="must"))


def test_other_files_are_named() -> None:
    start()
    other_rows("held.parquet")
    Path("mine.py").write_text("def score(): return 0.0\n")
    Path("more.py").write_text("def bonus(): return 0.0\n")
    Path("model/model.safetensors").write_bytes(b"other")
    Path("model/chat_template.jinja").write_text("new")
    Path("model/README.md").write_text("what is not read")
    with RunFolder(config(resume="must")) as run:
        assert sorted(run.changed) == [
            "data.eval: held.parquet", "eval.rewards: more.py", "model.path: chat_template.jinja",
            "model.path: model.safetensors", "rewards: mine.py",
        ]  # fmt: skip


def test_a_copied_folder_has_the_same_fingerprints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints(config())
    assert {"data.train", "data.eval", "model.path", "rewards", "eval.rewards"} == before.keys()
    shutil.copytree(folder, folder / "copy", copy_function=shutil.copyfile)
    monkeypatch.chdir(folder / "copy")
    assert fingerprints(config()) == before


def test_of_large_files_the_ends_and_parts_between_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETE_BYTES", 1000)
    monkeypatch.setattr(module, "BLOCK_BYTES", 10)
    content = bytearray(200_000)
    Path("large").write_bytes(content)
    first = fingerprint(Path("large"))
    for place in (0, -1, (len(content) - 10) * 31 // 63):
        other = bytearray(content)
        other[place] = 1
        Path("large").write_bytes(other)
        assert fingerprint(Path("large")) != first
    Path("large").write_bytes(content)
    assert fingerprint(Path("large")) == first


def test_a_run_without_fingerprints_is_resumed() -> None:
    start()
    (Path("runs/one") / module.FILE).unlink()
    other_rows("data.parquet")
    with RunFolder(config(resume="must")) as run:
        run.begin(run.config, loopback_endpoints(1), [])
    assert json.loads((Path("runs/one") / module.FILE).read_text()).keys() >= {"data.train"}
