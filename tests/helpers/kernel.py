"""Features of this machine's kernel."""

from __future__ import annotations

from asyncrl.errors import ConfigError
from asyncrl.sandbox.run_program import check_sandbox


def why_not_confined() -> str:
    """Why this kernel cannot confine programs, if it lacks Landlock; any other cause is for the tests to find."""
    try:
        check_sandbox("the test")
    except ConfigError as error:
        return str(error) if "Landlock (Linux 5.13" in str(error) else ""
    return ""
