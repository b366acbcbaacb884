"""Models in Hugging Face format: all ranks write them, and the bits are those that the library writes."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_ranks import CASES, CHECKPOINT
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from worlds import CRITIC, make_config, make_model, spawn

from asyncrl.errors import ConfigError
from asyncrl.learner.critic import Critic
from asyncrl.learner.distributed import Ranks
from asyncrl.learner.model import saving
from asyncrl.learner.model.loading import load_policy_model, read_other_files
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.saving import FILE_BYTES, WeightFile, save_model, weight_files, write_file
from asyncrl.util.files import INDEX, SINGLE, read_tensor_descriptions, tensor_files
from asyncrl.util.tokenizer import load_tokenizer
from asyncrl.weights.checkpoint import CheckpointTensor
from benchmarks.families import save_family

Results = tuple[Path, list[dict[str, str]]]


def spawn_ranks(models: Path, out: Path, port: int) -> list[dict[str, Any]]:
    codes = spawn("export_ranks.py", models, out, port, ranks=2, timeout_s=200)
    assert codes == [0, 0], (out / "0.log").read_text()[-3000:] + (out / "1.log").read_text()[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Results:
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    make_model(models / "qwen2")
    for name in {name for name, _ in CASES} - {"qwen2"}:
        save_family(name, models / name)
        for path in (models / "qwen2").glob("tokenizer*"):
            shutil.copy(path, models / name)
    return out, spawn_ranks(models, out, free_port())


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name}-{options}" for name, options in CASES])
def test_two_ranks_write_the_bits_of_the_library(index: int, results: Results) -> None:
    folder = results[0] / str(index) / "model"
    found, expected = weights_in(folder), weights_in(folder.with_name("expected"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == files
    assert {name: path.name for name, path in tensor_files(folder).items()} == {
        name: file for file in files for name in load_file(folder / file)
    }
    sizes = [(folder / file).stat().st_size for file in files]
    assert max(sizes) < 2 * min(sizes), "both ranks have about the same"
    assert (folder / "config.json").read_text() == (folder.with_name("expected") / "config.json").read_text()
    assert not (folder / SINGLE).exists() and not list(folder.glob(".*")) and (folder / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    again = AutoModelForCausalLM.from_pretrained(folder.with_name("expected"), dtype="auto").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_has_the_same_files(results: Results) -> None:
    out, _ = results
    found, expected = out / "checkpoint" / "model", out / str(CHECKPOINT) / "model"
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    assert all(path.read_bytes() == (expected / path.name).read_bytes() for path in found.iterdir())
    assert len(list((out / "checkpoint" / "policy").iterdir())) == 2


def test_all_ranks_hear_of_one_that_cannot_write(results: Results) -> None:
    for found in results[1]:
        assert "the model cannot be written to" in found["full"] and "No space left on device" in found["full"]
        assert found["left"] == "full.partial", "a model that is not complete is not there"


def test_rank_0_writes_all_files_if_another_does_not_see_its_folder(results: Results) -> None:
    out, _ = results
    assert not list(out.glob("host-1*"))
    found, expected = weights_in(out / "host-0"), weights_in(out / "0" / "expected")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not (out / "host-0" / INDEX).exists() and (out / "host-0" / SINGLE).exists()


LETTERS = """
from transformers import PreTrainedTokenizer


class LettersTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "letters.vocab"}

    def __init__(self, vocab_file, **options):
        self.letters = open(vocab_file).read().split()
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: index for index, letter in enumerate(self.letters)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token) if token in self.letters else 0

    def _convert_id_to_token(self, index):
        return self.letters[index]
"""
GENERATION: list[dict[str, Any]] = [
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1, "pad_token_id": 0},
    {"temperature": 0.7},
    {"do_sample": False, "top_k": 20},
    {"do_sample": False, "temperature": 1e-6},
    {"length_penalty": 0.8},
    {"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2], "of_a_later_version": {"a": None}},
]
"""Contents of generation_config.json. The library reads all of them and writes only the last one."""


@pytest.mark.parametrize("generation", [*GENERATION, None])
def test_generation_settings_are_saved_as_they_were(
    generation: dict[str, Any] | None, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if generation is None:
        (folder / "generation_config.json").unlink()
        settings = json.loads((folder / "config.json").read_text()) | {"temperature": 0.6, "eos_token_id": [1, 2]}
        (folder / "config.json").write_text(json.dumps(settings))
    else:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    files = read_other_files(load_policy_model(make_config(folder), str(folder)), [str(folder)])
    assert ("generation_config.json" in files) == (generation is not None)
    for name in ("tokenizer.json", "tokenizer_config.json", *(["generation_config.json"] if generation else [])):
        assert files[name] == (folder / name).read_bytes()
    if generation is None:
        assert json.loads(files["config.json"])["eos_token_id"] == [1, 2], "the ends of completions stay"


def add_unusual_files(folder: Path) -> None:
    """A tokenizer with code of its own, and files of other programs."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    settings = {"tokenizer_class": "LettersTokenizer"}
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_letters.LettersTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_letters.py").write_text(LETTERS)
    (folder / "letters.vocab").write_text("a b c")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION[0]))
    for name in ("pytorch_model.bin", "model.safetensors.index.json.old", "adapter_model.bin", ".hidden", "x.gguf"):
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "config.json").write_text("{}")


def test_models_of_policy_and_critic_have_all_files_but_weights(
    one_rank: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "source")
    add_unusual_files(tmp_path / "source")
    config = make_config(tmp_path / "source", **CRITIC)
    policy, critic = Policy(config, one_rank), Critic(config, one_rank)
    shutil.rmtree(tmp_path / "source")  # all of them were read before the training
    save_model(policy, tmp_path / "model")
    critic.save(tmp_path / "critic")
    for folder in (tmp_path / "model", tmp_path / "critic"):
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert found == {
            "config.json", "generation_config.json", "model.safetensors", "tokenization_letters.py", "letters.vocab",
            "tokenizer_config.json", "model.safetensors.index.json.old", "additional_chat_templates/tool_use.jinja",
        }  # fmt: skip
        assert json.loads((folder / "generation_config.json").read_text()) == GENERATION[0]
        assert load_tokenizer(str(folder), trust_remote_code=True).encode("cab") == [2, 0, 1]
    kinds = [json.loads((tmp_path / name / "config.json").read_text())["architectures"] for name in ("model", "critic")]
    assert kinds == [["Qwen2ForCausalLM"], ["Qwen2ForTokenClassification"]]


def test_a_model_that_cannot_be_saved_is_refused_before_it_is_trained(
    one_rank: Ranks, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("generation parameters are set in the model config")

    monkeypatch.setattr("transformers.Qwen2Config.save_pretrained", refuse)
    with pytest.raises(ConfigError, match="could not be saved after training: ValueError: generation parameters"):
        Policy(make_config(tiny_model), one_rank)


def tensor_of(name: str, elements: int, dtype: torch.dtype = torch.float32) -> CheckpointTensor:
    return CheckpointTensor(name, dtype, (elements,), name, 0)


def test_files_have_equal_parts_of_the_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor_of(str(index), 10 + index % 3) for index in range(40)]
    assert [file.name for file in weight_files(tensors, 4)] == [SINGLE], "so small a model is not shared"
    monkeypatch.setattr(saving, "MIN_SHARE_BYTES", 100)
    for writers in (1, 2, 3, 8):
        files = weight_files(tensors, writers)
        assert [tensor for file in files for tensor in file.tensors] == tensors
        assert [file.rank for file in files] == list(range(writers))
        sizes = [file.num_bytes for file in files]
        assert max(sizes) - min(sizes) <= 2 * 4 * 12
    monkeypatch.setattr(saving, "FILE_BYTES", 200)
    files = weight_files([*tensors, tensor_of("large", 100)], 2)
    assert {file.rank for file in files} == {0, 1} and len({file.name for file in files}) == len(files)
    assert all(file.num_bytes <= 200 for file in files[:-1]) and files[-1].num_bytes == 400 < FILE_BYTES


def test_a_file_has_the_largest_elements_first_as_those_of_the_library(tmp_path: Path) -> None:
    """So each tensor begins at a multiple of the size of its elements."""
    described = [
        tensor_of("odd", 3, torch.uint8), tensor_of("half", 5, torch.bfloat16), tensor_of("full", 7, torch.float32),
    ]  # fmt: skip
    contents = [torch.arange(tensor.num_elements).to(tensor.dtype) for tensor in described]
    write_file(tmp_path / "file", WeightFile("file", 0, tuple(described)), iter(contents))
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[one.name], content) for one, content in zip(described, contents, strict=True))
    data = (tmp_path / "file").read_bytes()
    begins = {name: place["data_offsets"][0] for name, place in read_tensor_descriptions(tmp_path / "file").items()}
    head = struct.unpack("<Q", data[:8])[0]
    assert data[8 + head + begins["odd"] :] == b"\0\1\2" and head % 8 == 0
    assert begins == {"full": 0, "half": 28, "odd": 38}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_rank_holds_the_complete_model(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """100 million parameters in float32, ZeRO stage 3; what both ranks hold without that is a half of it."""
    large = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=12, tie_word_embeddings=False,
        )
    )  # fmt: skip
    num_bytes = 4 * sum(parameter.numel() for parameter in large.parameters())
    large.save_pretrained(tmp_path / "models" / "large")
    del large
    make_model(tmp_path / "models" / "warm")
    out = tmp_path / "out"
    out.mkdir()
    found = spawn_ranks(tmp_path / "models", out, free_port())
    table = {way: [f"{one[way] / (1 << 20):.0f} MiB" for one in found] for way in found[0]}
    print(f"model {num_bytes / (1 << 20):.0f} MiB, memory beyond that before, of each rank: {table}")
    limit = 4 * (1 << 24) + 2 * 4 * 8192 * 768  # what is gathered at a time, and the largest tensor twice
    assert max(one["shares"] for one in found) < limit, table
    assert found[0]["complete"] > num_bytes, table
    assert len(list((out / "shares").glob("*.safetensors"))) == 2
