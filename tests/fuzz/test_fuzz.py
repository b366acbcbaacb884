"""A short run of the fuzzer: nothing that is sent ends, holds up or swells a replay server or its clients."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.replay.messages import ANSWERS, BODIES, WITH_ARRAYS
from asyncrl.replay.wire import decode
from tests.fuzz.drive import fuzz_clients, fuzz_server
from tests.fuzz.frames import RUN_ID, answers, requests
from tests.fuzz.mutate import ENDING, Mutator

SOUND = requests() | answers()


def test_every_kind_is_mutated() -> None:
    assert set(SOUND) == set(BODIES)
    for kind, frames in SOUND.items():
        message = decode(RUN_ID, frames)
        assert (message.kind, bool(message.arrays)) == (kind, kind in WITH_ARRAYS)
    assert set(ANSWERS) | set(ANSWERS.values()) | {"error", "leave"} == set(BODIES)


def test_mutants_are_unsound_mostly_and_the_same_for_a_seed() -> None:
    pool = list(SOUND.values())
    one, two = Mutator(5), Mutator(5)
    outcomes: Counter[str] = Counter()
    for _ in range(3000):
        mutant = one.mutant(pool)
        assert mutant == two.mutant(pool)
        try:
            message = decode(RUN_ID, mutant)
        except ProtocolError as error:
            outcomes["refused"] += 1
            assert len(str(error)) < 1000, "what is said of a bad message is short"
        else:
            outcomes["sound"] += 1
            assert message.kind not in ENDING
    assert outcomes["refused"] > 2000
    assert outcomes["sound"] > 30, "some get past the schema, to the rules"


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_are_refused_with_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(RUN_ID, frames)


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(sorted(SOUND)), st.data())
def test_a_damaged_message_is_refused_or_read(kind: str, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in SOUND[kind]]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(RUN_ID, [bytes(frame) for frame in frames])


@pytest.mark.timeout(60)
def test_server_stands_mutated_messages() -> None:
    report = fuzz_server(17_000, 11, lambda _: None)
    assert report.outcomes["bad_messages"] > 10_000
    assert report.outcomes["cut_off"] > 100
    assert report.outcomes["step"] > 3, "the run went on all the while"


@pytest.mark.timeout(60)
def test_clients_stand_mutated_answers() -> None:
    report = fuzz_clients(3_000, 11, lambda _: None)
    for outcome in ("leases", "shard", "committed", "evaluation"):
        assert report.outcomes[outcome] > 5, "sound answers are found among the others"
