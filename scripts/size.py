"""`python -m scripts.size` prints the size of the project next to its limits: lines, modules, names, keys, commands,
tests and docs."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl"
SMALL = 80
"""A module with fewer lines needs a reason."""


def num_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def num_words(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def line_kinds(files: Iterable[Path]) -> Counter[str]:
    """Counts the lines of each kind: `code`, `docstring`, `comment`, `blank`."""
    kinds: Counter[str] = Counter()
    for file in files:
        text = file.read_text(encoding="utf-8")
        docstrings = _docstring_lines(ast.parse(text))
        comments = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        }
        for number, line in enumerate(text.splitlines(), 1):
            if number in docstrings:
                kinds["docstring"] += 1
            elif number in comments:
                kinds["comment"] += 1
            else:
                kinds["code" if line.strip() else "blank"] += 1
    return kinds


def _docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of strings that stand alone: docstrings, and those after constants and fields."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def class_names(files: Iterable[Path]) -> Counter[str]:
    return Counter(
        node.name for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
    )


def commands() -> tuple[int, int, int]:
    """Returns the numbers of commands, of subcommands, and of options of `simulate`."""
    from typer.main import get_command

    from asyncrl.cli import app

    group = get_command(app)
    listed = getattr(group, "commands", {})
    subcommands = sum(len(getattr(command, "commands", ())) for command in listed.values())
    return (
        len(listed),
        subcommands,
        sum(1 for option in listed["simulate"].params if option.param_type_name == "option"),
    )


def rows() -> list[tuple[str, object, str]]:
    """The measures, their values and their limits."""
    from asyncrl.config.load import config_keys

    modules = sorted(PACKAGE.rglob("*.py"))
    named = [module for module in modules if module.name != "__init__.py"]
    lengths = [num_lines([module]) for module in named]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    kinds = line_kinds(modules)
    shares = ", ".join(f"{kind} {count / kinds.total():.0%}" for kind, count in kinds.most_common())
    num_commands, num_subcommands, num_options = commands()
    docs = sorted((ROOT / "docs").glob("*.md"))
    readme = ROOT / "README.md"
    return [
        ("lines of asyncrl/", num_lines(modules), "40,000"),
        ("  of them", shares, ""),
        ("modules", len(named), "150"),
        (f"modules under {SMALL} lines", sum(length < SMALL for length in lengths), "15"),
        ("median of a module", round(statistics.median(lengths)), "200 to 350"),
        ("class names defined twice", sum(count > 1 for count in class_names(modules).values()), "0"),
        ("file names used twice", sum(count > 1 for count in Counter(module.name for module in named).values()), "10"),
        ("config keys", len(config_keys()), "95"),
        ("commands, subcommands", f"{num_commands} + {num_subcommands}", "18 + 8"),
        ("options of simulate", num_options, "15"),
        ("lines of tests/", num_lines(tests), "40,000"),
        ("  of them helpers", num_lines(test for test in tests if not test.name.startswith("test_")), "5,000"),
        ("lines of benchmarks/", num_lines((ROOT / "benchmarks").rglob("*.py")), "2,500"),
        ("README.md", f"{num_lines([readme])} lines, {readme.stat().st_size / 1000:.1f} KB", "150 lines, 9 KB"),
        ("words of docs/", num_words(docs), "30,000"),
    ]


def main() -> None:
    for name, value, limit in rows():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        print(f"{name:<32} {text:<52} {limit}".rstrip())
    print()
    folders = sorted(path for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py")))
    for folder in folders:
        modules = list(folder.rglob("*.py"))
        named = sum(module.name != "__init__.py" for module in modules)
        print(f"{folder.relative_to(ROOT).as_posix():<32} {num_lines(modules):>6,} lines {named:>4} modules")


if __name__ == "__main__":
    main()
