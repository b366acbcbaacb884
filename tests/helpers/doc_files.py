"""The files that pages of the documentation show."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_doc_files(page: str, folder: Path) -> None:
    """Writes every file that the page shows in full, which begins with its name in a comment."""
    for name, text in FILE.findall((DOCS / page).read_text(encoding="utf-8")):
        (folder / name).write_text(text)
