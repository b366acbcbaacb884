"""The `asyncrl` command."""

from __future__ import annotations

import sys

from asyncrl.cli import launching, looking, planning, parts  # noqa: F401  # isort: skip, the order of --help
from asyncrl.cli.app import app
from asyncrl.errors import AsyncrlError, ConfigError, DataError, is_disk_full

__all__ = ["app", "main"]

EXIT_CONFIG = 2


def main() -> None:
    """Runs the command; errors made on purpose, and files that cannot be used, are one line without a traceback."""
    try:
        app()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except AsyncrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if is_disk_full(error):
            print(f"error: {error.filename or 'a file'}: no space is left on the disk; free some", file=sys.stderr)
            sys.exit(1)
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
