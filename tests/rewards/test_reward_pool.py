"""Reward workers: real processes, with functions that hang, crash and return nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.rewards.workers import RewardPool, Scored, check_rewards
from asyncrl.types import Prompt

TOKENS = ["<pad>", "<eos>", "<unk>", *"0123456789+="]

FUNCTIONS = """
    import os, sys, time
    def score(solution_str):
        if solution_str == "0":
            time.sleep(1000)
        if solution_str == "1":
            os._exit(3)
        if solution_str == "2":
            raise SystemExit("enough")
        if solution_str == "3":
            raise KeyError("three")
        return {"score": float(solution_str), "twice": 2 * float(solution_str)}

    def is_light(solution_str):
        heavy = {"torch", "vllm", "transformers", "numpy"} & set(sys.modules)
        return float(not heavy and os.environ["OMP_NUM_THREADS"] == "1")

    def of_prompt(completions, prompts, answer, level, **columns):
        return [float(p == "12+07=" and a == "19") + l for p, a, l in zip(prompts, answer, level)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    return tmp_path


@pytest.fixture
def make_pool(folder: Path) -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(rewards: str | dict[str, str], *, timeout_s: float = 20.0, workers: int = 1, **data: str) -> RewardPool:
        pools.append(RewardPool(make_config(rewards, timeout_s, workers, **data), tokenizer_path=str(folder)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(TOKENS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def make_config(rewards: str | dict[str, str], timeout_s: float, workers: int, **data: str) -> Config:
    generator = {"reward_timeout_s": timeout_s, "reward_workers": workers}
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d", **data}, "rewards": rewards, "generator": generator}
    )


def tokens(text: str) -> list[int]:
    return [*(TOKENS.index(character) for character in text), TOKENS.index("<eos>")]


def prompt(source: str = "sums", **extra: object) -> Prompt:
    return Prompt(0, np.array(tokens("12+07=")[:-1], dtype=np.int32), "19", source, extra)


def gather(pool: RewardPool, count: int, *, within_s: float = 60.0) -> dict[object, Scored]:
    found: dict[object, Scored] = {}
    deadline = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} groups scored"
        for scored in pool.collect():
            assert scored.key not in found
            found[scored.key] = scored
        time.sleep(0.005)
    assert pool.pending == 0
    return found


def test_groups_come_back_with_rewards_parts_and_their_key(make_pool) -> None:
    pool = make_pool("mine.py:score", workers=2)
    for key in range(300):
        pool.submit(key, [tokens(str(4 + key)), tokens("7")], prompt())
    assert pool.pending == 300
    found = gather(pool, 300)
    for key, scored in found.items():
        assert scored == Scored(key, [4.0 + key, 7.0], [{"twice": 2 * (4.0 + key)}, {"twice": 14.0}], ["", ""])


def test_special_tokens_are_no_part_of_the_text(make_pool) -> None:
    pool = make_pool("exact")
    pool.submit("k", [tokens("19"), tokens("1")[:-1] + tokens("9"), [*tokens("19"), 0, 0]], prompt())
    assert gather(pool, 1)["k"].rewards == [1.0, 1.0, 1.0]


def test_columns_of_the_data_reach_a_group_reward(make_pool) -> None:
    pool = make_pool("mine.py:of_prompt", ground_truth_column="reward_model.answer")
    pool.submit("k", [tokens("1"), tokens("2")], prompt(level=4))
    assert gather(pool, 1)["k"] == Scored("k", [5.0, 5.0], [{}, {}], ["", ""])


def test_workers_are_light_and_use_one_thread(make_pool) -> None:
    pool = make_pool("mine.py:is_light")
    pool.submit("k", [tokens("1")], prompt())
    assert gather(pool, 1)["k"].rewards == [1.0]


def test_only_the_group_that_hangs_is_given_up(make_pool) -> None:
    pool = make_pool("mine.py:score", timeout_s=1.0)
    for key in range(40):
        pool.submit(key, [tokens("0" if key == 25 else "5"), tokens("6")], prompt())
    found = gather(pool, 40)
    text = "reward mine.py:score on data source 'sums': took longer than generator.reward_timeout_s = 1 s"
    assert found.pop(25) == Scored(25, [0.0, 0.0], [{}, {}], [text, text])
    assert all(scored.rewards == [5.0, 6.0] for scored in found.values())


@pytest.mark.parametrize(
    ("text", "cause"), [("1", "ended its worker process (exit code 3)"), ("2", "raised SystemExit: enough")]
)
def test_only_the_group_that_ends_its_process_is_given_up(make_pool, text: str, cause: str) -> None:
    pool = make_pool("mine.py:score")
    for key in range(40):
        pool.submit(key, [tokens(text if key == 25 else "5")], prompt())
    found = gather(pool, 40)
    assert found.pop(25).errors == [f"reward mine.py:score on data source 'sums': {cause}"]
    assert all(scored.rewards == [5.0] for scored in found.values())


def test_an_exception_fails_one_completion(make_pool) -> None:
    pool = make_pool("mine.py:score")
    pool.submit("k", [tokens("3"), tokens("5")], prompt())
    scored = gather(pool, 1)["k"]
    assert scored.rewards == [0.0, 5.0]
    assert scored.errors == ["reward mine.py:score on data source 'sums': raised KeyError: 'three'", ""]


def test_unknown_data_source_fails_the_group(make_pool) -> None:
    pool = make_pool({"words": "exact"})
    pool.submit("k", [tokens("19")], prompt(source="sums"))
    assert gather(pool, 1)["k"].errors == [
        "no reward for data source 'sums': rewards has words; add it, or \"default\""
    ]


def test_workers_killed_while_idle_are_replaced(make_pool) -> None:
    pool = make_pool("exact", workers=2)
    pool.submit("before", [tokens("19")], prompt())
    gather(pool, 1)
    for worker in reward_workers(os.getpid()):
        worker.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    pool.submit("after", [tokens("19")], prompt())
    assert gather(pool, 1)["after"].rewards == [1.0]


def test_functions_that_cannot_be_loaded_fail_groups_but_not_the_pool(make_pool) -> None:
    pool = make_pool("mine.py:missing")
    pool.submit("k", [tokens("19")], prompt())
    assert "mine.py has no function 'missing'" in gather(pool, 1)["k"].errors[0]


def test_close_ends_a_hanging_worker(make_pool) -> None:
    pool = make_pool("mine.py:score", timeout_s=1000.0)
    pool.submit("k", [tokens("0")], prompt())
    pool.collect()
    time.sleep(1.0)
    workers = reward_workers(os.getpid())
    pool.close()
    assert workers and not any(worker.is_running() for worker in workers)


PARENT = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_reward_pool import make_config, prompt, tokens, gather
    from asyncrl.rewards.workers import RewardPool

    if __name__ == "__main__":
        pool = RewardPool(make_config("mine.py:score", 1000.0, 2), tokenizer_path=".")
        pool.submit(0, [tokens("5")], prompt())
        gather(pool, 1)
        pool.submit(1, [tokens("0")], prompt())
        pool.collect()
        print("ready", flush=True)
        time.sleep(1000)
"""


def test_workers_end_with_a_killed_parent(folder: Path) -> None:
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT.format(tests=str(Path(__file__).parent))))
    with subprocess.Popen([sys.executable, script], cwd=folder, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
            time.sleep(0.5)
            workers = reward_workers(parent.pid)
        finally:
            parent.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


def reward_workers(parent: int) -> list[psutil.Process]:
    children = psutil.Process(parent).children()
    return [child for child in children if any("spawn_main" in part for part in child.cmdline())]


def test_check_rewards_loads_every_function(folder: Path) -> None:
    check_rewards(make_config({"a": "exact", "b": "mine.py:score"}, 1.0, 1))
    with pytest.raises(ConfigError, match="did you mean score"):
        check_rewards(make_config({"a": "exact", "b": "mine.py:scor"}, 1.0, 1))
