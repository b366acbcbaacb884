"""Four optimizer steps of programs that know nothing of asyncrl: those of docs/environments.md, on a tiny chat model.

The arrays that were trained are compared with the program's replies to the policy's texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.cli.parts import make_verifiers_rows
from asyncrl.environments.dialogue.dialogue import ChatDialogue, Dialogue
from asyncrl.environments.environment import Message
from asyncrl.launch.fork_server import ForkServer
from asyncrl.replay.history import JournalBatches
from asyncrl.types import Trajectory
from tests.helpers.doc_files import write_doc_files
from tests.helpers.runs import start_launch
from tests.helpers.talking_models import save_talking_model
from tests.helpers.verifiers_python import verifiers_python

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, RUN_S = 4, 600.0
SMALL = [
    f"steps={STEPS}", "replay.groups_per_step=4", "generator.group_size=4", "generator.max_running_groups=4",
    "generator.kv_cache_bytes=67108864", "learner.tokens_per_microbatch=4096", "replay.zero_variance=drop",
    "journal.retention=all",
]  # fmt: skip
CALL = '<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
PRODUCTS = [CALL.format(a=6, b=7), CALL.format(a=2, b=3), "42", "6", ""]
"""Texts of the models, of which one is an empty turn."""
ROWS = [("6 * 7 =", "42"), ("2 * 3 =", "6")]


@dataclass
class Conversation:
    """The conversation of a program with the policy, and its tokens."""

    dialogue: ChatDialogue
    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    calls: int = 0

    def begin(self) -> None:
        self.tokens = self.dialogue.begin(self.messages, self.tools)

    def hear(self, said: list[int]) -> Message:
        """Returns a turn of the policy, as the API shows it."""
        self.tokens += said
        self._read = self.dialogue.read(said, self.tools, first_call=self.calls)
        self._closed = self.dialogue.closes(said)
        self.calls += len(self._read.calls)
        return self._read.message

    def say(self, *messages: Message) -> None:
        calls = self._read.calls
        self.tokens += self.dialogue.follow(list(messages), self.tools, closed=self._closed, calls=calls)


Program = Callable[[Conversation, str, Iterator[list[int]]], tuple[float, dict[str, float]]]
"""Plays the turns, and returns the reward and its parts."""


def sums(talk: Conversation, truth: str, turns: Iterator[list[int]]) -> tuple[float, dict[str, float]]:
    talk.begin()
    talk.hear(next(turns))
    talk.say({"role": "user", "content": "Are you sure?"})
    right = float(str(talk.hear(next(turns))["content"]).strip() == truth)
    return right, {"right": right, "turns": 2.0}


def calculator(talk: Conversation, truth: str, turns: Iterator[list[int]]) -> tuple[float, dict[str, float]]:
    import calculator_agent as agent  # type: ignore[import-not-found]

    talk.tools, made = [agent.TOOL], 0
    talk.begin()
    while True:
        message = talk.hear(next(turns))
        if not message.get("tool_calls") or made == 3:
            break
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": agent.multiply(json.dumps(arguments))}
            for call in message["tool_calls"]
            if (arguments := call["function"]["arguments"]) is not None
        ]
        made += len(answers)
        talk.say(*answers)
    right = float(str(message["content"]).strip() == truth)
    return right, {"calls": float(made)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, a model and rows."""
    monkeypatch.chdir(tmp_path)
    write_doc_files("environments.md", tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth}} for text, truth in ROWS
    ]
    (tmp_path / "products.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.fixture
def train(folder: Path, preloaded: ForkServer) -> Iterator[Callable[..., Path]]:
    """Trains four steps, and returns the folder of the run."""
    started: list[Any] = []

    def run(config: str, *overrides: str) -> Path:
        started.append(start_launch(folder, "it", "--config", config, *SMALL, *overrides, preloaded=preloaded))
        code, output = started[-1].end(RUN_S)
        assert code == 0, output
        steps = [row["step"] for row in started[-1].rows() if "learner/tokens" in row]
        assert steps == list(range(1, STEPS + 1)) and started[-1].summary()["status"] == "finished"
        assert not started[-1].left_over()
        return started[-1].run_dir

    yield run
    for launched in started:
        launched.kill()


def groups(run_dir: Path) -> Iterator[tuple[int, list[Trajectory]]]:
    """Row and trajectories of every group that was trained."""
    batches, trained = JournalBatches(run_dir / "journal", 0, ranks=1), 0
    for step in range(1, STEPS + 1):
        shard = batches.take(step)
        for group in [] if shard is None else shard.groups:
            assert len(group.trajectories) == len(group.firsts), "one branch in each episode"
            trained += 1
            yield group.row, group.trajectories
    assert trained


def members(run_dir: Path) -> Iterator[tuple[int, Trajectory]]:
    """Row and trajectory of every member that was trained."""
    return ((row, member) for row, group in groups(run_dir) for member in group)


def turns_of(member: Trajectory) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], member.action_mask, [0]))))
    return [member.tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]


def replay(
    dialogue: ChatDialogue, member: Trajectory, row: tuple[list[Message], str], program: Program
) -> tuple[float, dict[str, float]]:
    """Returns reward and parts of the policy's texts; asserts that the tokens are those that the program makes."""
    messages, truth = row
    talk, left = Conversation(dialogue, messages), iter(turns_of(member))
    reward, parts = program(talk, truth, left)
    assert next(left, None) is None, "the program has asked for more turns"
    assert member.tokens.tolist() == talk.tokens
    return reward, parts


def check(run_dir: Path, model: Path, rows: list[tuple[list[Message], str]], program: Program) -> Counter[int]:
    """Asserts that all that was trained is what the program makes of the policy's turns; returns how many episodes have
    how many turns."""
    dialogue, found = Dialogue(str(model), trust_remote_code=False, max_observation_tokens=2048).chat, Counter[int]()
    for row, member in members(run_dir):
        reward, parts = replay(dialogue, member, rows[row], program)
        assert member.reward == pytest.approx(reward)
        assert {name: member.reward_parts[name] for name in parts} == pytest.approx(parts)
        found[len(turns_of(member))] += 1
    return found


def verifiers_rows(file: str) -> list[tuple[list[Message], str]]:
    return [(row["prompt"], row["reward_model"]["ground_truth"]) for row in pq.read_table(file).to_pylist()]


def test_a_taskset_of_verifiers_trains_with_a_harness_in_its_process(folder: Path, train: Callable[..., Path]) -> None:
    (folder / "vf4").symlink_to(Path(verifiers_python("0.4.0")).parents[1])
    save_talking_model(folder / "model", ["0", "2", "4", ""])
    options = {"taskset": {"size": 3}}
    make_verifiers_rows("sums", Path("sums.parquet"), python="vf4/bin/python", limit=None, options=options)
    environment = {"name": "verifiers:sums", "python": "vf4/bin/python", "options": {"verifiers:sums": options}}
    run_dir = train("sums.yaml", f"environment={json.dumps(environment)}")
    assert set(check(run_dir, folder / "model", verifiers_rows("sums.parquet"), sums)) == {2}


def test_an_agent_with_the_client_of_openai_trains_unchanged(
    folder: Path, train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    save_talking_model(folder / "model", PRODUCTS)
    run_dir = train("calculator_agent.yaml")
    rows = [([{"role": "user", "content": text}], truth) for text, truth in ROWS]
    assert set(check(run_dir, folder / "model", rows, calculator)) >= {1, 2}


def test_a_command_with_the_agents_of_openai_trains_unchanged(folder: Path, train: Callable[..., Path]) -> None:
    (folder / "venv").symlink_to(Path(verifiers_python("openai-agents")).parents[1])  # it has their library
    save_talking_model(folder / "model", PRODUCTS)
    name = 'environment.name="agent:venv/bin/python agents_program.py"'
    few = ["replay.groups_per_step=2", "generator.group_size=2", "generator.max_running_groups=2"]
    run_dir = train("calculator_agent.yaml", name, *few)
    for row, member in members(run_dir):
        dialogue = Dialogue("model", trust_remote_code=False, max_observation_tokens=2048).chat
        last = dialogue.read(turns_of(member)[-1], ()).message["content"]
        assert member.reward == float(last.strip() == ROWS[row][1])
        assert len(turns_of(member)) <= 4
