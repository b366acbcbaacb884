"""SIGKILL of environment hosts and of generators at random moments, in a run whose environments wait and fail."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from asyncrl.data.demo import make_demo_rows
from asyncrl.data.row_files import write_rows
from asyncrl.launch.fork_server import ForkServer
from asyncrl.replay.history import JournalBatches
from asyncrl.types import EPISODE_ENDS, Group, Trajectory
from tests.chaos.runs import Chaos, check_complete
from tests.helpers.preloaded import Command

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]

Make = Callable[..., Chaos]
SEED = int(os.environ.get("CHAOS_SEED", "5"))
"""The seed of the moments and victims of the kills."""
FAILS_AT = 23
"""A turn makes an episode fail if this divides the sum of its digits' code points."""
RULES = f"""
def spoken(text):
    value = sum(ord(one) for one in text if one.isdigit())
    if value and value % {FAILS_AT} == 0:
        raise OSError("the tool failed")
    return float(value % 2)

def outcome(texts, truth):
    return 0.5 * "".join(texts).count(truth[-1])
"""
"""Failures and rewards are functions of the row and of the policy's text."""
SPOKEN = f"""
import asyncio, random
from asyncrl.environments import Environment, Step
{RULES}
class Spoken(Environment):
    max_turns = 4

    def reset(self):
        self.dice, self.turns, self.texts = random.Random(), self.random.choice((1, 2, 3)), []

    async def step(self, action):
        await asyncio.sleep(self.dice.choice((0.0, self.dice.uniform(0.0, 0.06))))
        reward = spoken(action.text)
        self.texts.append(action.text)
        return Step(">" * self.turns, reward=reward, done=len(self.texts) == self.turns)

    async def reward(self):
        await asyncio.sleep(self.dice.uniform(0.0, 0.02))
        return outcome(self.texts, self.task.ground_truth)
"""
PROGRAM = f"""
import json, os, random, sys, time, urllib.request
{RULES}
def run(task, *, base_url, api_key):
    messages, total = [{{"role": "user", "content": task["prompt"]}}], 0.0
    headers = {{"Authorization": f"Bearer {{api_key}}", "Content-Type": "application/json"}}
    for _ in range(random.Random(task["seed"]).choice((1, 2, 3))):
        body = json.dumps({{"model": "policy", "messages": messages}}).encode()
        request = urllib.request.Request(f"{{base_url}}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
        except OSError:
            time.sleep(900)  # as a program that tries again for ever
        total += spoken(text)
        messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": ">"}}]
    return total + outcome([one["content"] for one in messages[1::2]], task["ground_truth"])

if __name__ == "__main__":
    print(run(json.load(sys.stdin), base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]))
"""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def settings(demo_folder: Path, tmp_path: Path) -> list[str]:
    """The settings of the run. Of each five rows three have an environment, one a command, and one a program in
    another interpreter."""
    make_demo_rows("guess", tmp_path / "guess.parquet")
    rows = pq.read_table(tmp_path / "guess.parquet").to_pylist()
    sources = ("spoken", "spoken", "spoken", "command", "python")
    write_rows(
        tmp_path / "rows.parquet", [row | {"data_source": sources[n % len(sources)]} for n, row in enumerate(rows)]
    )
    (tmp_path / "spoken.py").write_text(SPOKEN)
    (tmp_path / "program.py").write_text(PROGRAM)
    shutil.copytree(demo_folder / "demo" / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    program = tmp_path / "program.py"
    names = f"spoken: {tmp_path / 'spoken.py'}:Spoken, python: 'agent:{program}:run'"
    return [
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'rows.parquet'}",
        f"environment.name={{{names}, command: 'agent:{sys.executable} -S -E {program}'}}",
        f"environment.python={sys.executable}",
        "environment.hosts=2",
        "launch.generators=2",
        "journal.retention=all",
    ]


def test_environment_hosts_and_generators_killed_at_random(
    chaos: Make,
    settings: list[str],
    preloaded: ForkServer,
    demo_folder: Path,
    tmp_path: Path,
    figure: Callable[[str], None],
    full: bool,
) -> None:
    kills, generator_kills, steps = (20, 5, 100) if full else (4, 1, 20)
    dice = random.Random(SEED)
    run = chaos(*settings, f"steps={steps}")
    run.start()
    assert run.launched is not None
    victims = ["host"] * kills + ["generator"] * generator_kills
    dice.shuffle(victims)
    for number, victim in enumerate(victims):
        assert run.wait_for_step(1 + number * (steps - 5) // len(victims)), "the run ended before all kills"
        time.sleep(dice.uniform(0.0, 1.0))
        find = hosts_of if victim == "host" else generators_of
        with contextlib.suppress(ProcessLookupError):  # its generator has just died
            os.kill(dice.choice(await_some(find, run)), signal.SIGKILL)
    summary = run.finish(timeout_s=300)
    assert left_in(demo_folder) == []
    check_complete(run, summary, steps)
    ledger = Command(preloaded, demo_folder, ["ledger", str(run.run_dir)])
    output, _ = ledger.communicate(timeout=100)
    assert ledger.returncode == 0, output
    replaced = [event for event in generator_events(run) if event["event"] == "environment host replaced"]
    lost = sum(event["episodes"] for event in replaced)
    text_of, truths = decoder(demo_folder), truths_of(tmp_path / "rows.parquet")
    tickets: set[int] = set()
    sources: set[str] = set()
    tries = 0
    for step, group in trained_groups(run, steps):
        assert group.ticket not in tickets, f"ticket {group.ticket} is trained twice"
        tickets.add(group.ticket)
        sources.add(group.data_source)
        check_group(group, step, summary["staleness"]["limit"], text_of, truths[group.row])
        tries += sum(member.episode.tries for member in group.trajectories if member.episode is not None)
    assert len(tickets) == steps * 8 and sources == {"spoken", "command", "python"}
    assert 0.7 * kills <= len(replaced) <= kills and lost > 0
    assert not any(row.get("environment/failed/host") for row in run.rows()), "an episode was not tried again"
    figure(
        f"{kills} hosts with {lost} episodes and {generator_kills} generators killed; {tries} tries of trained "
        f"episodes failed, restarts {summary['restarts']}, {summary['wall_s']:.0f} s"
    )


def check_group(group: Group, step: int, max_staleness: int, text_of: Callable[[list[int]], str], truth: str) -> None:
    """Checks that the members of a trained group, except failed ones, are complete episodes with the rewards of what
    they say."""
    where = f"step {step}, ticket {group.ticket}"
    assert len(group.trajectories) == 4, where
    assert sum(member.status != "failed" for member in group.trajectories) >= 2, where
    for member in group.trajectories:
        member.check()
        episode = member.episode
        if member.status == "failed":  # all its tries: its tokens are not trained
            assert episode is not None and episode.ended == "environment" and member.error, where
            continue
        assert episode is not None and episode.ended in EPISODE_ENDS and not member.error, where
        assert member.status in ("completed", "truncated"), where
        turns = [text_of(tokens) for tokens in turns_of(member)]
        assert len(turns) == member.num_turns == len(episode.turn_rewards), where
        spoken = [sum(ord(one) for one in text if one.isdigit()) for text in turns]
        assert not any(value and value % FAILS_AT == 0 for value in spoken), f"{where}: of a failed episode"
        rewards = [float(value % 2) for value in spoken]
        assert episode.turn_rewards == (rewards if group.data_source == "spoken" else [0.0] * len(turns)), where
        assert member.reward == pytest.approx(sum(rewards) + 0.5 * "".join(turns).count(truth[-1])), where
        versions = member.versions[member.action_mask].tolist()
        assert versions[0] >= group.start_version and all(a <= b for a, b in pairwise(versions)), where
        assert 0 <= step - 1 - versions[0] <= max_staleness, where
    lengths = {member.num_turns for member in group.trajectories if member.status == "completed"}
    assert len(lengths) <= 1, f"{where}: the members of a group have the same task"


def turns_of(member: Trajectory) -> list[list[int]]:
    """The tokens of each run of the action mask."""
    marked = zip(member.action_mask.tolist(), member.tokens.tolist(), strict=True)
    runs = groupby(marked, key=lambda pair: pair[0])
    return [[token for _, token in run] for is_action, run in runs if is_action]


def trained_groups(run: Chaos, steps: int) -> Iterator[tuple[int, Group]]:
    """Step and group of everything that was trained, from the journal."""
    batches = JournalBatches(run.run_dir / "journal", 0, ranks=1)
    for step in range(1, steps + 1):
        shard = batches.take(step)
        assert shard is not None and len(shard.groups) == 8
        yield from ((step, group) for group in shard.groups)


def generator_events(run: Chaos) -> list[dict[str, Any]]:
    assert run.launched is not None
    return [event for number in range(2) for event in run.launched.events(f"generator-{number}")]


def truths_of(path: Path) -> list[str]:
    """The ground truth of each row."""
    return [row["reward_model"]["ground_truth"] for row in pq.read_table(path).to_pylist()]


def decoder(folder: Path) -> Callable[[list[int]], str]:
    """Returns the text of tokens, as an environment reads it."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "demo" / "model")
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def generators_of(run: Chaos) -> list[int]:
    return sorted(pid for name, pid in run.roles().items() if name.startswith("generator"))


def hosts_of(run: Chaos) -> list[int]:
    """The processes of environments of all generators."""
    assert run.launched is not None
    run.launched.note_tree()
    found: list[int] = []
    for generator in generators_of(run):
        try:
            children = psutil.Process(generator).children()
            found += [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def await_some(find: Callable[[Chaos], list[int]], run: Chaos, timeout_s: float = 60.0) -> list[int]:
    """The processes that are found, once there is one."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := find(run)):
        assert time.monotonic() < deadline_s, f"no process within {timeout_s:g} s"
        time.sleep(0.05)
    return found


def left_in(folder: Path, within_s: float = 15.0) -> list[str]:
    """Processes that still run in the folder, in which a run and all that it starts are."""
    # The launcher kills the process group of a generator and waits for the generator alone. Its hosts and Python's
    # resource tracker, whose pipe only these processes hold, end a little later, on a busy machine by seconds.
    deadline_s = time.monotonic() + within_s
    while (left := list(processes_in(folder))) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def processes_in(folder: Path) -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            status, command = process.status(), " ".join(process.cmdline())
            # The resource tracker of the tests themselves is where the test that needed it first was.
            is_own = process.ppid() == os.getpid() and "resource_tracker" in command
            if status != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder and not is_own:
                yield f"{process.pid} ({status}, child of {process.ppid()}): {command}"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
