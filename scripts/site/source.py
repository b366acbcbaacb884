"""Pages with the source code that other pages link to: a site without a forge has to bring it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

HIDDEN = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
"""Front matter of pages that the search leaves out."""


def source_page(root: Path, path: str) -> str:
    """Returns the page of a file, with an anchor `L-NUMBER` on each line, or of a folder, with links to its modules."""
    file = root / path
    if file.is_dir():
        return HIDDEN + _list_of_modules(root, file)
    text = file.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    code = highlight(text, lexer, HtmlFormatter(linespans="L", cssclass="highlight", wrapcode=True))
    return f"{HIDDEN}# {path}\n\n{code}\n"


def _list_of_modules(root: Path, folder: Path) -> str:
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    summaries = {file: (ast.get_docstring(_parsed(file)) or "").partition("\n")[0] for file in files}
    lines = [f"- [`{file.name}`]({file.name}): {summary}" for file, summary in summaries.items()]
    return f"# {folder.relative_to(root).as_posix()}/\n\n" + "\n".join(lines) + "\n"


@cache
def definitions(file: Path) -> dict[str, int]:
    """Returns the line of each name, and each `Class.member`, that a module defines."""
    found: dict[str, int] = {}
    for node in _parsed(file).body:
        found |= dict.fromkeys(_names(node), node.lineno)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": inner.lineno for inner in node.body for name in _names(inner)}
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
