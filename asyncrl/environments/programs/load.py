"""Finds the agent program that a config names."""

from __future__ import annotations

import importlib.util
import re
import sys

from asyncrl.config.sections import Options
from asyncrl.environments.programs.foreign_program import ForeignProgram
from asyncrl.environments.programs.program import CommandProgram, FunctionProgram, Program
from asyncrl.errors import ConfigError
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


def load_verifiers(name: str, options: Options, python: str | None) -> Program:
    """The environment of the verifiers library with this id, in the interpreter `python`, by default this one. Raises
    ConfigError if there is no interpreter with the library."""
    return ForeignProgram("verifiers", name, options, python=verifiers_python(name, python))


def verifiers_python(name: str, python: str | None) -> str:
    """The interpreter of a verifiers environment: the one that is given, or this one if it has the library. Raises
    ConfigError."""
    if not name:
        raise ConfigError("environment.name = 'verifiers:': names no environment; it is verifiers:ID")
    if python is None and importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"verifiers:{name}: this interpreter has no package verifiers, whose requirements do not fit asyncrl's. "
            "Make one that has it (python3.11 -m venv vf; vf/bin/pip install verifiers==0.3.1, and the package of the "
            "environment), and name it: environment.python=vf/bin/python"
        )
    return python or sys.executable
