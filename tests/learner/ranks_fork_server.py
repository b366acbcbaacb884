"""The fork server of learner and critic ranks, so that imports are done once per test session."""

from __future__ import annotations

import os
import runpy
import sys

from asyncrl.launch.fork_server import main

PRELOADED = ("asyncrl.learner.role", "asyncrl.learner.critic.remote", "transformers.models.qwen2.modeling_qwen2")


def run_script(arguments: list[str]) -> int:
    """Runs a script of this folder with its arguments, in the folder that PWD names."""
    os.chdir(os.environ["PWD"])
    sys.path.insert(0, os.path.dirname(arguments[0]))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(run_script, PRELOADED))
