"""Nothing that is read or received can be run: no module has the means."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from asyncrl.config.sections import ModelConfig
from asyncrl.util.model_files import load_tokenizer

PACKAGE = Path(__file__).parents[2] / "asyncrl"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"torch.load", "torch.package", "numpy.load", "np.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}


@pytest.fixture(scope="module")
def trees() -> list[tuple[str, ast.AST]]:
    """The place of each node in the code of the package, and the node."""
    return [
        (f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node)
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
    ]


def test_no_module_imports_what_loads_objects(trees: list[tuple[str, ast.AST]]) -> None:
    found = []
    for where, node in trees:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{where} imports {name}" for name in names if name.split(".")[0] in MODULES]
    assert found == []


def test_no_call_loads_objects(trees: list[tuple[str, ast.AST]]) -> None:
    calls = [(where, ast.unparse(node.func)) for where, node in trees if isinstance(node, ast.Call)]
    assert [f"{where}: {name}" for where, name in calls if name in CALLS] == []
    assert any(name == "yaml.load" for _, name in calls), "names of calls are found"


def test_code_of_models_is_not_trusted_unless_asked_for(trees: list[tuple[str, ast.AST]]) -> None:
    assert ModelConfig.model_fields["trust_remote_code"].default is False
    assert inspect.signature(load_tokenizer).parameters["trust_remote_code"].default is False
    trusted = [
        where
        for where, node in trees
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) == "True"
    ]
    assert trusted == []
