"""What the start shows of the first row, what it refuses, and the rows that it reads meanwhile."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data.rows import check_dataset
from asyncrl.environments.environment import Schema
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.row_checks import PromptScan, check_first_row
from tests.helpers.chat_models import QWEN, save_chat_model

ASK = [{"role": "user", "content": "What is 12*34?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}}}
TOOL: Schema = {"type": "function", "function": {"name": "evaluate", "description": "", "parameters": PARAMETERS}}


def written(folder: Path, *prompts: Any, **overrides: Any) -> Config:
    """A config with these prompts, for the chat model in the folder `model`."""
    if not (folder / "model").exists():
        save_chat_model(folder / "model")
    rows = [{"prompt": prompt, "answer": "408", "data_source": "sums"} for prompt in prompts]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {"model.path": str(folder / "model"), "data.train": str(folder / "rows.jsonl")}
    values |= {"data.columns.ground_truth": "answer"}
    return load_config(None, values | {name.replace("__", "."): value for name, value in overrides.items()})


def shown(config: Config, **tools: list[Schema]) -> tuple[dict[str, str], str]:
    """The lines, and what was printed."""
    output = io.StringIO()
    first = check_first_row(config, prompt_tokens=500, tools=tools)
    first.show(Console(file=output, width=80))
    return first.lines, output.getvalue()


def test_the_first_prompt_is_shown_with_its_special_tokens_and_its_end(tmp_path: Path) -> None:
    lines, printed = shown(written(tmp_path, ASK))
    prompt = "<|im_start|>user\\nWhat is 12*34?<|im_end|>\\n<|im_start|>assistant\\n"
    assert lines["prompt"].startswith(f"'{prompt}', ") and f"prompt     '{prompt}', " in printed
    assert lines["truth"] == "'408'" and lines["ends with"].startswith("'<|im_end|>' (")
    assert "warning" not in printed
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    assert shown(written(tmp_path, begun))[0]["prompt"].startswith(f"'{prompt}It is', ")
    lines, _ = shown(written(tmp_path, "1+1=" * 120))
    assert lines["prompt"].startswith("'1+1=") and "1+1=', " in lines["prompt"] and len(lines["prompt"]) < 430


def test_the_ground_truth_is_shown_as_the_reward_reads_it(tmp_path: Path) -> None:
    assert shown(written(tmp_path, ASK, rewards="number"))[0]["truth"] == "'408', read by number as 408"


def test_reward_functions_are_called_once_for_the_first_row_that_each_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(prompts, completions): return [len(prompt) for prompt in prompts]\n"
                                      "def other(completions, level): return level\n"
                                      "def bad(completions, levle): return levle\n")  # fmt: skip
    config = written(tmp_path, "1+1=", rewards={"sums": "mine.py:score", "levels": "mine.py:other"})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "2", "answer": "3", "data_source": "levels", "level": 7}))
    lines, printed = shown(config)
    made_up = r"'So it is \\boxed{%s}.'"
    assert lines["reward"] == f"mine.py:score gives 4 for {made_up % 408}; mine.py:other gives 7 for {made_up % 3}"
    assert "warning" not in printed
    with pytest.raises(
        ConfigError, match=r"rewards: a made-up completion, .*needs levle, which the data does not have"
    ):
        shown(written(tmp_path, "1+1=", rewards="mine.py:bad"))


def test_functions_that_only_evaluations_have_are_called_for_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def level(completions, level, *, factor=1): return [factor * one for one in level]\n"
    )
    row = {"prompt": "2", "answer": "3", "data_source": "levels", "level": 7}
    (tmp_path / "eval.jsonl").write_text(json.dumps(row))
    own = {
        "eval__rewards": {"mine.py:level": 1.0, "exact": 1.0},
        "reward_options": {"mine.py:level": {"factor": 2}},
    }
    config = written(tmp_path, "1+1=", rewards="exact", data__eval=str(tmp_path / "eval.jsonl"), **own)
    assert shown(config)[0]["reward"] == r"mine.py:level gives 14 for 'So it is \\boxed{3}.'"
    (tmp_path / "eval.jsonl").write_text(json.dumps({**row, "level": "x"}))
    with pytest.raises(
        ConfigError, match=r"^eval\.rewards: a made-up completion, .* returned .xx. .str., not a finite"
    ):
        shown(config)


def test_the_first_row_is_the_first_that_is_used(tmp_path: Path) -> None:
    lines, _ = shown(written(tmp_path, "7" * 1900, "1+1="))
    assert lines["prompt"].startswith("'1+1='")
    lines, printed = shown(written(tmp_path, "7" * 1900))
    assert "prompt" not in lines and "tokens     0 to" in printed
    with pytest.raises(DataError, match=r"rows.jsonl, row 0: the prompt has no tokens"):
        shown(written(tmp_path, ""))


def test_a_call_is_shown_as_it_is_written_and_read(tmp_path: Path) -> None:
    config = written(tmp_path, ASK, environment__name="mine.py:Desk")
    lines, _ = shown(config, **{"mine.py:Desk": [TOOL]})
    assert """read as evaluate({"expression": "x", "digits": 3})""" in lines["tool call"]
    assert "<tool_call>" in lines["tool call"] and "<tools>" in lines["prompt"]


def test_a_model_whose_completions_never_end_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path, ASK)
    for name, key in (("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")):
        settings = json.loads((tmp_path / "model" / name).read_text())
        (tmp_path / "model" / name).write_text(json.dumps(settings | {key: None}))
    with pytest.raises(ConfigError, match="no token ends a completion, so that all would be cut; set eos_token in"):
        shown(config)
    lines, _ = shown(written(tmp_path, ASK, generator__stop="\\n"))
    assert lines["ends with"] == repr("\\n")


def test_tokens_above_the_embedding_are_shown(tmp_path: Path) -> None:
    config = written(tmp_path, "1+1=")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    rows, (lines, _) = settings["vocab_size"], shown(config)
    assert lines["tokens"] == f"0 to {rows - 1}, the embedding has {rows} rows"
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | {"vocab_size": rows - 1}))
    assert shown(config)[0]["tokens"].endswith(
        f"has {rows - 1} rows: a prompt with a token from {rows - 1} on is an error"
    )


def test_what_is_probably_a_mistake_is_a_warning(tmp_path: Path) -> None:
    _, printed = shown(written(tmp_path, json.dumps(ASK)))
    assert (
        "warning: the first prompt is the text of a chat in JSON, which the model reads as text; give a list" in printed
    )
    _, printed = shown(written(tmp_path, ASK, data__template_options={"thinks": True, "message": 1}))
    assert "warning: data.template_options: the model's chat template has no thinks\n" in printed
    save_chat_model(tmp_path / "model", template=QWEN, stop="<|endoftext|>")
    _, printed = shown(written(tmp_path, ASK))
    assert "its chat template ends a turn with <|im_end|>" in printed and "generator.stop='<|im_end|>'" in printed


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    config = written(tmp_path, "1+1=")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model: its tokenizer cannot be loaded: "):
        shown(config)


def scanned(config: Config) -> PromptScan:
    """A scan that has ended."""
    with PromptScan(config, limit_tokens=10, has_trained=False) as scan:
        deadline_s = time.monotonic() + 20
        while scan.problem is None and scan.num_scanned < 300 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    return scan


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([{"role": "user", "content": None}], r"rows.jsonl, row 299: 'prompt', message 0: content = None; it must be"),
        ("1+1=<|im_end|>", r"rows.jsonl, row 299: the prompt ends with '<|im_end|>'"),
        ("", r"rows.jsonl, row 299: the prompt has no tokens"),
    ],
)
def test_a_scan_finds_the_row_that_training_would_end_at(tmp_path: Path, bad: Any, error: str) -> None:
    config = written(tmp_path, *["1+1="] * 299, bad)
    assert check_dataset(config) == 300
    problem = scanned(config).problem
    assert problem is not None and error in str(problem)


def test_a_scan_counts_rows_above_the_limit_and_leaves_out_what_the_filter_does(tmp_path: Path) -> None:
    prompts = ["a b c d e f g h" if number % 3 == 0 else "a" for number in range(300)]
    scan = scanned(written(tmp_path, *prompts))
    assert (scan.problem, scan.summary) == (None, {"rows_scanned": 300, "rows_too_long": 100})
    (tmp_path / "mine.py").write_text("def keep(row):\n    return bool(row['prompt'])\n")
    custom = {"filter": f"{tmp_path / 'mine.py'}:keep"}
    scan = scanned(written(tmp_path, *prompts[:-1], "", data__custom=custom))
    assert (scan.problem, scan.num_scanned) == (None, 300)
