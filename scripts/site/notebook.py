"""A Jupyter notebook as a page: its texts, its code, and the outputs that are saved in it."""

from __future__ import annotations

import json
from typing import Any


def notebook_page(text: str) -> str:
    """Returns the Markdown of a notebook in nbformat 4."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _block("".join(output["text"]))
    if output["output_type"] == "error":
        return _block(f"{output['ename']}: {output['evalue']}")
    data = {kind: "".join(value) if isinstance(value, list) else value for kind, value in output["data"].items()}
    if "image/svg+xml" in data:
        return f"<div>{data['image/svg+xml']}</div>"
    if "image/png" in data:
        return f"![](data:image/png;base64,{data['image/png'].strip()})"
    if "text/html" in data:
        return f'<div class="notebook-table">\n{_without_blank_lines(data["text/html"])}\n</div>'
    return _block(data.get("text/plain", ""))


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _without_blank_lines(html: str) -> str:
    return "\n".join(line for line in html.splitlines() if line.strip())
