"""Deltas of 16-bit weights: the same bits come out, damaged ones are refused, and how many bytes they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import tiny_model
from asyncrl.errors import ProtocolError
from asyncrl.weights import deltas
from tests.helpers.examples import examples

NEVER = 1 << 40
PATTERNS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7C00, 0xFC00, 0x7E01, 0x0001, 0x7FFF]
"""Zeros, infinities, NaN with several payloads and the smallest number, of bfloat16 and float16."""


def made(seed: int, num_words: int, density: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two versions of some words."""
    random = np.random.default_rng(seed)
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    old = torch.from_numpy(random.standard_normal(num_words) * 0.02).to(dtype).view(torch.uint16).numpy()
    new = old.copy()
    at = random.random(num_words) < density
    if kind == "patterns":
        old[random.random(num_words) < 0.5] = random.choice(PATTERNS)
        new[at] = random.choice(PATTERNS, np.count_nonzero(at))
    elif kind == "any bits":
        new[at] = random.integers(0, 1 << 16, np.count_nonzero(at))
    else:
        new[at] += random.choice([1, 2, 0xFFFF, 0x8000], np.count_nonzero(at)).astype(np.uint16)
    return old, new


def check(old: np.ndarray, new: np.ndarray) -> bytes:
    kept = old.copy(), new.copy()
    blocks = deltas.encode(old, new, max_bytes=NEVER)
    assert blocks is not None
    words = old.copy()
    deltas.apply(b"".join(blocks), words)
    assert np.array_equal(words, new)
    assert np.array_equal(old, kept[0]) and np.array_equal(new, kept[1]), "they are only read"
    return b"".join(blocks)


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 1 << 32),
    num_words=st.integers(1, 4000),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["bfloat16", "float16", "patterns", "any bits"]),
    block_words=st.sampled_from([1, 7, 512, 1000, 1 << 24]),
)
def test_the_bits_of_the_new_version_come_out(
    seed: int, num_words: int, density: float, kind: str, block_words: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_WORDS", max(block_words, num_words // 50))
        check(*made(seed, num_words, density, kind))


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=300))
def test_any_two_versions(pairs: list[tuple[int, int]]) -> None:
    words = np.array(pairs, np.uint16)
    check(words[:, 0].copy(), words[:, 1].copy())


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 65_535, 65_536, 300_000])
@pytest.mark.parametrize("step", [1, 126, 127, 128, 0x7FFF, 0x8000, 0xFF80, 0xFF81, 0xFFFF])
def test_gaps_and_steps_around_the_escapes(gap: int, step: int) -> None:
    old = np.zeros(300_010, np.uint16)
    new = old.copy()
    new[[gap, gap + 1, len(new) - 1]] = step
    assert len(check(old, new)) < 200


def test_nothing_changed_and_everything_changed() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    assert len(check(words, words)) == 32
    check(words, words + np.uint16(1))
    check(words, ~words)


def test_a_delta_of_too_many_bytes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "BLOCK_WORDS", 1000)
    old, new = made(0, 10_000, 1.0, "any bits")
    blocks = deltas.encode(old, new, max_bytes=NEVER)
    assert blocks is not None and len(blocks) == 10
    size = sum(map(len, blocks))
    assert deltas.encode(old, new, max_bytes=size) == blocks
    assert deltas.encode(old, new, max_bytes=size - 1) is None


@settings(max_examples=examples(150))
@given(st.data())
def test_a_damaged_delta_is_refused_or_gives_other_words(data: st.DataObject) -> None:
    old, new = made(1, 3000, 0.1, "any bits")
    delta = bytearray(check(old, new))
    at = data.draw(st.integers(0, len(delta) - 1))
    if data.draw(st.booleans()):
        delta[at] ^= data.draw(st.integers(1, 255))
    else:
        del delta[at:]
    words = old.copy()
    try:
        deltas.apply(bytes(delta), words)
    except ProtocolError:
        return
    assert len(words) == len(old)


def test_a_delta_for_other_words_is_refused() -> None:
    old, new = made(2, 3000, 0.1, "bfloat16")
    delta = check(old, new)
    with pytest.raises(ProtocolError, match=r"a block of 3000 words with \d+ changes, for 2000 words"):
        deltas.apply(delta, old[:2000].copy())
    with pytest.raises(ProtocolError, match=rf"{len(delta) + 1} bytes, its blocks have {len(delta)}"):
        deltas.apply(delta + b"x", old.copy())


# --- sizes


def fractions(parameters: list[torch.Tensor], lr: float, steps: int, gradients) -> list[float]:
    """Bytes of the delta of each step of AdamW, as a fraction of those of bfloat16 weights."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)

    def cast() -> np.ndarray:
        return torch.cat([p.detach().flatten() for p in parameters]).to(torch.bfloat16).view(torch.uint16).numpy()

    found, old = [], cast()
    for _ in range(steps):
        gradients()
        optimizer.step()
        new = cast()
        found.append(len(check(old, new)) / new.nbytes)
        old = new
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deltas_of_a_large_model_have_few_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """100 M parameters, a part at a time: AdamW treats each one alone."""
    parts, size, steps = 10, 10_000_000, 6
    generator = torch.Generator().manual_seed(0)
    sums = np.zeros(steps)
    for _ in range(parts):
        weights = torch.nn.Parameter(torch.randn(size, generator=generator) * 0.02)
        signal = torch.randn(size, generator=generator) * 0.3

        def draw(weights: torch.nn.Parameter = weights, signal: torch.Tensor = signal) -> None:
            weights.grad = signal + torch.randn(size, generator=generator)

        sums += fractions([weights], 1e-6, steps, draw)
    found = sums / parts
    with capsys.disabled():
        print(f"\n100 M parameters, lr 1e-6, delta / full bytes by step: {' '.join(f'{one:.4f}' for one in found)}")
    assert max(found) <= 0.03


@pytest.mark.slow
def test_deltas_of_the_demos_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, lines = tiny_model.make_tokenizer(), []
    torch.manual_seed(0)
    trained = tiny_model.make_model()
    tiny_model.warm_start(trained, tokenizer, steps=60, seed=0)
    prompts, answers, *_ = tiny_model._encode(tokenizer)
    for lr in (1e-6, 1e-5, 2e-4):
        model = tiny_model.make_model()
        model.load_state_dict(trained.state_dict())
        parameters = list(model.parameters())

        def draw(model=model, parameters=parameters) -> None:
            rows = torch.randint(len(prompts), (256,))
            model.zero_grad()
            (-tiny_model._answer_logprobs(model, prompts[rows], answers[rows]).mean()).backward()
            assert all(parameter.grad is not None for parameter in parameters)

        found = fractions(parameters, lr, 10, draw)
        lines.append(f"{lr:g}: {' '.join(f'{one:.4f}' for one in found)}")
        assert lr > 1e-6 or max(found) <= 0.03
    with capsys.disabled():
        print("\nthe demo's model, delta / full bytes by step, by lr", *lines, sep="\n  ")
