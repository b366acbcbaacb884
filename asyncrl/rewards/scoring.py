"""What runs inside a reward worker: a process with the user's functions, a tokenizer, and nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.rewards.load import CompletedGroup, RewardTable, Score

PackedGroup = tuple[list[list[int]], bytes, str, str, dict[str, Any]]
"""Action tokens of each completion, prompt tokens as int32 bytes, ground truth, data source, extra_info."""

_Decoder = Callable[[list[list[int]]], list[str]]
_Scorer = Callable[[PackedGroup], list[Score]]
_scorer: _Scorer | None = None


def start_worker(
    parent: int, rewards: str | dict[str, str], ground_truth_name: str, tokenizer_path: str, trust_remote_code: bool
) -> None:
    """Makes this process a reward worker: it ends with `parent`, uses one thread, and has the functions loaded.

    Never raises: a function that cannot be loaded is the error of every group it is asked to score.
    """
    global _scorer
    _end_with(parent)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        decode = _load_decoder(tokenizer_path, trust_remote_code)
        _scorer = _make_scorer(RewardTable(rewards), ground_truth_name, decode)
    except ConfigError as error:
        message = str(error)
        _scorer = lambda group: [(0.0, {}, message)] * len(group[0])  # noqa: E731


def score_groups(groups: list[PackedGroup]) -> tuple[float, list[list[Score]]]:
    """Seconds spent, and the scores of every group."""
    assert _scorer is not None  # start_worker ran in this process
    started = time.perf_counter()
    scores = [_scorer(group) for group in groups]
    return time.perf_counter() - started, scores


def _make_scorer(table: RewardTable, ground_truth_name: str, decode: _Decoder) -> _Scorer:
    def score(packed: PackedGroup) -> list[Score]:
        completion_ids, prompt, ground_truth, data_source, extra_info = packed
        prompt_text, *completions = decode([memoryview(prompt).cast("i").tolist(), *completion_ids])
        about = (ground_truth, data_source, extra_info, ground_truth_name)
        return table(CompletedGroup(prompt_text, completions, completion_ids, *about))

    return score


def _load_decoder(path: str, trust_remote_code: bool) -> _Decoder:
    """Token ids to text, special tokens left out."""
    file = Path(path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: tokenizer.decode_batch(ids, skip_special_tokens=True)
    # A tokenizer without that file exists in Python only; transformers takes seconds and memory in every worker.
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    return lambda ids: [slow.decode(one, skip_special_tokens=True) for one in ids]


def _end_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, however hard the parent was killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
