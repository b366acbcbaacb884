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

from asyncrl.util.processes import end_with_parent
from benchmarks import demo, frame
from benchmarks.frame import Result, Row, moves, number, origin_here, read_results, run_row, table, write_results

ROWS = (
    "replay_queue",
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="asyncrl bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="ROW",
        help=f"Rows to measure, of {', '.join(ROWS)}. Default: all; with --quick, all except long ones.",
    )
    parser.add_argument("--quick", action="store_true", help="Measure one short round of each row, in three minutes.")
    parser.add_argument("--rounds", type=int, help="Rounds of each row. Default: 3 or 5, by row; 1 with --quick.")
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
    parser.add_argument("--show", type=Path, metavar="FILE", help="Only print the table of a file that --json wrote.")
    parser.add_argument("--child", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Ends what a row has started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    if options.child:
        end_with_parent(os.getppid(), signal.SIGTERM)
        demo.OVERRIDES[:] = options.set
        return frame.measure_here(load(options.child), rounds=options.rounds, quick=options.quick)
    rows = {name: load(name) for name in ROWS}
    if options.show:
        print("\n".join(table(read_results(options.show, quick=options.quick), rows, all_figures=False)))
        return 0
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    if long := [name for name in options.names if options.quick and rows[name].long]:
        parser.error(f"{', '.join(long)} takes minutes and has no quick form; leave out --quick")
    names = options.names or [name for name in ROWS if not (options.quick and rows[name].long)]
    return bench({name: rows[name] for name in names}, options)


def load(name: str) -> Row:
    return importlib.import_module(f"benchmarks.{name}").ROW


def bench(rows: dict[str, Row], options: argparse.Namespace) -> int:
    quick, out, origin = options.quick, options.json, origin_here()
    before = read_results(options.against, quick=quick) if options.against else None
    results = read_results(out, quick=quick) if out is not None and out.exists() else {}
    for name, row in rows.items():
        print(f"{name}: {row.what}, against {row.against}", flush=True)
        results[name] = Result(name, origin=origin, overrides=options.set)
        run_row(
            row,
            results[name],
            rounds=options.rounds or (1 if quick else row.rounds),
            quick=quick,
            on_round=lambda figures: print(
                "  " + ", ".join(f"{figure} {number(value)}" for figure, value in figures.items()), flush=True
            ),
        )
        if results[name].reason:
            print(f"  {'cut short' if results[name].rounds else 'cannot run'}: {results[name].reason}", flush=True)
        if out is not None:
            write_results(out, results, quick=quick)
    print("\n".join(table(results, rows, all_figures=True)))
    num_worse = 0
    if before is not None:
        lines, num_worse = moves(results, before, rows)
        print("\n".join(lines if num_worse else [*lines, "no figure is worse than before"]))
    return 1 if num_worse or any(results[name].reason for name in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
