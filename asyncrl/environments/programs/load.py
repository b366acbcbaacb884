"""Finds the agent program that a config names."""

from __future__ import annotations

import re

from asyncrl.config import Options
from asyncrl.environments.programs.foreign_program import ForeignProgram
from asyncrl.environments.programs.program import CommandProgram, FunctionProgram, Program
from asyncrl.util.user_code import resolve_function

_FUNCTION = re.compile(r"\S+:[A-Za-z_]\w*")


def load_agent(name: str, options: Options, python: str | None) -> Program:
    """The program `file.py:run` or `module:run`, in the interpreter `python` if it is given; any other name is a
    command. Raises ConfigError if the function is not found."""
    if not _FUNCTION.fullmatch(name):
        return CommandProgram(name, options)
    if python is not None:
        return ForeignProgram("agent", name, options, python=python)
    return FunctionProgram(f"agent:{name}", resolve_function("environment.name", name, {}), options)
