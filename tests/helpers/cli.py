"""The `asyncrl` command in the process of the test: a real one imports torch for seconds."""

from __future__ import annotations

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from asyncrl.cli import main


def asyncrl(*arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and output, standard error last. An error that the command does not expect is raised, as a traceback
    would be printed."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        chdir(cwd or Path.cwd()),
        patch.object(sys, "argv", ["asyncrl", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue() + err.getvalue()
