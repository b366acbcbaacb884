from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HELPERS = """
import os, sys
from asyncrl.util.processes import HelperContext

CODE = '''
import os, sys
from asyncrl.util.processes import become_helper
become_helper(os.getppid())
print(bool(sys.flags.safe_path), os.environ.get("PYTHONSAFEPATH"), flush=True)
'''
print("script", flush=True)
process = HelperContext().Process(target=exec, args=(CODE,))
process.start()
process.join(50)
print(process.exitcode)
"""
"""A script that starts a helper, without a guard of its main module."""


def test_files_of_the_working_folder_shadow_no_module_in_helpers(tmp_path: Path) -> None:
    """Nor do they in a process that is started without -P, as by the script `asyncrl`; the script itself runs once."""
    script, folder = tmp_path / "bin" / "script.py", tmp_path / "working"
    script.parent.mkdir()
    folder.mkdir()
    for name in ("selectors", "socket", "tempfile"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    script.write_text(HELPERS)
    found = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout.split()) == (0, ["script", "True", "None", "0"]), found.stderr
