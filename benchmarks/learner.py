"""Measures trained tokens/s of a learner step on a packed, long-tailed batch."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.frame import CannotRun, Limit, Round, Row
from benchmarks.learner_batch import GROUPS, WAYS, lengths, make_model
from benchmarks.worker import Worker

QUICK_GROUPS = 2


def measure(quick: bool) -> Iterator[Round]:
    if importlib.util.find_spec("trl") is None:
        raise CannotRun("TRL is not installed: pip install -e .[bench]")
    groups = QUICK_GROUPS if quick else GROUPS
    tokens = float(lengths(groups).sum())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = sorted(os.sched_getaffinity(0))
        sides = {
            way: Worker("benchmarks.learner_batch", way, folder / "model", groups, cores=cores, stack=stack)
            for way in WAYS
            if not (quick and way == "sorted")
        }
        make_model(folder / "model")
        for side in sides.values():
            side.tell("the model is there")
            side.tell("a step to warm up")
        for side in sides.values():
            side.answer()
        while True:
            seconds: dict[str, float] = {}
            for way, side in sides.items():
                side.tell("a step")
                seconds[way] = side.answer()
            ours_s = seconds["ours"]
            yield {
                **{f"of {way}": taken_s / ours_s for way, taken_s in seconds.items() if way != "ours"},
                **{f"{way} tokens/s": tokens / taken_s for way, taken_s in seconds.items()},
            }


ROW = Row(
    what="trained tokens/s of a learner step on a packed, long-tailed batch",
    against="the same model in a padded loop of Hugging Face's, and in TRL's GRPOTrainer",
    limits={"of padded": Limit(2.0), "of TRL": Limit(1.5)},
    measure=measure,
)
