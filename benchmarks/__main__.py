"""Measures the rows of the bench and reports which of them reach their limits.

Exit code 0: every row was measured; 1: a row could not run, or with --against a row got worse; 2: unknown row.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.util.processes import end_with_parent
from benchmarks import demo, frame
from benchmarks.frame import Result, Row, run_row
from benchmarks.results import Results, in_words, markdown, origin_here, print_moves, print_table

ROWS = (
    "queue_cost",
    "journal",
    "weights",
    "learner",
    "overlap",
    "environments",
    "generator",
    "gateway",
    "goodput",
    "end_to_end",
    "start",
)
"""Modules of this folder with a ROW, in the order of measurement."""
ROUNDS, QUICK_ROUNDS = 5, 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="asyncrl bench", description=__doc__)
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help=f"Rows to measure, of {', '.join(ROWS)}. Default: all; with --quick, all except long ones.",
    )
    parser.add_argument("--quick", action="store_true", help="Measure one short round of each row, in three minutes.")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"Rounds of each row. Default: {ROUNDS} of most, 3 of rows whose rounds have a seed each, {QUICK_ROUNDS} "
        "with --quick.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Override of the config of every launch that the rows make, such as replay.zero_variance=drop.",
    )
    parser.add_argument(
        "--json", type=Path, help="File to write the results to. Its rows that are not measured again are kept."
    )
    parser.add_argument("--against", type=Path, help="Results to compare with: a file that --json wrote.")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="Only print results that --json wrote, as a Markdown table."
    )
    parser.add_argument("--child", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # ends what a row has started, as Ctrl-C does
    if options.child:
        end_with_parent(os.getppid(), signal.SIGTERM)
        demo.OVERRIDES[:] = options.set
        return frame.child(load(options.child), rounds=options.rounds, quick=options.quick)
    if options.markdown:
        print("\n".join(markdown(Results.read(options.markdown), {name: load(name) for name in ROWS})))
        return 0
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    before = Results.read(options.against) if options.against else None
    names = options.rows or [name for name in ROWS if not (options.quick and load(name).long)]
    code = bench(names, options, before=before)
    left_out = [name for name in ROWS if not options.rows and name not in names]
    if left_out:
        print(f"not part of a quick bench unless named: {', '.join(left_out)}")
    return code


def load(name: str) -> Row:
    return importlib.import_module(f"benchmarks.{name}").ROW


def bench(names: list[str], options: argparse.Namespace, *, before: Results | None) -> int:
    console, rows, out = Console(), {name: load(name) for name in names}, options.json
    results, origin = Results(options.quick), origin_here()
    if out is not None and out.exists():
        results.keep(Results.read(out), out)
    for name, row in rows.items():
        console.print(f"[bold]{name}[/]: {row.what}, against {row.against}")
        result = run_row(
            name,
            row,
            rounds=options.rounds or (QUICK_ROUNDS if options.quick else row.rounds or ROUNDS),
            quick=options.quick,
            overrides=options.set,
            on_round=lambda one: console.print(f"  {in_words(one)}"),
        )
        result.origin = origin
        results.rows[name] = result
        if result.reason:
            console.print(f"  {failure(result, row)}: {result.reason}", style="red", markup=False)
        if out is not None:
            results.write(out)
    print_table(results, rows, console)
    behind = print_moves(results, before, rows, console) if before is not None else 0
    return 1 if behind or any(results.rows[name].reason for name in names) else 0


def failure(result: Result, row: Row) -> str:
    if not result.rounds:
        return "cannot run"
    return "not valid" if result.exceeded(row.limits) == result.reason else "cut short"


if __name__ == "__main__":
    sys.exit(main())
