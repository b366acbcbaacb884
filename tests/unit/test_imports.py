"""Imports go down the levels only, form no circle, and the light modules stay light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "asyncrl"

LEVELS = [
    {"errors"},
    {"types", "util"},
    {"config", "sandbox"},
    {"wire", "algorithms"},
    {"observe"},
    {"rewards", "environments", "data", "replay", "weights"},
    {"colocate"},
    {"generator", "learner", "plan"},
    {"launch.run_dir", "launch.bottleneck"},
    {"observe.board", "observe.document", "observe.sample_watch", "observe.live", "observe.run_report"}
    | {"observe.sample_search"},
    {"launch"},
    {"cli"},
    {"api"},
    {"__init__"},
]
"""Parts of the package, and modules that are on another level than their part."""
LIGHT = ["types", "config", "data.cursor", "replay.server", "replay.client", "plan.show", "launch.run", "cli"]
LIGHT += ["observe.board"]
HEAVY = {"torch", "torchdata", "vllm", "transformers"}
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def level_of(module: str) -> int:
    """The level of `replay.journal.reader`: its own, or that of `replay`."""
    return LEVEL.get(module, LEVEL[module.split(".")[0]])


def module_name(file: Path) -> str:
    """`replay.journal.reader` for the file of `asyncrl.replay.journal`; a package has its own name."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imported_by(file: Path) -> set[str]:
    """Modules of the package that a file imports, lazily too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [
                full if (full := f"{node.module}.{alias.name}").removeprefix("asyncrl.") in FILES else node.module or ""
                for alias in node.names
            ]
        else:
            continue
        found |= {name.removeprefix("asyncrl.") for name in names if name.startswith("asyncrl.")}
    return found


def test_every_part_has_a_level() -> None:
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in PACKAGE.rglob("*.py")}
    assert parts == {name for name in LEVEL if "." not in name}


def test_imports_go_down() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, file in FILES.items()
        for imported in imported_by(file)
        if name.split(".")[0] != imported.split(".")[0] and level_of(imported) >= level_of(name)
    ]
    assert wrong == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = TopologicalSorter({name: imported_by(file) - {name} for name, file in FILES.items() if name != "__init__"})
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_its_backend_imports_vllm() -> None:
    found = {
        name
        for name, file in FILES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for imported in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if imported.split(".")[0] == "vllm"
    }
    assert found and all(name.startswith("generator.vllm_backend.") for name in found), found


def test_light_modules_import_neither_torch_nor_vllm() -> None:
    code = f"""
import importlib, sys
for name in {LIGHT}:
    importlib.import_module("asyncrl." + name)
    if found := {HEAVY} & sys.modules.keys():
        sys.exit(f"asyncrl.{{name}} imports {{found}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_test_files_have_different_names() -> None:
    """pytest cannot collect two files of one name in folders that are not packages."""
    names = [file.name for file in (PACKAGE.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
