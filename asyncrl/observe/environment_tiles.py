"""The tiles of a run with an environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.types import EPISODE_ENDS


def environment_tiles(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str, str]]:
    """The title, value, note and metric of each tile, by the metrics of the last step; none without an environment."""
    if "environment/turns" not in metrics:
        return
    note = (
        f"turns of an episode, mean of the last step; {metrics['environment/observation_tokens']:.1f} tokens observed"
    )
    yield "How long are episodes?", f"{metrics['environment/turns']:.2f}", note, "environment/turns"
    p50, p95 = (metrics[f"environment/wait_s/{name}"] for name in ("p50", "p95"))
    note = f"wait of an episode for its environment, median; 95 % wait at most {p95:.2g} s"
    yield "How slow is the environment?", f"{p50:.2g} s", note, "environment/wait_s/p50"
    ends = {end: metrics[f"environment/ended_{end}"] for end in EPISODE_ENDS}
    failed = sum(value for name, value in metrics.items() if name.startswith("environment/failed/"))
    note = ", ".join(f"{end} {fraction:.0%}" for end, fraction in ends.items()) + f"; {failed:.0%} of all failed"
    yield "How do episodes end?", f"done {ends['done']:.0%}", note, "environment/ended_done"
