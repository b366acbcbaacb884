"""`python -m benchmarks.models [--engine ENGINE] [FAMILY ...]`: a table of the model families that the learner can
pack, and for which the engine computes the same log-probs."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers

from asyncrl.errors import ConfigError
from asyncrl.learner.model.checks import check_packing
from benchmarks.agreement import EngineError, compare, load, sample_apart
from benchmarks.families import FAMILIES, save_family


def main() -> None:
    """Prints each row of the table after its measurement, for all families or for those that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models")
    parser.add_argument("--engine", default="vllm", help="generator.engine")
    parser.add_argument("families", nargs="*")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| model type | packed rows | engine = learner | float32, start | float32, swapped | bfloat16, mean |")
    print("|---|---|---|---|---|---|")
    for name in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_family(name, Path(folder))
            packed = packs(Path(folder))
            cells = engine_cells(Path(folder), arguments.engine) if packed == "yes" else ["", "", "", ""]
            print(f"| {name} | {packed} | {' | '.join(cells)} |", flush=True)


def packs(folder: Path) -> str:
    """Returns the cell on whether the learner accepts the model, or why not."""
    try:
        network = load(folder, "float32")
        with torch.no_grad():
            check_packing(network.model, network, torch.device("cpu"), "model.path")
    except ConfigError as error:
        text = str(error)
        found = re.search(r"differ by \S+|models with [^:]* cannot|\((\w+Error)", text)
        return f"no: {found.group(0).strip('(') if found else text}"
    return "yes"


def engine_cells(folder: Path, engine: str) -> list[str]:
    """Returns the cells on whether engine and learner agree, or why not, and on the differences in both dtypes."""
    try:
        sampler = partial(sample_apart, engine_name=engine)
        found = {dtype: compare(folder, dtype, sampler) for dtype in ("float32", "bfloat16")}
    except EngineError as error:
        return [f"no: {error}", "", "", ""]
    agrees = all(comparison.agrees(dtype) for dtype, comparison in found.items())
    single = found["float32"]
    return ["yes" if agrees else "no", f"{single.start:.0e}", f"{single.swapped:.0e}", f"{found['bfloat16'].mean:.3f}"]


if __name__ == "__main__":
    main()
