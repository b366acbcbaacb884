"""The tiny tokenizer as a model folder, and Parquet files of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.data.row_files import write_rows
from asyncrl.data.tiny_model import make_tokenizer

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""The contents one after another, and = where the assistant answers."""


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A row in verl's schema whose prompt is its number."""
    values = {
        "data_source": "numbers",
        "prompt": f"{number:03d}=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number},
    }
    return values | changes


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def chat_folder(tokenizer_folder: Path) -> Path:
    """The tokenizer with a chat template."""
    (tokenizer_folder / "chat_template.jinja").write_text(CHAT)
    return tokenizer_folder


@pytest.fixture
def dataset(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Config]:
    """Writes rows as one file each and returns a config that names them."""

    def write(*files: list[dict[str, Any]], **overrides: Any) -> Config:
        paths = []
        for number, rows in enumerate(files):
            paths.append(str(tmp_path / f"part{number}.parquet"))
            write_rows(Path(paths[-1]), rows)
        values = {"model.path": str(tokenizer_folder), "data.train": paths}
        return load_config(None, values | {name.replace("__", "."): value for name, value in overrides.items()})

    return write
