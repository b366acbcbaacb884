"""Trains on this CPU and writes the peak of the memory above that of a tiny model, in bytes, to OUT/peak-RANK.

python memory_steps.py RANK PORT CONFIG OUT
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from worlds import VOCABULARY, endpoints, make_trainer, pack_groups, single_groups

from asyncrl.config.config import Config
from asyncrl.learner.distributed import Ranks, process_group
from asyncrl.learner.model.memory_trace import typical_lengths
from tests.helpers.memory_peak import Peak, anonymous_bytes, keep_freed_memory_away

TINY = "tiny"
"""Folder of the tiny model in that of the model."""


def train(config: Config, ranks: Ranks, lengths: list[int], vocabulary: int) -> None:
    """Trains two steps: in the second the optimizer has its states."""
    trainer = make_trainer(config, ranks)
    for step in (1, 2):
        trainer.train(pack_groups(config, single_groups(lengths, vocabulary)), step=step)


def connected(port: int, rank: int, config: Config) -> AbstractContextManager[Ranks]:
    return process_group(endpoints(port), rank, config.launch.learners, start_timeout_s=100, timeout_s=100)


def main() -> None:
    keep_freed_memory_away()
    rank, port, config = int(sys.argv[1]), int(sys.argv[2]), Config.model_validate_json(Path(sys.argv[3]).read_text())
    longest = config.generator.max_new_tokens
    lengths = typical_lengths(config.learner.tokens_per_microbatch, longest) * 2
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"]
    peak = Peak()
    tiny = config.model.model_copy(update={"path": str(Path(config.model.path) / TINY)})
    with connected(port, rank, config) as ranks:
        train(config.model_copy(update={"model": tiny}), ranks, [20, 12, 8], VOCABULARY)
        gc.collect()
        keep_freed_memory_away()
        peak.reset()
        before = anonymous_bytes()
        train(config, ranks, lengths, vocabulary)
        (Path(sys.argv[4]) / f"peak-{rank}").write_text(str(peak.num_bytes - before))


if __name__ == "__main__":
    main()
