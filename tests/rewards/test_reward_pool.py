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
from msgspec import structs

from asyncrl.errors import ConfigError
from asyncrl.generator.engine import Completion
from asyncrl.generator.groups import GroupInProgress, make_group
from asyncrl.replay.codec import pack_group
from asyncrl.replay.live_group import refund_reason
from asyncrl.rewards import pool as workers
from asyncrl.rewards.pool import RewardPool, Scored
from asyncrl.rewards.table import check_rewards
from asyncrl.types import Lease
from tests.helpers.reward_pool import gather, make_config, prompt, save_tokenizer, submit, tokens

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

    def cpu(solution_str):
        (cpu,) = os.sched_getaffinity(0)
        return float(cpu)

    def of_prompt(completions, prompts, answer, level, **columns):
        return [float(p == "12+07=" and a == "19") + l for p, a, l in zip(prompts, answer, level)]

    def of_markers(completions, prompts, **columns):
        return [float("<eos>" in prompt) for prompt in prompts]

    def judge(solution_str):
        with open("calls", "a") as file:
            file.write(solution_str)
        if solution_str == "5":
            time.sleep(2.1)
        if solution_str in "35":
            raise ConnectionError("no judge")
        return 1.0
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

    def make(
        rewards: object,
        *,
        timeout_s: float = 20.0,
        num_workers: int = 1,
        options: object = None,
        retries: bool = False,
        **data: str,
    ) -> RewardPool:
        config = make_config(rewards, timeout_s, num_workers, options, **data)
        pools.append(RewardPool(config, tokenizer_path=str(folder), retries=retries))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_plain_prompt_is_the_text_of_its_row(make_pool) -> None:
    pool = make_pool("mine.py:of_markers")
    submit(pool, "as tokens", [tokens("19")], structs.replace(prompt(), tokens=np.array(tokens("1"), np.int32)))
    submit(
        pool,
        "as text",
        [tokens("19")],
        structs.replace(prompt(), tokens=np.array(tokens("1"), np.int32), text="1<eos>"),
    )
    found = gather(pool, 2)
    assert {key: scored.rewards for key, scored in found.items()} == {"as tokens": [0.0], "as text": [1.0]}


def test_groups_come_back_with_rewards_parts_and_their_key(make_pool) -> None:
    pool = make_pool("mine.py:score", num_workers=2)
    for key in range(300):
        submit(pool, key, [tokens(str(4 + key)), tokens("7")], prompt())
    assert pool.pending == 300
    found = gather(pool, 300)
    for key, scored in found.items():
        assert scored == Scored(key, [4.0 + key, 7.0], [{"twice": 2 * (4.0 + key)}, {"twice": 14.0}], ["", ""])


def test_special_tokens_are_no_part_of_the_text(make_pool) -> None:
    pool = make_pool("exact")
    submit(pool, "k", [tokens("19"), tokens("1")[:-1] + tokens("9"), [*tokens("19"), 0, 0]], prompt())
    assert gather(pool, 1)["k"].rewards == [1.0, 1.0, 1.0]


def test_chat_statuses_columns_and_options_reach_a_group_reward(make_pool, folder: Path) -> None:
    (folder / "seen.py").write_text(
        "def score(completions, prompts, statuses, level, hint, max_new_tokens, time_left_s, *, bonus):\n"
        "    assert prompts == [[{'role': 'user', 'content': '12+07='}]] * 2, prompts\n"
        "    assert completions == [[{'role': 'assistant', 'content': c}] for c in '19'], completions\n"
        "    assert (level, hint, max_new_tokens) == ([4, 4], ['carry', 'carry'], 10)\n"
        "    assert 10 < time_left_s <= 18\n"
        "    return [bonus + (status == 'truncated') for status in statuses]\n"
    )
    pool = make_pool("seen.py:score", options={"seen.py:score": {"bonus": 0.5}})
    asked = structs.replace(prompt(level=4), chat=[{"role": "user", "content": "12+07="}], columns={"hint": "carry"})
    pool.submit("k", [tokens("1"), tokens("9")], asked, ["completed", "truncated"])
    assert gather(pool, 1)["k"] == Scored("k", [0.5, 1.5], [{}, {}], ["", ""])


def test_a_sum_of_rewards_keeps_its_parts(make_pool) -> None:
    pool = make_pool({"sums": {"mine.py:score": 0.5, "exact": 2, "overlong": 1}})
    submit(pool, "k", [tokens("19"), tokens("3"), tokens("1111111111")], prompt())
    scored = gather(pool, 1)["k"]
    assert scored.rewards == [0.5 * 19 + 2, 0.0, 0.5 * 1111111111 - 1]
    assert scored.parts[0] == {"mine.py:score": 19, "mine.py:score/twice": 38, "exact": 1, "overlong": 0}
    assert scored.errors == ["", "reward mine.py:score on data source 'sums': raised KeyError: 'three'", ""]


def test_workers_are_light_and_use_one_thread(make_pool) -> None:
    pool = make_pool("mine.py:is_light")
    submit(pool, "k", [tokens("1")], prompt())
    assert gather(pool, 1)["k"].rewards == [1.0]


def test_workers_run_on_the_cores_of_helpers(make_pool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = max(os.sched_getaffinity(0))
    monkeypatch.setenv("ASYNCRL_HELPER_CPUS", str(cpu))
    pool = make_pool("mine.py:cpu")
    submit(pool, "k", [tokens("1")], prompt())
    assert gather(pool, 1)["k"].rewards == [float(cpu)]


def test_only_the_completion_that_hangs_is_given_up(make_pool) -> None:
    pool = make_pool("mine.py:score", timeout_s=1.0)
    for key in range(40):
        submit(pool, key, [tokens("7"), tokens("0" if key == 25 else "5"), tokens("6")], prompt())
    found = gather(pool, 40)
    text = "reward mine.py:score on data source 'sums': took longer than generator.reward_timeout_s = 1 s"
    parts = [{"twice": 14.0}, {}, {"twice": 12.0}]
    assert found.pop(25) == Scored(25, [7.0, 0.0, 6.0], parts, ["", text, ""])
    assert all(scored.rewards == [7.0, 5.0, 6.0] for scored in found.values())


@pytest.mark.parametrize(
    ("text", "cause"), [("1", "ended its worker process (exit code 3)"), ("2", "raised SystemExit: enough")]
)
def test_only_the_completion_that_ends_its_process_is_given_up(make_pool, text: str, cause: str) -> None:
    pool = make_pool("mine.py:score")
    for key in range(40):
        submit(pool, key, [tokens("5"), tokens(text if key == 25 else "5")], prompt())
    found = gather(pool, 40)
    guilty = found.pop(25)
    assert guilty.errors == ["", f"reward mine.py:score on data source 'sums': {cause}"]
    assert guilty.rewards == [5.0, 0.0]
    assert all(scored.rewards == [5.0, 5.0] for scored in found.values())


def test_a_group_without_any_reward_is_scored_again_for_a_while(
    make_pool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MIN_PAUSE_S", 0.1)
    monkeypatch.setattr(workers, "RETRY_PART", 2.0 / 600)
    pool = make_pool("mine.py:judge", retries=True)
    submit(pool, "starts the worker", [tokens("4")], prompt("first"))
    gather(pool, 1)
    submit(pool, "all fail", [tokens("3"), tokens("3")], prompt())
    submit(pool, "one fails", [tokens("4"), tokens("3")], prompt("other"))
    found = gather(pool, 2)
    assert all("raised ConnectionError: no judge" in error for error in found["all fail"].errors)
    assert found["one fails"].rewards == [1.0, 0.0] and found["one fails"].errors[0] == ""
    submit(pool, "waits itself", [tokens("5")], prompt("slow"))
    assert gather(pool, 1)["waits itself"].errors[0]
    calls = (folder / "calls").read_text()
    assert (calls.count("4"), calls.count("5")) == (2, 1) and 1 + 2 * 2 <= calls.count("3") <= 1 + 2 * 7, (
        "each pause is longer"
    )


def test_a_group_that_fails_while_others_get_rewards_is_scored_twice(make_pool, folder: Path) -> None:
    pool = make_pool("mine.py:judge", retries=True)
    submit(pool, "bad", [tokens("3")], prompt())
    began_s, found = time.monotonic(), dict[object, Scored]()
    while "bad" not in found:
        assert time.monotonic() < began_s + 60
        submit(pool, time.monotonic(), [tokens("4")], prompt())
        found |= {scored.key: scored for scored in pool.collect()}
        time.sleep(0.02)
    assert "no judge" in found.pop("bad").errors[0]
    assert found and all(scored.rewards == [1.0] for scored in found.values())
    assert (folder / "calls").read_text().count("3") == 2


def test_workers_killed_while_idle_are_replaced(make_pool) -> None:
    pool = make_pool("exact", num_workers=2)
    submit(pool, "before", [tokens("19")], prompt())
    gather(pool, 1)
    for worker in reward_workers(os.getpid()):
        worker.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    submit(pool, "after", [tokens("19")], prompt())
    assert gather(pool, 1)["after"].rewards == [1.0]


def test_functions_that_cannot_be_loaded_fail_groups_but_not_the_pool(make_pool) -> None:
    pool = make_pool("mine.py:missing")
    submit(pool, "k", [tokens("19")], prompt())
    assert "mine.py has no 'missing'" in gather(pool, 1)["k"].errors[0]


def test_close_ends_a_hanging_worker(make_pool) -> None:
    pool = make_pool("mine.py:score", timeout_s=1000.0)
    submit(pool, "k", [tokens("0")], prompt())
    pool.collect()
    time.sleep(1.0)
    processes = reward_workers(os.getpid())
    pool.close()
    assert processes and not any(process.is_running() for process in processes)


PARENT = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {repository!r})
    from tests.helpers.reward_pool import gather, make_config, prompt, submit, tokens
    from asyncrl.rewards.pool import RewardPool

    if __name__ == "__main__":
        pool = RewardPool(make_config("mine.py:score", 1000.0, 2), tokenizer_path=".")
        submit(pool, 0, [tokens("5")], prompt())
        gather(pool, 1)
        submit(pool, 1, [tokens("0")], prompt())
        pool.collect()
        print("ready", flush=True)
        time.sleep(1000)
"""


def test_workers_end_with_a_killed_parent(folder: Path) -> None:
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT.format(repository=str(Path(__file__).parents[2]))))
    with subprocess.Popen([sys.executable, script], cwd=folder, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
            time.sleep(0.5)
            processes = reward_workers(parent.pid)
        finally:
            parent.kill()
    assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def reward_workers(parent: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children() if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("spawn_main" in part for part in process.cmdline())
    except psutil.ZombieProcess:
        return False


def test_check_rewards_loads_every_function(folder: Path) -> None:
    check_rewards(make_config({"a": "exact", "b": {"mine.py:score": 1, "gsm8k": 2}}))
    with pytest.raises(ConfigError, match="did you mean score"):
        check_rewards(make_config({"a": "exact", "b": "mine.py:scor"}))


@pytest.mark.parametrize(
    ("rewards", "options", "text"),
    [
        ("gsm8k", {"gsm8k": {"methd": "strict"}}, "reward_options.gsm8k.methd = 'strict': gsm8k has no such option; d"),
        ("gsm8k", {"gsm8k": {"method": "lax"}}, "reward_options.gsm8k.method = 'lax': input should be 'strict' or"),
        ("exact", {"exact": {"x": 1}}, "reward_options.exact.x = 1: exact has no such option; there are none"),
        ("gsm8k", {"gsm8": {}}, "reward_options.gsm8: rewards does not use gsm8; did you mean gsm8k? (it uses gsm8k)"),
        ({"exact": float("inf")}, {}, "rewards.exact = inf: a weight must be a finite number"),
        ({"a": {"exact": float("nan")}}, {}, "rewards.a.exact = nan: a weight must be a finite number"),
        ({}, {}, "rewards = {}: name at least one reward"),
        (
            "format",
            {"format": {"pattern": "("}},
            "reward_options.format.pattern = '(': not a regular expression: missing",
        ),
        ("choice", {"choice": {"choices": 1}}, "reward_options.choice.choices = 1: must be from 2 to 26"),
        ("overlong", {"overlong": {"buffer_tokens": 11}}, "must be from 1 to generator.max_new_tokens = 10"),
        ("code", {"code": {"time_limit_s": 60}}, "must be above 0 and not above generator.reward_timeout_s = 20"),
        ("code", {"code": {"memory_bytes": 1}}, "must be at least 67108864, which the interpreter needs"),
        ("reward_model", {}, "reward_options.reward_model.path: required when rewards uses reward_model"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, rewards: object, options: object, text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_rewards(make_config(rewards, options=options))
    assert text in str(raised.value)


def test_one_completion_that_hangs_costs_its_siblings_nothing(make_pool) -> None:
    completions = [tokens(text) for text in ("4", "0", "5", "6")]
    members = {
        index: [Completion(str(index), one, np.zeros(len(one), np.float32), np.zeros(len(one), np.int32), "completed")]
        for index, one in enumerate(completions)
    }
    group = GroupInProgress(Lease(3, 0, prompt()), 4, 0, 0.0, completions=members)
    pool = make_pool("mine.py:score", timeout_s=1.0)
    submit(pool, group.key, completions, group.lease.prompt)
    (scored,) = gather(pool, 1).values()
    made = make_group(group, scored, generator=0)
    assert [t.reward for t in made.trajectories] == [4.0, 0.0, 5.0, 6.0]
    assert [t.status for t in made.trajectories] == ["completed", "failed", "completed", "completed"]
    assert [bool(t.error) for t in made.trajectories] == [False, True, False, False]
    assert refund_reason(make_config("exact"), pack_group(made)[0], group_relative=True) == ""
    config = make_config("exact")
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"failed": "refund"})})
    assert refund_reason(config, pack_group(made)[0], group_relative=True) == "failed"
