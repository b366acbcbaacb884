"""Trains two steps of each case on the device that this process sees, and writes weights, gradients and metrics, or the
error of the case.

python train_steps.py PORT MODEL OUT
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from safetensors.torch import save_file
from worlds import CRITIC, LORA, endpoints, make_config, make_groups, record

from asyncrl.learner.distributed import process_group

CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"learner": {"zero_stage": stage}} for stage in range(4)},
    **{f"bfloat16-zero{n}": {"learner": {"zero_stage": n}, "model": {"dtype": "bfloat16"}} for n in (1, 2, 3)},
    "checkpointing": {"learner": {"zero_stage": 3, "gradient_checkpointing": True}, "model": {"dtype": "bfloat16"}},
    "offload-zero2": {"learner": {"zero_stage": 2, "offload": "optimizer"}},
    "offload-zero3": {"learner": {"zero_stage": 3, "offload": "all"}},
    "bfloat16-offload3": {"learner": {"zero_stage": 3, "offload": "all"}, "model": {"dtype": "bfloat16"}},
    "lora-zero2": {"learner": {"zero_stage": 2, "lora": LORA}},
    "lora-zero3": {"learner": {"zero_stage": 3, "lora": LORA}},
    "critic": {**CRITIC, "learner": {"zero_stage": 0}},
    "gspo": {"algorithm": {"loss": "gspo"}},
    "cispo": {"algorithm": {"loss": "cispo"}},
}


def main() -> None:
    port, model, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    with process_group(endpoints(port), 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        for case, sections in CASES.items():
            try:
                tensors, scalars = record(make_config(model, **sections), ranks, make_groups())
            except Exception:  # it is the result of this case, and the others continue
                (out / f"{case}.error").write_text(traceback.format_exc())
                continue
            save_file(tensors, out / f"{case}.safetensors")
            (out / f"{case}.json").write_text(json.dumps(scalars | {"device": str(ranks.device)}))


if __name__ == "__main__":
    main()
