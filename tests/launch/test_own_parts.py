"""User-defined parts by module and by file, and the output of asyncrl list."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from helpers.replay import EndlessPrompts, make_group, small_config
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.generator.engine import make_engine
from asyncrl.launch.launcher import LocalLauncher, find_launcher
from asyncrl.launch.registry import check_parts, print_parts, tables
from asyncrl.observe.trackers import make_trackers
from asyncrl.replay.codec import pack_group
from asyncrl.replay.live_group import refund_reason
from asyncrl.types import Lease
from asyncrl.weights.transports import choose_transport, find_transport

pytestmark = pytest.mark.timeout(120)

PARTS = """
from asyncrl.generator.engine import Engine
from asyncrl.launch.launcher import LocalLauncher
from asyncrl.weights.transports import Transport

class Rows:
    def __init__(self, config, run_dir, last_step):
        self.file = run_dir / "rows"
    def log(self, step, metrics):
        self.file.write_text(f"{step} {metrics}")
    def close(self):
        self.file.rename(self.file.with_suffix(".closed"))

def without_arguments(): ...

class Mine(LocalLauncher): ...

class Half(Engine):
    add = step = num_generated = abort = recomputed_tokens = peak_memory_bytes = close = None

class Decoder(Half):
    sleep = wake = None
    def __init__(self, config, *, seed):
        self.seed = seed

RAILS = Transport(lambda member: None, what="By rails.", on_device=True, needs_own_gpu=True)
"""


@pytest.fixture(params=["own_parts", "own_parts.py"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    return str(request.param)


def test_user_defined_parts_are_used(where: str, tmp_path: Path) -> None:
    names = {"transport": "RAILS", "cluster": "Mine"}
    config = small_config(
        weights__transport=f"{where}:{names['transport']}",
        launch__cluster=f"{where}:{names['cluster']}",
        observe__trackers=[f"{where}:Rows"],
        generator__engine=f"{where}:Decoder",
    )
    check_parts(config)
    trackers = make_trackers(config, tmp_path)
    trackers.log(1, {"a": 2.0})
    trackers.close()
    assert (tmp_path / "rows.closed").read_text() == "1 {'a': 2.0}"
    assert isinstance(find_launcher(config)(), LocalLauncher)
    assert make_engine(config, seed=7).seed == 7  # type: ignore[attr-defined]
    assert find_transport(config.weights.transport).what == "By rails."
    assert choose_transport(f"{where}:RAILS", ["cuda a", "cuda b"]) == f"{where}:RAILS"


@pytest.mark.parametrize(
    ("key", "name", "text"),
    [
        ("observe__trackers", "without_arguments", "cannot be called with the config, the run's folder and the last"),
        ("observe__trackers", "RAILS", "is a Transport, not a function"),
        ("launch__cluster", "Rows", "must be a subclass of asyncrl.launch.launcher.Launcher"),
        ("generator__engine", "Decodr", "has no 'Decodr'; did you mean Decoder?"),
        ("generator__engine", "Rows", "must be a subclass of asyncrl.generator.engine.Engine"),
        ("generator__engine", "Half", "must be a subclass of asyncrl.generator.engine.Engine, with all of its methods"),
        ("weights__transport", "Rows", "is a type, not a Transport"),
        ("weights__transport", "RALS", "has no 'RALS'; did you mean RAILS?"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(where: str, key: str, name: str, text: str) -> None:
    value = f"{where}:{name}"
    with pytest.raises(ConfigError) as raised:
        check_parts(small_config(**{key: [value] if key == "observe__trackers" else value}))
    assert str(raised.value).startswith(f"{key.replace('__', '.')} = '{value}': ") and text in str(raised.value)


def test_a_store_that_is_not_known_is_refused_if_weights_go_there() -> None:
    check_parts(small_config(weights__url="rails://there"))
    with pytest.raises(ConfigError, match=r"weights\.url = 'rails://there': cannot be used: Protocol not known: rails"):
        check_parts(small_config(weights__url="rails://there", weights__transport="files"))


@pytest.mark.parametrize(
    ("choice", "group_relative", "reason"),
    [("auto", True, "zero_variance"), ("auto", False, ""), ("refund", False, "zero_variance"), ("train", True, "")],
)
def test_groups_of_equal_rewards_are_refunded_where_they_have_no_signal(
    choice: str, group_relative: bool, reason: str
) -> None:
    header, _ = pack_group(make_group(Lease(0, 0, EndlessPrompts().prompt(0)), 0, rewards=(1.0, 1.0)))
    config = small_config(replay__zero_variance=choice)
    assert refund_reason(config, header, group_relative=group_relative) == reason


def test_every_part_is_described_as_it_is_written() -> None:
    out = io.StringIO()
    print_parts(Console(file=out, width=400))
    lines = {words[0]: line for line in out.getvalue().splitlines() if (words := line.split())}
    assert {name for parts in tables().values() for name in parts} <= lines.keys()
    assert "PPO's surrogate within [min(e^-tau, 1 - clip_low), max(e^tau, 1 + clip_high)]" in lines["m2po"]
    assert r'("1/2", "\frac{1}{2}", "0.5")' in lines["math"] and lines["math"].rstrip().endswith("; else 0.")
    assert lines["gloo"].split(maxsplit=1)[1].startswith("By TCP")
    assert "Transport(" not in out.getvalue()
