"""Whole runs with the roles beside policy and generator, and with data and rewards of other systems' forms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

Start = Callable[..., Launched]


def make_reward_model(folder: Path, tokenizer_from: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_from / name, folder / name)


def test_ppo_with_critic_ranks_reference_and_reward_model(launch: Start, demo_folder: Path, tmp_path: Path) -> None:
    make_reward_model(tmp_path / "rm", demo_folder / "demo" / "model")
    run = launch(
        "--config", "ppo_gae", "--steps", "5", *SMALL, "generator.group_size=1", "replay.groups_per_step=32",
        "critic.ranks=1", "critic.warmup_steps=2", "algorithm.kl_loss_coef=0.01",
        "rewards={exact: 1.0, reward_model: 0.1}", f"reward_options={{reward_model: {{path: {tmp_path / 'rm'}}}}}",
    )  # fmt: skip
    code, output = run.end(timeout_s=250)
    assert code == 0, output
    assert run.left_over() == []
    summary, rows = run.summary(), run.rows()
    check_ledger(summary)
    assert summary["ledger"]["refunded"] == {}, "with a critic every answer is a signal"
    assert [row["learner/grad_norm"] > 0 for row in rows] == [False, False, True, True, True]
    for row in rows:
        assert {"critic/loss", "critic/value_mean", "kl/reference", "kl/reward_coef"} <= set(row)
    assert rows[0]["critic/value_mean"] == 0.0 and rows[-1]["critic/value_mean"] != 0.0
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert len({reward for row in trace for reward in row["rewards"]}) > 2, "the reward model's share varies"
    assert (run.run_dir / "critic" / "model.safetensors").is_file()
    for role in ("critic-0", "reward_model"):
        assert any(event["event"] in ("critic is up", "reward model is up") for event in run.events(role))


def test_remax_with_greedy_answers_beside_the_groups(launch: Start) -> None:
    run = launch("--steps", "3", *SMALL, "algorithm.advantage=remax", "algorithm.loss=reinforce_is")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = run.summary()
    check_ledger(summary)
    groups = pq.read_table(run.run_dir / "trace.parquet").num_rows
    assert summary["greedy_tokens"] >= 3 * (groups - summary["ledger"]["in_flight"])
    greedy = [row["reward/greedy"] for row in run.rows() if "reward/greedy" in row]
    assert greedy and all(0 <= reward <= 1 for reward in greedy), "a step has it if groups were scored since the last"


TRL_REWARD = '''
def accuracy_reward(completions, solution, **kwargs):
    """As in TRL's documentation: conversational completions and a column of the dataset."""
    contents = [completion[0]["content"] for completion in completions]
    assert kwargs["prompts"][0][-1]["role"] == "user" and kwargs["ability"] == ["math"] * len(contents)
    return [1.0 if content == answer else 0.0 for content, answer in zip(contents, solution)]
'''
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["index"] >= 0
    return {"score": float(solution_str.strip() == ground_truth), "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def chat_model(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template that is the last message."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(demo_folder / "demo" / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("reward", "function"), [(TRL_REWARD, "accuracy_reward"), (VERL_REWARD, "compute_score")])
def test_verls_data_and_rewards_of_trl_and_verl_run_unchanged(
    launch: Start, chat_model: Path, tmp_path: Path, reward: str, function: str
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{a + b:02d}"},
            "extra_info": {"split": "train", "index": 20 * a + b, "answer": None},
            "solution": f"{a + b:02d}",
        }
        for a in range(20)
        for b in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    (tmp_path / "theirs.py").write_text(reward)
    run = launch(
        "--steps", "3", *SMALL, f"model.path={chat_model}", f"data.train={tmp_path / 'verl.parquet'}",
        f"rewards={tmp_path / 'theirs.py'}:{function}",
    )  # fmt: skip
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = run.summary()
    check_ledger(summary)
    assert "failed" not in summary["ledger"]["refunded"]
    assert 0.1 < summary["reward_first"] < 0.6
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert {row["data_source"] for row in trace} == {"sums"}
    assert json.loads((run.run_dir / "summary.json").read_text())["skipped_rows"] == 0
