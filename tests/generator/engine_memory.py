"""Runs sequences in an engine on this CPU and writes the peak of the memory above that with a tiny engine, in bytes.

python engine_memory.py FOLDER CACHE_BYTES OUT; the tiny model is in FOLDER/tiny.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
from generator_model import small_config

from asyncrl.generator.vllm_backend.engine import VllmEngine
from tests.helpers.memory_peak import Peak, anonymous_bytes, keep_freed_memory_away

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 32


def run(folder: Path, cache_bytes: int) -> VllmEngine:
    config = small_config(
        str(folder),
        generator__max_running_groups=SEQUENCES,
        generator__group_size=1,
        generator__max_new_tokens=NEW_TOKENS,
        generator__kv_cache_bytes=cache_bytes,
    )
    engine = VllmEngine(config, seed=1)
    engine.use_own_weights(0)
    rng = np.random.default_rng(0)
    for number in range(SEQUENCES):
        engine.add(str(number), rng.integers(3, 60, PROMPT_TOKENS).tolist())
    while engine.num_running:
        engine.step()
    return engine


def main() -> None:
    keep_freed_memory_away()
    folder, cache_bytes, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    peak = Peak()
    engines = [run(folder / "tiny", 1 << 20)]
    gc.collect()
    keep_freed_memory_away()
    before = anonymous_bytes()
    peak.reset()
    engines.append(run(folder, cache_bytes))
    out.write_text(str(peak.num_bytes - before))
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
