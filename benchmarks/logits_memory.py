"""Peak memory of the log-probs of chosen tokens, forward and backward, at a vocabulary of 150 thousand."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.frame import Limit, Round, Row, one_thread

VOCABULARY, HIDDEN = 150_000, 64
TOKENS, QUICK_TOKENS = 4096, 2048
SIDES = ("ours", "plain")


def measure(quick: bool) -> Iterator[Round]:
    tokens = QUICK_TOKENS if quick else TOKENS
    while True:
        with tempfile.TemporaryDirectory() as folder:
            files = {side: Path(folder) / f"{side}.npz" for side in SIDES}
            peaks = {side: _in_process(side, tokens, files[side]) for side in SIDES}
            ours, plain = (np.load(files[side]) for side in SIDES)
            yield {
                "peak memory": peaks["ours"] / peaks["plain"],
                "largest difference": max(float(np.abs(ours[name] - plain[name]).max()) for name in ours.files),
                "ours MiB": peaks["ours"] / 2**20,
                "plain MiB": peaks["plain"] / 2**20,
            }


def _in_process(side: str, tokens: int, out: Path) -> int:
    """Bytes at the peak above what the process had before."""
    command = [sys.executable, "-m", "benchmarks.logits_memory", side, str(tokens), str(out)]
    done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{side} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def run_side(side: str, tokens: int, out: Path) -> None:
    """Scores random hidden states, and writes log-probs and gradients to a file; prints the peak."""
    import torch
    from torch import nn

    from asyncrl.learner.policy import LogprobHead

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    output = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    hidden = torch.randn(tokens, HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    slopes = torch.randn(tokens, device=device)
    before = _peak_bytes(device)
    if side == "ours":
        logprobs, _ = LogprobHead(output, temperature=1.0)(hidden, targets)
    else:
        logprobs = torch.log_softmax(output(hidden), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (logprobs @ slopes).backward()
    print(_peak_bytes(device) - before)
    assert hidden.grad is not None and output.weight.grad is not None
    values = {"logprobs": logprobs.detach(), "hidden": hidden.grad, "weight": output.weight.grad}
    np.savez(out, **{name: value.cpu().numpy() for name, value in values.items()})


def _peak_bytes(device: str) -> int:
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


ROW = Row(
    what="peak memory of log-probs and their gradients at a vocabulary of 150k",
    against="log-softmax over all logits",
    limits={"peak memory": Limit(0.2, at_most=True), "largest difference": Limit(1e-5, at_most=True)},
    measure=measure,
)

if __name__ == "__main__":
    run_side(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
