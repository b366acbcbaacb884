"""Invitations: what a guest's key file has, what the run folder keeps, and what is refused."""

from __future__ import annotations

import fcntl
import json
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli.guests import read_seconds
from asyncrl.config import Config
from asyncrl.errors import ConfigError, PeerTimeoutError
from asyncrl.launch.commands import join as join_module
from asyncrl.launch.commands.join import Head, Stay, join
from asyncrl.launch.endpoints import run_endpoints
from asyncrl.launch.invitations import GuestKey, invite, kept_server, read_key, revoke
from asyncrl.launch.resources.network import find_port
from asyncrl.launch.run_dir import lock_path
from asyncrl.types import FIRST_GUEST
from asyncrl.util.files import replace_file
from asyncrl.wire.curve_keys import new_keys, read_keys
from asyncrl.wire.endpoints import Endpoints
from asyncrl.wire.guest_messages import Welcome
from asyncrl.wire.guests import Guests
from tests.helpers.replay import small_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    runs_dir, store = str(tmp_path / "runs"), str(tmp_path / "weights")
    return small_config(run="demo", runs_dir=runs_dir, weights__transport="files", weights__url=store)


@pytest.fixture
def endpoints() -> Endpoints:
    return Endpoints("the launch", f"tcp://10.9.8.7:{find_port()}", "run:weights", "run:learners", keys=new_keys())


@pytest.fixture
def run_dir(config: Config, endpoints: Endpoints) -> Iterator[Path]:
    """The folder of a run that is running."""
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    (config.run_dir / "endpoints.json").write_text(json.dumps(asdict(endpoints)))
    with lock_path(config.run_dir).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield config.run_dir


def key_file(folder: Path, key: GuestKey, mode: int = 0o600) -> Path:
    file = folder / "lab.key"
    replace_file(file, json.dumps(asdict(key)), mode=mode)
    return file


def test_a_key_file_has_no_secret_of_the_run_and_the_folder_none_of_the_guest(
    run_dir: Path, endpoints: Endpoints, tmp_path: Path
) -> None:
    own = read_keys(endpoints.keys)
    key = invite(run_dir, "lab", 2)
    text = json.dumps(asdict(key))
    assert own.server_public in text and endpoints.replay in text
    assert own.server_secret not in text and own.client_secret not in text and own.client_public not in text
    for file in (run_dir / "guests.json", run_dir / "server_key.json"):
        assert key.client_secret not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_keys(key.keys).server_secret == ""
    assert read_key(key_file(tmp_path, key)) == key


def test_guests_have_indices_of_their_own_also_after_a_revocation(run_dir: Path) -> None:
    guests = Guests(run_dir / "guests.json")
    keys = [invite(run_dir, name, 2) for name in ("a", "b")]
    found = [guests.find(key.client_public) for key in keys]
    assert [guest.first for guest in found if guest] == [FIRST_GUEST, FIRST_GUEST + 2]
    revoke(run_dir, "b")
    assert guests.find(keys[1].client_public) is None and guests.find(keys[0].client_public) is not None
    again = guests.find(invite(run_dir, "b", 1).client_public)
    assert again is not None and again.first == FIRST_GUEST + 4
    with pytest.raises(ConfigError, match="has a guest of this name"):
        invite(run_dir, "a", 1)
    with pytest.raises(ConfigError, match=r"no guest of this name \(of a, b\)"):
        revoke(run_dir, "c")


@pytest.mark.parametrize(("name", "generators"), [("", 1), ("a b", 1), ("../x", 1), ("lab", 0), ("lab", 257)])
def test_wrong_names_and_numbers_are_refused(run_dir: Path, name: str, generators: int) -> None:
    with pytest.raises(ConfigError, match=r"--name|--generators"):
        invite(run_dir, name, generators)


def test_a_run_on_loopback_or_none_has_no_guests(run_dir: Path, endpoints: Endpoints, tmp_path: Path) -> None:
    (run_dir / "endpoints.json").write_text(json.dumps(asdict(replace(endpoints, keys=""))))
    with pytest.raises(ConfigError, match=r"start it with launch\.address=ADDRESS:PORT"):
        invite(run_dir, "lab", 1)
    with pytest.raises(ConfigError, match="there is no such run"):
        invite(tmp_path / "runs" / "other", "lab", 1)


def test_a_run_whose_weights_guests_cannot_get_has_none(config: Config, run_dir: Path) -> None:
    text = config.to_yaml()
    assert "transport: files" in text
    (run_dir / "config.yaml").write_text(text.replace("transport: files", "transport: gloo"))
    with pytest.raises(ConfigError, match=r"weights.transport = 'gloo'.* start the run with weights.transport=files"):
        invite(run_dir, "lab", 1)
    assert not (run_dir / "server_key.json").exists()


def test_a_resumed_run_has_the_server_that_its_guests_know(
    run_dir: Path, endpoints: Endpoints, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.endpoints.is_loopback", lambda host: False)
    again = config.model_copy(update={"resume": "must"})
    with run_endpoints(again) as fresh:
        assert read_keys(fresh.keys).server_public != read_keys(endpoints.keys).server_public, "no guest was invited"
    invite(run_dir, "lab", 1)
    with run_endpoints(again) as resumed:
        old, new = read_keys(endpoints.keys), read_keys(resumed.keys)
        assert resumed.replay.rpartition(":")[2] == endpoints.replay.rpartition(":")[2]
    assert (new.server_public, new.server_secret) == (old.server_public, old.server_secret)
    assert new.client_secret != old.client_secret and resumed.run_id != endpoints.run_id
    assert kept_server(config) is None, "a new run of the name"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(run_dir: Path, tmp_path: Path, mode: int) -> None:
    file = key_file(tmp_path, invite(run_dir, "lab", 1))
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(file)


@pytest.mark.parametrize("change", [{"run": 1}, {"more": ""}, {"client_secret": "short"}])
def test_a_file_that_is_no_key_is_refused(run_dir: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    values = asdict(invite(run_dir, "lab", 1)) | change
    file = tmp_path / "lab.key"
    replace_file(file, json.dumps(values), mode=0o600)
    with pytest.raises(ConfigError, match=r"--key|JSON of"):
        read_key(file)


def test_patience_ends(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(join_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(join_module, "configure_logs", lambda *_: None)  # it is for a process of its own
    file = key_file(tmp_path, invite(run_dir, "lab", 1))
    console = Console(width=200, record=True)
    with pytest.raises(PeerTimeoutError, match=r"does not admit this key \(revoked, or of another run\); waited 0.3 s"):
        join("tcp://127.0.0.1:9", file, console, generators=None, model=None, patience_s=0.3)
    assert "tcp://127.0.0.1:9 does not answer" in console.export_text()


@pytest.mark.parametrize(
    ("url", "model", "refusal"),
    [("/nowhere/weights", ".", "weights.url = '/nowhere/weights'"), ("memory://x", "/no/model", "give .* by --model")],
)
def test_what_this_machine_lacks_is_named(
    run_dir: Path, config: Config, tmp_path: Path, url: str, model: str, refusal: str
) -> None:
    weights = config.weights.model_copy(update={"transport": "files", "url": url})
    text = config.model_copy(update={"weights": weights}).to_yaml()
    welcome = Welcome("", "demo", "id", text, FIRST_GUEST, 1, 7, greedy_baseline=False, ended=False)
    head = Head(invite(run_dir, "lab", 1), "tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match=refusal):
        Stay(head, welcome, print, generators=None, model=str(tmp_path) if model == "." else model)


def test_times() -> None:
    assert [read_seconds("--patience", text) for text in ("90s", "1.5m", "1h", "2d")] == [90.0, 90.0, 3600.0, 172800.0]
    with pytest.raises(ConfigError, match="--patience soon: is not a time"):
        read_seconds("--patience", "soon")
