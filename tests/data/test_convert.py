"""Downloaded datasets in every form they come in, converted by the command and read as a dataset."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config.load import load_config
from asyncrl.data.convert import CONVERTERS
from asyncrl.data.cursor import PromptCursor
from asyncrl.data.rows import PromptTable, check_dataset
from asyncrl.errors import AsyncrlError, ConfigError, DataError
from asyncrl.util.text import last_boxed

Records = list[dict[str, Any]]

GSM8K: Records = [
    {"question": "Half of 48 and 24?", "answer": "48/2 = <<48/2=24>>24\n24+24=48\n#### 48"},
    {"question": "A thousand and two?", "answer": "1000+2\n#### 1,002"},
]
MATH: Records = [
    {
        "problem": "What is half?",
        "level": "Level 5",
        "type": "Algebra",
        "solution": r"First $\boxed{1}$, then $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "Prove it.", "level": "Level 1", "type": "Algebra", "solution": "Clearly."},
    {"problem": "2+2?", "level": "Level 2", "type": "Algebra", "solution": r"It is $\boxed 4$."},
]
MATH500: Records = [
    {"problem": "1+1?", "solution": r"\boxed{2}", "answer": "2", "subject": "Algebra", "level": 3, "unique_id": "a/1"},
    {"problem": "1+2?", "solution": "Count.", "answer": "3", "subject": "Algebra", "level": 1, "unique_id": "a/2"},
]
DIALOG = "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: How are you?\n\nSay.\n\nAssistant:"
HH: Records = [
    {"chosen": f"{DIALOG} Fine.", "rejected": f"{DIALOG} Go away."},
    {"chosen": f"{DIALOG} Fine.", "rejected": "\n\nHuman: Bye\n\nAssistant: Bye."},
    {"chosen": f"{DIALOG} Fine.", "rejected": f"{DIALOG}"},
    {"chosen": f"{DIALOG} Fine.\n\nHuman: Good", "rejected": f"{DIALOG} No."},
    {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d"},
]


def parquet(file: Path, records: Records) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), file)


def json_lines(file: Path, records: Records) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


def one_each(folder: Path, records: Records) -> None:
    folder.mkdir(parents=True)
    # 10 is after 2 in numbers, before it in letters.
    for name, record in zip((1, 2, 10), records, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(record))


FORMS: list[tuple[str, str, str, Callable[[Path, Records], None], Records]] = [
    ("gsm8k", "train", "main/train-00000-of-00001.parquet", parquet, GSM8K),
    ("gsm8k", "test", "test-00000-of-00001.parquet", parquet, GSM8K),
    ("gsm8k", "train", "train.jsonl", json_lines, GSM8K),
    ("gsm8k", "test", "grade_school_math/data/test.jsonl", json_lines, GSM8K),
    ("math", "train", "train/algebra", one_each, MATH),
    ("math", "test", "MATH/test/algebra", one_each, MATH),
    ("math", "train", "data/train-00000-of-00001.parquet", parquet, MATH),
    ("math", "test", "algebra/test-00000-of-00001.parquet", parquet, MATH),
    ("math", "train", "train.jsonl", json_lines, MATH),
    ("hh-rlhf", "train", "helpful-base/train.jsonl.gz", json_lines, HH),
    ("hh-rlhf", "test", "test.jsonl.gz", json_lines, HH),
    ("hh-rlhf", "train", "harmless-base/train.jsonl", json_lines, HH),
    ("hh-rlhf", "test", "data/test-00000-of-00001.parquet", parquet, HH),
]
WANTED = {
    "gsm8k": (["48", "1002"], "2 rows written, 0 skipped"),
    "math": ([r"\frac{1}{2}", "4"], r"2 rows written, 1 skipped: no answer in \boxed{}"),
    "hh-rlhf": (
        ["Fine."],
        "1 rows written, 1 skipped: chosen and rejected answer different dialogs, 1 skipped: empty reply, "
        "1 skipped: human and assistant do not take turns, 1 skipped: the assistant has not the last word",
    ),
}


def run(name: str, folder: Path, out: Path, *options: str) -> str:
    done = CliRunner().invoke(
        app, ["data", name, "--from", str(folder), "--out", str(out), *options], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(("name", "split", "path", "write", "records"), FORMS)
def test_every_form_gives_the_same_dataset(
    name: str,
    split: str,
    path: str,
    write: Callable[[Path, Records], None],
    records: Records,
    tmp_path: Path,
    chat_folder: Path,
) -> None:
    source, out = tmp_path / "source", tmp_path / "out" / "rows.parquet"
    write(source / path, records)
    answers, report = WANTED[name]
    assert run(name, source, out, "--split", split) == f"{out}: {report}\n"
    content = out.read_bytes()
    run(name, source, out, "--split", split)
    assert out.read_bytes() == content
    config = load_config(None, {"model.path": str(chat_folder), "data.train": str(out), "data.shuffle": False})
    assert check_dataset(config) == len(answers)
    cursor = PromptCursor(config, limit_tokens=1000)
    prompts = [next(cursor) for _ in answers]
    assert [prompt.ground_truth for prompt in prompts] == answers
    assert {prompt.data_source for prompt in prompts} == {CONVERTERS[name].data_source}
    assert all(prompt.extra_info["split"] == split for prompt in prompts)
    assert all(prompt.chat and prompt.chat[-1]["role"] == "user" for prompt in prompts)
    assert pq.read_schema(out).names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def table(tmp_path: Path, out: Path) -> PromptTable:
    return PromptTable(load_config(None, {"model.path": "m", "data.train": str(out)}))


def test_the_instruction_ends_the_question(tmp_path: Path) -> None:
    json_lines(tmp_path / "train.jsonl", GSM8K)
    out = tmp_path / "out.parquet"
    for options, ending in (
        ([], '\n\nThink step by step, then give the final answer after "####".'),
        (["--instruction", "Be quick."], "\n\nBe quick."),
        (["--instruction", ""], ""),
    ):
        run("gsm8k", tmp_path, out, *options)
        assert table(tmp_path, out)[0]["prompt"] == [{"role": "user", "content": f"Half of 48 and 24?{ending}"}]


def test_several_files_of_a_split_are_read_in_order(tmp_path: Path) -> None:
    for number in (0, 1):
        parquet(tmp_path / f"main/train-0000{number}-of-00002.parquet", GSM8K[number : number + 1])
    parquet(tmp_path / "socratic/train-00000-of-00001.parquet", [{"question": "?", "answer": "#### 0"}])
    out = tmp_path / "out.parquet"
    run("gsm8k", tmp_path, out)
    rows = table(tmp_path, out)
    assert [rows[i]["ground_truth"] for i in range(len(rows))] == ["48", "1002"]
    assert [rows[i]["extra_info"]["index"] for i in range(len(rows))] == [0, 1]


def test_math_500_has_answers_of_its_own(tmp_path: Path) -> None:
    json_lines(tmp_path / "test.jsonl", MATH500)
    run("math", tmp_path, tmp_path / "out.parquet", "--split", "test")
    rows = table(tmp_path, tmp_path / "out.parquet")
    assert [rows[i]["ground_truth"] for i in range(2)] == ["2", "3"]
    assert rows[0]["extra_info"]["subject"] == "Algebra"
    assert rows[0]["extra_info"]["level"] == "3"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{\frac{a}{b^{2}}} is it", r"\frac{a}{b^{2}}"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\left\{ x }", r"\left\{ x"),
        (r"$\boxed 5$", "5"),
        (r"$\fbox{C}$", "C"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("five", None),
    ],
)
def test_the_answer_is_in_the_last_box(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer


def test_hh_rlhf_keeps_both_replies(tmp_path: Path) -> None:
    json_lines(tmp_path / "helpful-base/train.jsonl.gz", HH)
    json_lines(tmp_path / "harmless-base/train.jsonl.gz", HH)
    run("hh-rlhf", tmp_path, tmp_path / "out.parquet")
    rows = table(tmp_path, tmp_path / "out.parquet")
    assert [rows[i]["extra_info"]["subset"] for i in range(len(rows))] == ["harmless-base", "helpful-base"]
    assert rows[0]["prompt"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "How are you?\n\nSay."},
    ]
    assert (rows[0]["extra_info"]["chosen"], rows[0]["extra_info"]["rejected"]) == ("Fine.", "Go away.")


def test_replies_to_a_prompt_are_the_same_rows_as_transcripts(tmp_path: Path) -> None:
    parquet(tmp_path / "data/train-00000-of-00001.parquet", HH[:1])
    run("hh-rlhf", tmp_path, tmp_path / "transcripts.parquet")
    replies = [{"prompt": DIALOG, "response": "Fine.", "chosen": "Fine.", "rejected": "Go away."}]
    parquet(tmp_path / "data/train-00000-of-00001.parquet", replies)
    run("hh-rlhf", tmp_path, tmp_path / "replies.parquet")
    assert pq.read_table(tmp_path / "replies.parquet") == pq.read_table(tmp_path / "transcripts.parquet")


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("gsm8k", {"question": "?", "answer": "48"}, "line 2: 'answer' does not end in #### and a number: '48'"),
        ("gsm8k", {"question": "?"}, "line 2: 'answer' is missing; the fields are question"),
        ("gsm8k", {"question": 1, "answer": "#### 1"}, "line 2: 'question' = 1; it must be a string"),
        ("math", {"problem": "?", "solution": None}, "line 2: 'solution' = None; it must be a string"),
        ("hh-rlhf", {"chosen": "Hello", "rejected": "Bye"}, "line 2: 'chosen' does not begin with 'Human:' or"),
        ("hh-rlhf", [], "line 2: list; it must be a JSON object"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, name: str, record: Any, message: str) -> None:
    good = {"gsm8k": GSM8K, "math": MATH, "hh-rlhf": HH}[name][0]
    file = tmp_path / "train.jsonl"
    json_lines(file, [good, record])
    out = tmp_path / "out.parquet"
    with pytest.raises(DataError) as error:
        run(name, tmp_path, out)
    assert f"{file}, " in str(error.value)
    assert message in str(error.value)
    assert not out.exists()


def test_malformed_files_are_named(tmp_path: Path) -> None:
    for name, content, message in (
        ("train.jsonl", b'{"question": ', "train.jsonl, line 1: not JSON"),
        ("train.jsonl", b"\xff", "train.jsonl cannot be read"),
        ("main/train-0.parquet", b"no", "train-0.parquet is not a Parquet file"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        with pytest.raises((ConfigError, DataError), match=message):
            run("gsm8k", tmp_path, tmp_path / "out.parquet")
    parquet(tmp_path / "main/train-0.parquet", [GSM8K[0], GSM8K[1] | {"answer": None}])
    with pytest.raises(DataError, match=r"train-0.parquet, row 1: 'answer' = None; it must be a string"):
        run("gsm8k", tmp_path, tmp_path / "out.parquet")
    (tmp_path / "train.jsonl.gz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"train.jsonl.gz cannot be read"):
        run("hh-rlhf", tmp_path, tmp_path / "out.parquet")


def test_missing_files_and_splits_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    cases: list[tuple[type[AsyncrlError], Path, list[str], str]] = [
        (ConfigError, tmp_path / "none", [], r"--from .*none: no such folder; give the folder"),
        (ConfigError, tmp_path, [], r"no file of the split 'train' in it; looked for main/train-\*.parquet, "),
        (ConfigError, tmp_path, ["--split", "tests"], r"--split = 'tests': there is no such one; did you mean test\?"),
    ]
    for kind, folder, options, message in cases:
        with pytest.raises(kind, match=message):
            run("gsm8k", folder, out, *options)
    json_lines(tmp_path / "train.jsonl", MATH[1:2])
    with pytest.raises(ConfigError, match=r"no row of the split 'train' can be used \(1 skipped: no answer"):
        run("math", tmp_path, out)


def test_the_command_prints_the_error_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "data", "gsm8k", "--from", str(tmp_path), "--out", "x.parquet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --from {tmp_path}: no file of the split 'train'")
