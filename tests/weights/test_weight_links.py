"""Readers with slow links follow with strides, as computed by hand."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from stored_parts import Model, make_publisher
from structlog.testing import capture_logs

from asyncrl.weights import version_store as reader
from asyncrl.weights.files import USUAL_STRIDES, FileReceiver
from asyncrl.weights.layout import WeightManifest
from asyncrl.weights.version_store import LinkMeter, stride_of

BYTES_PER_S = 2.5e6
"""20 Mb/s."""
LAYOUT = WeightManifest.of([("weight", torch.bfloat16, (1024, 1024))])


class Clock:
    """Seconds that the test counts."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("step_s", "stride"),
    [(48.0, 1), (47.0, 4), (32.0, 4), (31.0, 16), (18.5, 16), (18.0, 64), (10.0, 64), (9.7, None)],
)
def test_the_stride_of_7b_at_20_megabits(step_s: float, stride: int | None) -> None:
    """A delta of 120 MB takes 48 s; those of 4, 16 and 64 steps 125, 293 and 624 s."""
    assert stride_of(120e6 / BYTES_PER_S / step_s) == stride


def test_a_meter_averages_what_was_read_and_announced() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    assert meter.link(1000, full=False) is None
    meter.announced(3)
    meter.fetched(15_000_000, 6.0)
    assert meter.link(1000, full=False) is None, "no step was measured"
    clock.now_s += 70.0
    meter.announced(5)
    meter.fetched(0, 1.0)
    found = meter.link(120_000_000, full=False)
    assert found is not None
    assert (found.version_s, found.step_s, found.bytes_per_s, found.stride) == (48.0, 35.0, 2.5e6, 4)
    full = meter.link(120_000_000, full=True)
    assert full is not None and full.stride == 1, "the newest is as small as any other"
    meter.announced(4)  # a restarted learner
    assert meter.link(1000, full=False) is None
    for _ in range(8):
        clock.now_s += 10.0
        meter.announced(meter._announced[-1][0] + 1)
        meter.fetched(100, 1.0)
    found = meter.link(100, full=False)
    assert found is not None and (found.version_s, found.step_s) == (1.0, 10.0), "those before are forgotten"


class Throttled:
    """A stored file that is read at 20 Mb/s of a clock."""

    def __init__(self, file: Any, clock: Clock) -> None:
        self._file, self._clock = file, clock

    def readinto(self, part: memoryview) -> int:
        count = self._file.readinto(part)
        self._clock.now_s += count / BYTES_PER_S
        return count

    def __enter__(self) -> Throttled:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store that is written at once, and read at 20 Mb/s; the clock of readers counts that."""
    url = f"memory://{uuid.uuid4().hex}"
    store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    real, clock = store.open, Clock()
    monkeypatch.setattr(
        store, "open", lambda path, mode: Throttled(real(path, mode), clock) if mode == "rb" else real(path, mode)
    )
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=clock))
    yield url
    store.rm(path, recursive=True)


@pytest.mark.parametrize(
    ("steps", "away", "expected"),
    [
        (0.5, [], list(range(34))),
        (1.25, [], [0, 1, 4, 8, 12, 16, 20, 24, 28, 32]),
        (1.25, range(9, 30), [0, 1, 4, 8, 28, 32]),
        (2.0, [], [0, 1, 16, 32]),
        (6.0, [], [0, 1]),
    ],
)
def test_a_reader_at_20_megabits_follows_with_the_stride_of_its_link(
    steps: float, away: Sequence[int], expected: list[int], url: str
) -> None:
    """A single delta takes this many steps of the learner. While it is away, the reader hears of no version."""
    clock, model = Clock(), Model(LAYOUT)
    publisher = make_publisher(url, layout=LAYOUT, shard_bytes=1 << 30)
    receiver = FileReceiver(url, run_id="run-0f", timeout_s=20.0, max_bytes=1 << 26)
    receiver._meter = LinkMeter(clock)
    loaded, delta_bytes = list[int](), 0
    with capture_logs() as logs:
        for version in range(34):
            before = publisher.num_bytes
            announced = publisher.publish(version, model.weights, needed=version)
            if version == 1:
                manifest_bytes = 2000
                delta_bytes = publisher.num_bytes - before - manifest_bytes
            clock.now_s += delta_bytes / BYTES_PER_S / steps
            if version not in away:
                receiver.announce(announced)
            while receiver._fetch_next():
                staged = receiver.staged()
                assert staged is not None
                receiver.loaded(staged)
                loaded.append(staged.version)
            model.step()
    assert loaded == expected
    link = receiver.following().link
    assert link is not None and link.bytes_per_s == pytest.approx(BYTES_PER_S)
    assert link.version_s / link.step_s == pytest.approx(steps, rel=0.1), "a manifest has about 2 kB"
    slow = [entry["most_steps"] for entry in logs if "too slow" in entry["event"]]
    assert slow == ([4.9] if steps == 6.0 else [])


def test_a_stride_of_64_begins_when_a_reader_wishes_it(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    model, publisher = Model(), make_publisher(url, full_every=1000, keep=1)
    for version in range(129):
        publisher.strides = USUAL_STRIDES | ({64} if version >= 10 else set())
        announced = publisher.publish(version, model.weights, needed=version)
        if version % 8 == 0:
            publisher.collect()
        model.step()
    store, path = fsspec.core.url_to_fs(url)
    names = sorted(name.rpartition("/")[2] for name in store.ls(f"{path}/{announced.folder}", detail=False))
    assert names == [
        "from-000064.delta",
        "from-000112.delta",
        "from-000124.delta",
        "from-000127.delta",
        "manifest.json",
    ]
    publisher.strides = USUAL_STRIDES
    publisher.publish(129, model.weights, needed=129)
    assert publisher._bases.keys() == {1, 4, 16}, "memory of the largest is free"
    store.rm(path, recursive=True)
