"""Links, names, config keys and commands in README and docs exist in the code; the core path stays short."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from asyncrl.cli import app
from asyncrl.config.config import Config
from asyncrl.config.load import config_keys, option_keys, parse_override

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
GROUP: Any = typer.main.get_command(app)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?(\(\))?")
EXAMPLES = {"guess.py", "mine.py", "my_reward.py", "make_data.py", "file.py", "judge.py", "agents_program.py"}
"""Files of the user in examples."""
MODULES = [file.as_posix() for folder in ("asyncrl", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
MAX_CORE_LINES = 5760

every_page = pytest.mark.parametrize("page", TEXTS)


@every_page
def test_links_lead_to_files_and_headings(page: str) -> None:
    for text, target in LINK.findall(TEXTS[page]):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: [{text}]({target}): no such file"
        if anchor:
            assert anchor in headings(file), f"{page}: [{text}]({target}): no such heading"


def headings(file: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_names_in_links_to_code_exist_there(page: str) -> None:
    for text, target in LINK.findall(TEXTS[page]):
        if not target.endswith(".py"):
            continue
        file = ((ROOT / page).parent / target).resolve()
        for code in CODE.findall(text):
            if code.endswith(".py"):
                assert file.as_posix().endswith(f"/{code}"), f"{page}: [{text}] leads to {target}"
            elif NAME.fullmatch(code):
                assert code.removesuffix("()") in names_in(file), f"{page}: {target} has no {code}"


@cache
def names_in(file: Path) -> set[str]:
    """Functions, classes, constants, and `Class.member`, that a module defines."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = defined(node)
        found |= names
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member}" for inner in node.body for member in defined(inner)}
    return found


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@every_page
def test_modules_named_in_the_text_exist(page: str) -> None:
    for code in CODE.findall(BLOCK.sub("", TEXTS[page])):
        for path in re.findall(r"[a-z_0-9/]+\.py\b", code):
            known = any(file.endswith(f"/{path}") for file in MODULES)
            assert known or path in EXAMPLES, f"{page}: `{path}`: no such module"


@every_page
def test_config_keys_in_the_text_exist(page: str) -> None:
    keys = {*config_keys(), *option_keys()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    text = BLOCK.sub("", TEXTS[page])
    if page.startswith("docs/from-"):
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)  # the keys of the other system
    for code in CODE.findall(text):
        key = re.match(r"([a-z]+(?:\.[a-z_]+)+)(?=$|[=: ])", code)
        if key and not key[1].endswith(".py") and key[1].partition(".")[0] in sections:
            # The page on algorithms has a table of other systems' keys.
            assert key[1] in keys or page == "docs/algorithms.md", f"{page}: `{code}`: no such key"


def commands() -> list[tuple[str, list[str]]]:
    """The page, and the arguments of every `asyncrl` command in its code blocks."""
    found: list[tuple[str, list[str]]] = []
    for page, text in TEXTS.items():
        for block in BLOCK.findall(text):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ")
                if words.startswith("asyncrl ") and "  asyncrl/" not in words:
                    found.append((page, shlex.split(words, comments=True)[1:]))
    return found


@pytest.mark.parametrize(
    ("page", "arguments"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_commands_are_accepted(page: str, arguments: list[str]) -> None:
    group: Any = GROUP
    while hasattr(group, "commands"):
        name, *arguments = arguments
        assert name in group.commands, f"{page}: asyncrl {name}: no such command"
        group = group.commands[name]
    context = group.make_context(group.name, list(arguments))
    keys = {*config_keys(), *option_keys(), *Config.model_fields}
    for override in cast("list[str]", context.params.get("overrides") or []):
        key, _ = parse_override(override)
        assert key in keys or key == "learner.lrr", f"{page}: {override}: no such key"


@every_page
def test_commands_named_in_the_text_exist(page: str) -> None:
    for code in CODE.findall(BLOCK.sub("", TEXTS[page])):
        if words := re.match(r"asyncrl\s+([a-z]+)", code):
            assert words[1] in GROUP.commands, f"{page}: `{code}`: no such command"


def test_the_core_path_is_short_enough_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    section = TEXTS["docs/tour.md"].partition("## The core, in reading order")[2].partition("\n## ")[0]
    core = [ROOT / "docs" / target for _, target in LINK.findall(section) if target.endswith(".py")]
    assert len(core) == len(set(core)) >= 8
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in core)
    with capsys.disabled():
        print(f"\nthe core path has {lines:,} lines in {len(core)} modules")
    assert lines <= MAX_CORE_LINES, f"{lines:,} lines, at most {MAX_CORE_LINES:,}: what does a reader not need?"
