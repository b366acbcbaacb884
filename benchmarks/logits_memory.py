"""Measures the peak memory of log-probs of target tokens, forward and backward, with a vocabulary of 150 thousand."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.frame import Limit, Round, Row, one_thread, output_of

VOCABULARY, HIDDEN = 150_000, 64
TOKENS, QUICK_TOKENS = 4096, 2048
SIDES = ("ours", "plain")
SAME = 1e-5
"""Maximum difference of log-probs and gradients; a larger one makes the row fail."""


def measure(quick: bool) -> Iterator[Round]:
    tokens = QUICK_TOKENS if quick else TOKENS
    while True:
        with tempfile.TemporaryDirectory() as folder:
            files = {side: Path(folder) / f"{side}.npz" for side in SIDES}
            spent = {side: _in_process(side, tokens, files[side]) for side in SIDES}
            ours, plain = (np.load(files[side]) for side in SIDES)
            difference = max(float(np.abs(ours[name] - plain[name]).max()) for name in ours.files)
        if not difference <= SAME:
            raise RuntimeError(f"log-probs or gradients differ by {difference:g} from those over all logits")
        (peak, seconds), (plain_peak, plain_seconds) = (spent[side] for side in SIDES)
        yield {
            "peak memory": peak / plain_peak,
            "largest difference": difference,
            "time": seconds / plain_seconds,
            "ours MiB": peak / 2**20,
            "plain MiB": plain_peak / 2**20,
        }


def _in_process(side: str, tokens: int, out: Path) -> tuple[float, float]:
    """Returns the peak memory above the initial memory of the process in bytes, and the seconds."""
    command = [sys.executable, "-m", "benchmarks.logits_memory", side, str(tokens), str(out)]
    printed = output_of(side, command, environment=one_thread(), timeout_s=600)
    peak_bytes, seconds = printed.split()[-2:]
    return float(peak_bytes), float(seconds)


def run_side(side: str, tokens: int, out: Path) -> None:
    """Scores random hidden states, writes log-probs and gradients to a file, and prints the peak and the seconds."""
    import torch
    from torch import nn

    from asyncrl.learner.model.logprob_head import LogprobHead

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    output = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    slopes = torch.randn(tokens, device=device)
    _forget_peak(device)
    before, started_s = _peak_bytes(device), time.perf_counter()
    if side == "ours":
        logprobs, _ = LogprobHead(output, temperature=1.0)(hidden, targets)
    else:
        logprobs = torch.log_softmax(output(hidden), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (logprobs @ slopes).backward()
    peak_bytes = _peak_bytes(device)  # synchronizes with the GPU
    print(peak_bytes - before, time.perf_counter() - started_s)
    assert hidden.grad is not None and output.weight.grad is not None
    values = {"logprobs": logprobs.detach(), "hidden": hidden.grad, "weight": output.weight.grad}
    np.savez(out, **{name: value.cpu().numpy() for name, value in values.items()})


def _forget_peak(device: str) -> None:
    """Resets the peak memory."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: str) -> int:
    """Returns the peak size of tensors in GPU memory; on a CPU, the peak resident memory of the process."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


ROW = Row(
    what="peak memory of log-probs and their gradients at a vocabulary of 150k",
    against="log-softmax over all logits",
    limits={"peak memory": Limit(0.2, at_most=True), "largest difference": Limit(SAME, at_most=True)},
    measure=measure,
    long=True,
)

if __name__ == "__main__":
    run_side(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
