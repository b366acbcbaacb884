"""Measures the reward on the demo after the same steps, synchronous and at a forced staleness, for several losses.

Every loss is trained once synchronously and once with tokens that are `--staleness` steps old, with the same seed and
number of steps, in sequence. Policies are compared by the evaluation of their last version on all prompts.

    python benchmarks/staleness.py --staleness 8 --steps 200
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOSSES: dict[str, list[str]] = {
    "decoupled_ppo": ["algorithm.loss=decoupled_ppo"],
    "reinforce_is": ["algorithm.loss=reinforce_is"],
    "cispo": ["algorithm.loss=cispo", "algorithm.loss_options={clip_low: 1.0, clip_high: 4.0}"],
    "m2po": ["algorithm.loss=m2po"],
    "ppo_clip (around the stale policy)": ["algorithm.loss=ppo_clip"],
    "no correction": ["algorithm.loss=decoupled_ppo", "algorithm.correction={mode: clip, low: 1.0, high: 1.0}"],
}
"""Overrides by loss. The last loss is PPO around the learner's own policy, as for on-policy data."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), help="names as printed")
    parser.add_argument("overrides", nargs="*", help="section.key=value for all runs")
    arguments = parser.parse_args()
    rows: list[tuple[str, float, float, float]] = []
    for name in arguments.losses:
        synchronous = run(name, 0, arguments)
        stale = run(name, arguments.staleness, arguments)
        rows.append((name, reached(synchronous), reached(stale), stale["staleness"]["mean"]))
        print(describe(rows[-1], arguments.staleness), flush=True)
    print("\n| loss | synchronous | stale | ratio | mean staleness |\n|---|---|---|---|---|")
    for name, first, second, staleness in rows:
        print(f"| {name} | {first:.3f} | {second:.3f} | {second / first:.2f} | {staleness:.1f} |")


def run(name: str, staleness: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a training and returns its summary."""
    label = f"staleness-{name.split()[0]}-{len(name.split())}-{staleness}"
    command = [
        sys.executable, "-m", "asyncrl.cli", "launch", "--run", label, "--steps", str(arguments.steps),
        "--max-staleness", str(staleness), f"replay.min_staleness={staleness}", "data.eval=demo/arithmetic.parquet",
        *LOSSES[name], *arguments.overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((Path("runs") / label / "summary.json").read_text())


def reached(summary: dict[str, Any]) -> float:
    return float(summary["eval"][-1]["reward"])


def describe(row: tuple[str, float, float, float], staleness: int) -> str:
    name, first, second, mean = row
    return f"{name}: {first:.3f} at staleness 0, {second:.3f} at {staleness} (mean {mean:.1f}): {second / first:.2f}"


if __name__ == "__main__":
    main()
