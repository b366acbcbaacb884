"""A short run of the fuzzer: nothing that is sent ends, holds up or swells a replay server or its clients."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.replay.codec import check_group
from asyncrl.wire.frames import BODIES, decode
from tests.fuzz.drive import fuzz_clients, fuzz_server
from tests.fuzz.frames import GROUP_SIZE, RUN_ID, answers, requests
from tests.fuzz.mutate import Mutator
from tests.helpers.examples import examples

SOUND = requests() | answers()
REASONS = [
    "schema version", "does not have the id of this run", "unknown kind", "is not msgpack", r"exceeds max_\w+_len",
    "frames do not fit the header's list", "frames of arrays, this kind has none",
    "bytes does not hold", "a truth value is neither",
    "missing required field", "contains unknown field", r"Expected `[\w |]+`(, got| - at)",
    r"Expected `\w+` [<>]=?", "matching regex",
    "of length", "Invalid enum value", "a header of .* are read",
    r"\d+ \w+ for \d+ trajectories", "trajectories are of the members", "expected frames of tokens",
    "lengths do not add up",
    "not all in the vocabulary", "a token has a version if and only if", "older than the version",
    "behavior_logprobs of .* nats from", "the first token of a trajectory is an action",
    "reward .* is not finite", "is not between",
]  # fmt: skip
"""The errors of `decode` and `check_group`; `tests/replay/test_wire.py` has an empty message."""
MIN_MUTANTS, MAX_MUTANTS = 20_000, 1_000_000
"""The limit of a test that draws until it has found every reason."""


def test_every_kind_is_mutated() -> None:
    assert set(SOUND) == set(BODIES)
    for kind, frames in SOUND.items():
        message = decode(RUN_ID, frames)
        assert (message.kind, bool(message.arrays)) == (kind, message.body.has_arrays)


def test_every_reason_to_refuse_a_message_is_reached() -> None:
    """As many messages as it takes: how often a reason comes up changes with every field of a message."""
    mutator, reasons, unreached = Mutator(3), Counter[str](), set(REASONS)
    pool = [*SOUND.values(), *[SOUND["GroupHeader"]] * 16]
    for number in range(MAX_MUTANTS):
        if number >= MIN_MUTANTS and not unreached:
            break
        frames = mutator.mutant(pool)
        try:
            message = decode(RUN_ID, frames)
            if message.kind == "GroupHeader":
                check_group(message.body, message.arrays, group_size=GROUP_SIZE)
        except ProtocolError as error:
            found = [reason for reason in REASONS if re.search(reason, str(error))]
            assert found, f"a reason that the table lacks: {error}"
            reasons.update(found)
            unreached -= set(found)
    assert not unreached, f"messages refused for the other reasons: {reasons}"


@settings(max_examples=examples(500))
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_are_refused_with_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(RUN_ID, frames)


@pytest.mark.timeout(240)
def test_server_stands_mutated_messages() -> None:
    report = fuzz_server(17_000, 11, lambda _: None)
    assert report.outcomes["bad_messages"] > 10_000
    assert report.outcomes["step"] > 3, "the run went on all the while"


@pytest.mark.timeout(240)
def test_clients_stand_mutated_answers() -> None:
    report = fuzz_clients(3_000, 11, lambda _: None)
    for outcome in ("leases", "shard", "committed", "evaluation"):
        assert report.outcomes[outcome] > 5, "sound answers are found among the others"
