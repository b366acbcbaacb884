"""`asyncrl samples` and `asyncrl show` on the journal of a real queue: what they print, find, write and refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data.row_files import write_rows
from asyncrl.observe.samples import SampleBook, Samples, append_rows, evaluated_file
from asyncrl.observe.trace import TraceWriter
from asyncrl.replay.codec import pack_group
from asyncrl.replay.history import JournalSamples
from asyncrl.replay.journal import Journal
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Group, Lease, Prompt
from tests.helpers.cli import asyncrl
from tests.helpers.replay import EndlessPrompts, ask_queue, make_group
from tests.helpers.reward_pool import TOKENS, save_tokenizer

QUESTIONS = ("12=", "3+4=", "5+0=")
STEPS = 3


def encode(text: str) -> list[int]:
    return [TOKENS.index(character) for character in text]


class Questions(EndlessPrompts):
    """Prompts of QUESTIONS, again and again."""

    def prompt(self, row: int) -> Prompt:
        return Prompt(row % 3, np.array(encode(QUESTIONS[row % 3]), dtype=np.int32), "7", "sums")


def answered(lease: Lease, version: int, answers: Sequence[str], rewards: Sequence[float], error: str = "") -> Group:
    """A group of these answers, each ended by <eos>."""
    size = len(lease.prompt.tokens)
    group = make_group(lease, version, rewards=rewards, completion_tokens=[len(answer) + 1 for answer in answers])
    for member, answer in zip(group.trajectories, answers, strict=True):
        whole = [*lease.prompt.tokens.tolist(), *encode(answer), TOKENS.index("<eos>")]
        mask = np.arange(len(whole)) >= size
        member.tokens, member.action_mask = np.array(whole, dtype=np.int32), mask
        member.behavior_logprobs = np.where(mask, -0.5, 0).astype(np.float32)
        member.versions = np.where(mask, version, -1).astype(np.int32)
        member.error = error
    return group


def write_run(folder: Path) -> Config:
    """A run of STEPS steps of one group, each before it a refunded one; ended as by SIGKILL."""
    model, run_dir = folder / "model", folder / "runs" / "first"
    model.mkdir()
    run_dir.mkdir(parents=True)
    save_tokenizer(model)
    rows = [{"prompt": text, "reward_model": {"ground_truth": "7"}, "data_source": "sums"} for text in QUESTIONS]
    write_rows(folder / "train.parquet", rows)
    settings = {
        "model.path": str(model),
        "data.train": str(folder / "train.parquet"),
        "rewards": "exact",
        "generator.group_size": 2,
        "replay.groups_per_step": 1,
        "steps": STEPS,
        "journal.retention": "all",
    }
    config = load_config(None, settings)
    (run_dir / "config.yaml").write_text(config.to_yaml())
    journal = Journal(run_dir / "journal", flush="os")
    queue = ReplayQueue(config, Questions(), TraceWriter(run_dir / "trace.parquet"), journal=journal)
    for step in range(1, STEPS + 1):
        (refunded,), _ = ask_queue(queue, 0, step - 1, 1)
        queue.finish(*pack_group(answered(refunded, step - 1, ["1", "1"], [0.0, 0.0])))
        (lease,), _ = ask_queue(queue, 0, step - 1, 1)
        error = "it broke" if step == 2 else ""
        queue.finish(*pack_group(answered(lease, step - 1, ["7", "12345"], [1.0, 0.25 / step], error)))
        assert queue.take(0, step)[0] == "shard"
        queue.commit(step, {})
    journal.write()
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    write_run(folder)
    return folder


def printed(folder: Path, *arguments: str) -> str:
    code, output = asyncrl("samples", "runs/first", *arguments, cwd=folder)
    assert code == 0, output
    return output


def test_the_last_step_is_shown_with_prompt_completion_truth_and_reward(made: Path) -> None:
    output = printed(made)
    assert output.splitlines()[:4] == [
        "step 3 · ticket 5.0 · sums · reward 1 · staleness 0 · completed, 2 tokens",
        "  prompt      5+0=",
        "  completion  7",
        "  truth       7",
    ]
    assert output.count("ticket 5.") == 2 and "step 2" not in output
    assert "journal has 6 groups, of tickets 0 to 5, and steps 1 to 3" in output


@pytest.mark.parametrize(
    ("arguments", "tickets"),
    [
        (["--step", "1"], ["1.0", "1.1"]),
        (["--step", "1:2"], ["3.0", "3.1", "1.0", "1.1"]),
        (["--step", "1:3", "--worst", "-n", "2"], ["5.1", "3.1"]),
        (["--step", "1:3", "--best", "-n", "1"], ["5.0"]),
        (["--step", "1:3", "--longest", "-n", "3"], ["5.1", "3.1", "1.1"]),
        (["--failed"], ["3.0", "3.1"]),
        (["--refunded"], ["4.0", "4.1", "2.0", "2.1", "0.0"]),
        (["--row", "0"], ["3.0", "3.1"]),
        (["--grep", "^123"], ["5.1", "3.1", "1.1"]),
        (["--grep", "^123", "--step", "2"], ["3.1"]),
        (["--source", "sums", "-n", "1"], ["5.0"]),
        (["--source", "others"], []),
    ],
)
def test_what_matches_is_found(made: Path, arguments: list[str], tickets: list[str]) -> None:
    lines = printed(made, "--json", *arguments).splitlines()
    assert [f"{row['ticket']}.{row['index']}" for row in map(json.loads, lines)] == tickets


def test_special_tokens_are_shown_on_demand_and_a_json_line_has_all(made: Path) -> None:
    (line,) = printed(made, "--json", "--special-tokens", "-n", "1").splitlines()
    row = json.loads(line)
    assert (row["prompt"], row["completion"], row["ground_truth"]) == ("5+0=", "7<eos>", "7")
    assert (row["reward_parts"], row["outcome"], row["generator"]) == ({"exact": 1.0}, "trained", 0)
    assert "tokens" not in row


def test_a_file_of_them_has_the_tokens_and_the_texts(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "worst.parquet"
    assert f"{out}: 2 trajectories written" in printed(made, "--out", str(out))
    found = Samples.load(out)
    assert found.table["completion"].to_pylist() == ["7", "12345"]
    assert len(found.to_groups()) == 1
    foreign = tmp_path / "foreign.parquet"
    foreign.write_text("mine")
    code, output = asyncrl("samples", "runs/first", "--out", str(foreign), cwd=made)
    assert (code, output) == (2, f"error: --out {foreign}: exists and holds no samples; name another file\n")
    code, output = asyncrl("samples", "runs/first", "--out", "worst.txt", cwd=made)
    assert (code, output) == (2, "error: --out worst.txt: has to end in .parquet\n")


def test_a_group_is_shown_whole(made: Path) -> None:
    code, output = asyncrl("show", "runs/first", "3", cwd=made)
    assert code == 0
    head, prompt, truth, *rest = output.splitlines()
    assert head == "ticket 3 · attempt 0 · trained · step 2 · row 0 · sums · generator 0 · versions 1 to 1"
    assert (prompt, truth) == ("  prompt      12=", "  truth       7")
    assert rest == [
        "reward 1 · staleness 0 · completed, 2 tokens · no reward: it broke",
        "  completion  7",
        "reward 0.125 · staleness 0 · completed, 6 tokens · no reward: it broke",
        "  completion  12345",
    ]
    code, output = asyncrl("show", "runs/first", "0", cwd=made)
    assert (code, output.splitlines()[0].split(" · ")[2:4]) == (0, ["zero_variance", "no step"])


def test_what_is_not_there_is_said(made: Path, tmp_path: Path) -> None:
    for arguments, error in (
        (["samples", "runs/none"], "runs/none: not the folder of a run, config.yaml is missing; give runs/NAME"),
        (["samples", "runs/first", "--grep", "["], "--grep '[': not a regular expression"),
        (["samples", "runs/first", "--step", "a"], "--step 'a': has to be a step"),
        (["samples", "runs/first", "--best", "--worst"], "--best and --worst: choose one of them"),
        (["show", "runs/first", "99"], "ticket 99: the group is not stored; runs/first/journal has 6 groups"),
    ):
        code, output = asyncrl(*arguments, cwd=made)
        assert code == 2 and output.startswith(f"error: {error}"), output
    assert printed(made, "--step", "9").startswith("no trajectory matches; runs/first/journal has 6 groups")
    shutil.copytree(made / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "first" / "journal")
    code, output = asyncrl("samples", "runs/first", cwd=tmp_path)
    assert (code, output) == (
        2,
        "error: runs/first: has neither a journal nor samples/, so that no trajectories are stored\n",
    )


def test_a_run_whose_model_or_data_have_gone_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "train.parquet").unlink()
    assert "truth" not in printed(tmp_path)
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    code, output = asyncrl("samples", "runs/first", cwd=tmp_path)
    assert code == 2 and "its tokenizer is gone, it was in model.path" in output
    (tmp_path / "runs" / "first" / "model").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "runs" / "first" / "model" / "tokenizer.json")
    assert "completion  7" in printed(tmp_path)


def test_a_completion_cannot_command_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"\\u001b]0;owned\\u0007"'))
    output = printed(tmp_path)
    assert "\x1b" not in output and "\\x1b]0;owned\\x07" in output


def test_recorded_samples_are_shown_where_the_journal_has_none(tmp_path: Path) -> None:
    write_run(tmp_path)
    run_dir = tmp_path / "runs" / "first"
    journal = JournalSamples(run_dir / "journal")
    book = SampleBook(run_dir, clock=lambda: 0.0)
    book.record(1, journal.of_step(1).to_groups())
    SampleBook(run_dir).record(9, journal.of_step(2).to_groups())
    for arguments, tickets in (
        (["--step", "9"], [3, 3]),
        (["--step", "1:9", "--worst", "-n", "1"], [5]),
        ([], [3, 3]),
    ):
        lines = printed(tmp_path, "--json", *arguments).splitlines()
        assert [json.loads(line)["ticket"] for line in lines] == tickets
    shutil.rmtree(run_dir / "journal")
    assert "runs/first/samples has 4 trajectories of the steps 1 to 9" in printed(tmp_path)
    assert asyncrl("show", "runs/first", "1", cwd=tmp_path)[1].count("completion") == 2
    assert printed(tmp_path, "--refunded").startswith("no trajectory matches")


def test_completions_of_evaluations_are_shown_by_version(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    run_dir = tmp_path / "runs" / "first"
    write_rows(tmp_path / "eval.parquet", [{"prompt": "3+4=", "reward_model": {"ground_truth": "9"}}])
    evaluating = config.model_copy(update={"data": config.data.model_copy(update={"eval": "eval.parquet"})})
    (run_dir / "config.yaml").write_text(evaluating.to_yaml())
    prompt = Prompt(0, np.array(encode("3+4="), dtype=np.int32), "9", "sums")
    for version, answer in ((0, "1"), (20, "7")):
        group = answered(Lease(0, 0, prompt), version, [answer], [0.5])
        append_rows(evaluated_file(run_dir, version), Samples.of_groups([group], outcome="evaluated"))
    assert printed(tmp_path, "--eval").splitlines()[:4] == [
        "evaluation of version 20 · row 0 · sums · reward 0.5 · completed, 2 tokens",
        "  prompt      3+4=",
        "  completion  7",
        "  truth       9",
    ]
    assert json.loads(printed(tmp_path, "--eval", "--step", "0", "--json"))["completion"] == "1"
    code, output = asyncrl("samples", "runs/first", "--eval", "--refunded", cwd=tmp_path)
    assert (code, output) == (2, "error: --eval and --refunded: choose one of them\n")


def test_the_rows_of_the_dataset_are_counted_by_source(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    assert "rows:" not in printed(tmp_path), "a run that was killed does not tell"
    sums = {"solved": 1200, "learning": 3, "never_solved": 4}
    prompts = {"solved": 1201, "learning": 3, "never_solved": 4, "unseen": 5, "skipped": 6, "by_source": {"sums": sums}}
    summary = {"status": "finished", "prompts": prompts}
    (tmp_path / "runs/first/summary.json").write_text(json.dumps(summary))
    assert printed(tmp_path).endswith("rows: 1,201 solved, 3 learning, 4 never solved, 5 unseen\n")
    prompts["by_source"] |= {"code": {"solved": 1, "learning": 0, "never_solved": 0}}
    (tmp_path / "runs/first/summary.json").write_text(json.dumps(summary))
    assert printed(tmp_path).endswith(
        "  sums: 1,200 solved, 3 learning, 4 never solved\n  code: 1 solved, 0 learning, 0 never solved\n"
    )
