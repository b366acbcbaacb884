"""Models and data files of the Hugging Face hub, by their names there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.util.files import WEIGHT_SUFFIXES

MODEL = re.compile(r"[\w.-]+/[\w.-]+")
DATA_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([\w./-]+?))?/(.+)")
"""`hf://datasets/OWNER/NAME/FILE`, with a revision as `NAME@REVISION`."""
LEFT_OUT = [*(f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"), "original/*", "onnx/*", ".*"]
"""Files of a model that are not downloaded: its weights in other formats."""


def fetch(config: Config, console: Console) -> Config:
    """The config with files of this machine in place of names of the hub: files missing in the hub's cache are
    downloaded.

    HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and the other variables of huggingface_hub apply. Raises ConfigError if the hub
    does not answer, or does not have the model or file.
    """
    if config.recipe is None and is_model_name(config.model.path):
        folder = fetch_model(config, console)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    data = {
        key: [_fetch_file(f"data.{key}", file, console) for file in files]
        for key, files in (("train", config.data.train_files), ("eval", config.data.eval_files))
        if any(map(DATA_FILE.fullmatch, files))
    }
    return config.model_copy(update={"data": config.data.model_copy(update=data)}) if data else config


def is_model_name(path: str) -> bool:
    """True if a model path is not a folder of this machine, and may be a model of the hub."""
    return MODEL.fullmatch(path) is not None and not Path(path).exists()


def fetch_model(config: Config, console: Console) -> str:
    """The folder of a model of the hub."""
    from huggingface_hub import snapshot_download

    name = config.model.path
    left_out = LEFT_OUT if config.model.trust_remote_code else [*LEFT_OUT, "*.py"]
    return _download(
        "model.path",
        name,
        console,
        lambda offline: snapshot_download(name, ignore_patterns=left_out, local_files_only=offline),
    )


def _fetch_file(key: str, file: str, console: Console) -> str:
    found = DATA_FILE.fullmatch(file)
    if found is None:
        return file
    from huggingface_hub import hf_hub_download

    name, revision, inside = found.groups()
    return _download(
        key,
        file,
        console,
        lambda offline: hf_hub_download(name, inside, repo_type="dataset", revision=revision, local_files_only=offline),
    )


def _download(key: str, name: str, console: Console, download: Callable[[bool], str]) -> str:
    """Returns the result of `download(local_files_only)`."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return download(True)
    except LocalEntryNotFoundError:
        console.print(f"{key} = {name}: downloading it from the hub ...", highlight=False, markup=False)
    except HFValidationError as error:
        raise ConfigError(f"{key} = {name!r}: not a name of the hub: {error}") from None
    try:
        return download(False)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key} = {name!r}: there is no such file or folder here, and it cannot be had from the hub: {reason}; "
            "check the name, HF_TOKEN and HF_HUB_OFFLINE, or use `hf download` elsewhere and give the path of its copy"
        ) from None
