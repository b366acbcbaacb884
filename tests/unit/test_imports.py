"""Imports go down the levels only, and the light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "asyncrl"

LEVELS = [
    {"types", "endpoints", "errors", "files", "processes", "stopwatch", "tokenizer", "redaction", "staleness"},
    {"config", "keys", "sockets", "socket_folder", "bad_peers", "unpack", "user_code"},
    {"store"},
    {"store_client", "store_server", "torch_store"},
    {"algorithms"},
    {"rewards", "data", "replay", "weights", "observe"},
    {"generator", "learner", "plan"},
    {"launch"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
SAME_LEVEL_ALLOWED = {
    ("types", "errors"),
    ("redaction", "files"),
    ("files", "errors"),
    ("tokenizer", "files"),
    ("sockets", "keys"),
    ("sockets", "socket_folder"),
}


def imports() -> list[tuple[Path, str, str]]:
    """(file, importing part, imported part) for all imports of the package by itself, lazy ones included."""
    found: list[tuple[Path, str, str]] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [node.module or ""]
            found += [(file, part, name.split(".")[1]) for name in names if name.startswith("asyncrl.")]
    return found


def test_every_part_has_a_level() -> None:
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in PACKAGE.rglob("*.py")}
    assert parts - {"__init__"} == set(LEVEL)


def test_imports_go_down() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {imported}"
        for file, part, imported in imports()
        if part != imported and LEVEL[imported] >= LEVEL[part] and (part, imported) not in SAME_LEVEL_ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["types", "config", "replay.server", "replay.client", "plan.show", "launch.run", "cli"]
)
def test_light_modules_import_neither_torch_nor_vllm(module: str) -> None:
    code = f"import sys, asyncrl.{module}; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
