"""A new user starts with a model and a data file of verl's, and names nothing else."""

from __future__ import annotations

import json
import signal
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.launch.fork_server import ForkServer
from tests.helpers.preloaded import Command
from tests.helpers.runs import Launched

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def save_chat_model(folder: Path) -> None:
    """Writes an untrained model with a token for every printable character and a chat template."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *string.printable])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    ).save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    config = Qwen2Config(
        vocab_size=128, **sizes, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=1, pad_token_id=0
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def test_a_gsm8k_file_of_verl_starts_with_nothing_else_named(
    tmp_path: Path, preloaded: ForkServer, asyncrl: Callable[..., str]
) -> None:
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(300)]
    (tmp_path / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = tmp_path / "train.parquet"
    asyncrl("data", "gsm8k", "--from", str(tmp_path / "gsm8k"), "--out", str(train))
    save_chat_model(tmp_path / "model")
    arguments = ["launch", f"model.path={tmp_path / 'model'}", f"data.train={train}"]
    command = Command(preloaded, tmp_path, arguments)
    run = Launched(tmp_path, "run", command)
    try:
        run.wait_until(lambda: "rewards so far are 0" in command.output(), what="the first look", timeout_s=300)
        command.send_signal(signal.SIGINT)
        code, output = run.end(100)
    finally:
        run.kill()
    assert code == 130, output
    assert "gsm8k" in yaml.safe_load((run.run_dir / "config.yaml").read_text())["rewards"]
    assert "It is 2" not in output and "What is" in output, "prompts of the samples that all rewards are 0 for"
