"""Trains two steps on the GPU and prints the peak of torch's memory in bytes.

python peak_memory.py PORT CONFIG; the config is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import torch
from test_learner_memory import SIZES
from worlds import endpoints, make_trainer, pack_groups, single_groups

from asyncrl.config.config import Config
from asyncrl.learner.distributed import process_group


def main() -> None:
    config = Config.model_validate_json(sys.argv[2])
    with process_group(endpoints(int(sys.argv[1])), 0, 1, start_timeout_s=60, timeout_s=60) as ranks:
        trainer = make_trainer(config, ranks)
        groups = single_groups([250] * 32, SIZES["vocab_size"])
        for step in (1, 2):
            trainer.train(pack_groups(config, groups), step=step)
    print(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
