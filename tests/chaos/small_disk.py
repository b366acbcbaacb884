"""A small file system that is visible only to the processes in its namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs at `folder`. Skips the test if the kernel does not allow users to mount one."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        script = f"mount -t tmpfs -o size={size_bytes} none {folder} && echo mounted && exec sleep 600"
        self._keeper = subprocess.Popen(
            ["unshare", "-Urm", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline().strip()
        if said != "mounted":
            pytest.skip(f"no mount namespaces here: {said}")

    @property
    def root(self) -> Path:
        """The path outside of the namespace of the root folder inside it."""
        return Path(f"/proc/{self._keeper.pid}/root")

    def command(self, working_folder: Path) -> tuple[str, ...]:
        """Returns the prefix of a command that runs in the namespace."""
        enter = ("nsenter", "-t", str(self._keeper.pid), "-U", "-m", "--preserve-credentials")
        return (*enter, "sh", "-c", f'cd {working_folder} && exec "$@"', "sh")

    def grow(self, size_bytes: int) -> None:
        remount = ("mount", "-o", f"remount,size={size_bytes}", str(self.folder))
        subprocess.run([*self.command(self.folder), *remount], check=True, timeout=10)

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
