"""Complete runs with roles other than learner, generator and replay queue."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.helpers.runs import SMALL, Launched, check_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

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
    assert summary["ledger"]["refunded"] == {}, "with a critic every trajectory provides a signal"
    assert [row["learner/grad_norm"] > 0 for row in rows] == [False, False, True, True, True]
    for row in rows:
        assert {"critic/loss", "critic/value_mean", "kl/reference"} <= set(row)
    assert rows[0]["critic/value_mean"] == 0.0 and rows[-1]["critic/value_mean"] != 0.0
    trace = pq.read_table(run.run_dir / "trace.parquet").to_pylist()
    assert len({reward for row in trace for reward in row["rewards"]}) > 2, "the reward model's part varies"
    assert (run.run_dir / "critic" / "model.safetensors").is_file()
    for role in ("critic-0", "reward_model"):
        assert any(event["event"] in ("critic is up", "reward model is up") for event in run.events(role))


@pytest.mark.slow
def test_remax_with_a_greedy_completion_for_each_group(launch: Start) -> None:
    run = launch("--steps", "3", *SMALL, "algorithm.advantage=remax", "algorithm.loss=reinforce_is")
    code, output = run.end(timeout_s=200)
    assert code == 0, output
    summary = run.summary()
    check_ledger(summary)
    groups = pq.read_table(run.run_dir / "trace.parquet").num_rows
    assert summary["greedy_tokens"] >= 3 * (groups - summary["ledger"]["in_flight"])
    greedy = [row["reward/greedy"] for row in run.rows() if "reward/greedy" in row]
    assert greedy and all(0 <= reward <= 1 for reward in greedy), "only steps after which groups were scored have it"
