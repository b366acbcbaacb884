"""The reward model: a tiny one in its own process, asked by several clients; and folders that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from asyncrl.errors import ConfigError, PeerTimeoutError
from asyncrl.rewards.calling import CompletedGroup
from asyncrl.rewards.model_server import RewardModel, run_reward_model
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.reward_model import ModelClient, connect, uses_reward_model
from asyncrl.rewards.table import check_rewards, load_reward
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.reward_pool import gather, make_config, prompt, save_tokenizer, submit, tokens

LETTERS = ["<pad>", "<eos>", "<unk>", *"0123456789+=abcdefghijklmnopqrstuvwxyz: "]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"


def save_model(
    folder: Path,
    *,
    labels: int = 1,
    kind: type = Qwen2ForSequenceClassification,
    pad: int | None = 0,
    vocabulary: int = 64,
) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=vocabulary,
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=48,
        num_labels=labels,
        pad_token_id=pad,
    )
    kind(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(LETTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("reward_model"))


def endpoints_at(socket: Path) -> Endpoints:
    return Endpoints("run", "", "", "", reward_model=f"ipc://{socket}")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Endpoints]]:
    """Starts a server in a thread; returns where it is."""
    stop, threads = threading.Event(), []

    def serve(folder: Path, **options: object) -> Endpoints:
        config = make_config("reward_model", options={"reward_model": {"path": str(folder), **options}})
        ends = endpoints_at(tmp_path / "model")
        thread = threading.Thread(
            target=run_reward_model, args=(config,), kwargs={"endpoints": ends, "should_stop": stop.is_set}
        )
        thread.start()
        threads.append(thread)
        return ends

    yield serve
    stop.set()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def direct(folder: Path, text: str) -> float:
    """The score by transformers alone."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.tensor([[LETTERS.index(token) for token in split(text)]])
    with torch.no_grad():
        return model(input_ids=ids).logits.item()


def split(text: str) -> list[str]:
    found: list[str] = []
    for piece in text.split("<eos>"):
        found += [*piece, "<eos>"]
    return found[:-1]


def test_scores_are_those_of_the_model_alone_whatever_the_batch(model_folder: Path) -> None:
    texts = ["1+2=3", "a", "12+07=19 is long", "zz", "1+2=4"]
    expected = [direct(model_folder, text) for text in texts]
    for tokens_per_batch in (1, 12, 1000):
        model = RewardModel(str(model_folder), tokens_per_batch=tokens_per_batch, device="cpu")
        scores = model.score([model.tokenize("", text) for text in texts])
        assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == len(texts)


def test_a_model_without_a_padding_token_scores_in_batches(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", pad=None)
    model = RewardModel(str(folder), device="cpu")
    texts = ["1+2=3", "a", "00", "<eos>"]
    ids = [model.tokenize("", text) for text in texts]
    assert model.score(ids) == pytest.approx([model.score([one])[0] for one in ids], abs=1e-5)
    assert model.score(ids)[:2] == pytest.approx([direct(folder, text) for text in texts[:2]], abs=1e-5)


def test_chats_have_the_options_of_the_run_and_of_the_row(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ '1' if thinks else '0' }}{% endfor %}"
    )
    ask, prefill = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for options, row, digit in (({}, {}, "0"), ({"thinks": True}, {}, "1"), ({"thinks": True}, {"thinks": False}, "0")):
        model = RewardModel(str(folder), device="cpu", template_options=options)
        for chat, text in (([ask], f"a{digit}c{digit}"), ([ask, prefill], f"a{digit}bc{digit}")):
            assert model.tokenize(chat, "c", row) == [LETTERS.index(token) for token in text]


def test_a_text_has_the_tokens_before_it_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, end = ((text, LETTERS.index(text)) for text in ("<unk>", "<eos>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[begin, end]
    )
    tokenizer.save_pretrained(folder)
    model = RewardModel(str(folder), device="cpu")
    for text in ("a", "<unk>a"):
        assert model.tokenize(text, "b") == [LETTERS.index(token) for token in ("<unk>", "a", "b", "<eos>")]


def test_chats_are_written_with_the_models_own_template(model_folder: Path, serve) -> None:
    connect(serve(model_folder))
    chat = [{"role": "user", "content": "1+2"}]
    group = CompletedGroup("-", ["3", "44"], [[1]] * 2, "", "s", chat=chat, deadline_s=time.monotonic() + 60)
    scores = load_reward("reward_model", {"path": str(model_folder)})(group)
    connect(None)
    expected = [direct(model_folder, f"user: 1+2<eos>assistant: {text}<eos>") for text in ("3", "44")]
    assert [score for score, _, _ in scores] == pytest.approx(expected, abs=1e-5)


def test_a_text_longer_than_the_window_fails_alone(model_folder: Path, serve) -> None:
    connect(serve(model_folder))
    group = CompletedGroup("1+1=", ["2", "2" * 45], [[1]] * 2, "", "s", deadline_s=time.monotonic() + 60)
    good, bad = load_reward("reward_model", {"path": str(model_folder)})(group)
    connect(None)
    assert good == (pytest.approx(direct(model_folder, "1+1=2"), abs=1e-5), {}, "")
    assert bad[2] == (
        "reward reward_model on data source 's': ValueError: prompt and completion are 49 tokens for the reward model, "
        "its window is 48: lower generator.max_new_tokens or data.max_prompt_tokens, or take another model"
    )


def test_reward_workers_ask_the_process_of_the_reward_model(
    model_folder: Path, serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path)
    endpoints = serve(model_folder)
    options = {"reward_model": {"path": str(model_folder)}}
    config = make_config({"reward_model": 2.0, "exact": 1.0}, options=options, workers=2)
    pool = RewardPool(config, tokenizer_path=str(tmp_path), endpoints=endpoints)
    try:
        for key in range(4):
            submit(pool, key, [tokens("19"), tokens(str(key))], prompt())
        found = gather(pool, 4)
    finally:
        pool.close()
    for key, scored in found.items():
        scores = [direct(model_folder, "12+07=19"), direct(model_folder, f"12+07={key}")]
        assert scored.errors == ["", ""]
        assert scored.rewards == pytest.approx([2 * scores[0] + 1, 2 * scores[1]], abs=1e-4)
        assert scored.parts[0] == {"reward_model": pytest.approx(scores[0], abs=1e-5), "exact": 1.0}


def test_no_answer_names_the_process_and_the_time(tmp_path: Path) -> None:
    with pytest.raises(PeerTimeoutError) as raised:
        ModelClient(endpoints_at(tmp_path / "nobody")).score("p", ["c"], 0.2)
    assert str(raised.value) == (
        f"the reward model process at ipc://{tmp_path}/nobody did not answer 'Score' within 0.2 s "
        "(generator.reward_timeout_s)"
    )


def test_without_an_address_the_failure_says_so(model_folder: Path) -> None:
    ((_, _, error),) = load_reward("reward_model", {"path": str(model_folder)})(
        CompletedGroup("p", ["c"], [[1]], "", "s")
    )
    assert "no reward model process" in error


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda folder: save_model(folder, labels=2),
            "its head has 2 labels, a reward is 1 number; give a folder with",
        ),
        (lambda folder: save_model(folder, kind=Qwen2ForCausalLM), "a Qwen2ForCausalLM; give a folder with"),
        (lambda folder: rename_kind(save_model(folder, kind=Qwen2ForCausalLM)), "its weights have no score head"),
        (lambda folder: folder, "there is no config.json; give a folder with"),
        (lambda folder: pickle_weights(save_model(folder)), "there is no model.safetensors; save it in that format"),
    ],
)
def test_a_model_that_cannot_score_is_refused_before_the_start_and_at_load(
    tmp_path: Path, make: Callable[[Path], Path], text: str
) -> None:
    folder = make(tmp_path / "m")
    with pytest.raises(ConfigError) as raised:
        check_rewards(make_config("reward_model", options={"reward_model": {"path": str(folder)}}))
    assert str(raised.value).startswith(f"reward_options.reward_model.path = {str(folder)!r}: ")
    assert text in str(raised.value) and "use a reward function instead" in str(raised.value)
    with pytest.raises(ConfigError, match=r"reward_options\.reward_model\.path"):
        RewardModel(str(folder))


def rename_kind(folder: Path) -> Path:
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}))
    return folder


def pickle_weights(folder: Path) -> Path:
    """The format that transformers reads where there are no safetensors."""
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_weights_that_would_be_random_are_refused_at_load(model_folder: Path, tmp_path: Path) -> None:
    """The head is there, and another part is not."""
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its weights lack model\.norm\.weight, which would be random"):
        RewardModel(str(folder), device="cpu")


def test_whether_a_run_needs_the_process() -> None:
    assert uses_reward_model(make_config({"a": {"reward_model": 1.0}, "b": "exact"}))
    assert not uses_reward_model(make_config("exact"))


def test_the_process_runs_by_itself_and_stops(model_folder: Path, tmp_path: Path) -> None:
    """In a separate process, as the launcher has it."""
    script = f"""
        from pathlib import Path
        from asyncrl.rewards.model_server import run_reward_model
        from asyncrl.wire.endpoints import Endpoints
        from tests.helpers.reward_pool import make_config
        config = make_config("reward_model", options={{"reward_model": {{"path": {str(model_folder)!r}}}}})
        stop = Path({str(tmp_path / "stop")!r})
        ends = Endpoints("run", "", "", "", reward_model="ipc://{tmp_path}/own")
        run_reward_model(config, endpoints=ends, should_stop=stop.exists)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2]) as process:
        try:
            assert ModelClient(endpoints_at(tmp_path / "own")).score("1+2=", ["3"], 60.0) == [
                pytest.approx(direct(model_folder, "1+2=3"), abs=1e-5)
            ]
            (tmp_path / "stop").touch()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
