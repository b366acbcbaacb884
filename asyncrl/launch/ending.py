"""What a run says on the console when it ends."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def show_end(console: Console, summary: dict[str, Any]) -> None:
    """Prints how the run ended."""
    style = {"finished": "green", "failed": "bold red", "stopped": "yellow"}[summary["status"]]
    attempts = f" in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
    console.print(f"[{style}]{summary['status']}[/] after {summary['wall_s']:.0f} s{attempts}", highlight=False)
    if "error" in summary:
        console.print(summary["error"], style="red", highlight=False, markup=False, soft_wrap=True)
    if summary.get("reward_first") is not None:
        console.print("\n".join(_lines(summary)), highlight=False, soft_wrap=True)


def _lines(summary: dict[str, Any]) -> list[str]:
    ledger, staleness, sync = summary["ledger"], summary["staleness"], summary["weight_sync"]
    refunded = ", ".join(f"{n} refunded ({reason})" for reason, n in ledger["refunded"].items())
    lines = [
        f"reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} in {summary['steps']} steps",
        f"throughput {summary['tokens_per_s']:,.0f} trained tokens/s, {summary['tokens_trained']:,} in all",
        f"staleness  mean {staleness['mean']:.2f}, max {staleness['max']} (limit {staleness['limit']})",
        f"weights    {sync['count']} broadcasts, engine stalled {sync['stall_ms_mean']:.1f} ms "
        f"(max {sync['stall_ms_max']:.1f})",
        f"ledger     {ledger['leased']} groups = {ledger['trained']} trained + "
        + (f"{refunded} + " if refunded else "")
        + f"{ledger['in_flight']} in flight",
        f"bottleneck {summary['bottleneck']}",
    ]
    if evaluations := summary.get("eval"):
        first, last = evaluations[0], evaluations[-1]
        versions = f"(version {first['version']} -> {last['version']})"
        lines.insert(1, f"eval       reward {first['reward']:.3f} -> {last['reward']:.3f} {versions}")
    for dropped in summary.get("eval_dropped", []):
        lines.append(f"eval       version {dropped['version']} dropped: {dropped['reason']}")
    if skipped := summary.get("skipped_updates"):
        lines.append(f"skipped    {skipped} updates whose loss or gradient was not finite; see logs/learner-0.jsonl")
    if any(summary["restarts"].values()):
        lines.append("restarts   " + ", ".join(f"{n} of {role}" for role, n in summary["restarts"].items() if n))
    lines += [f"bias       {sentence}" for sentence in summary["bias"]]
    if summary["skipped_rows"]:
        lines.append(f"skipped    {summary['skipped_rows']} prompts that are too long for the model's window")
    return lines
