"""Tools of verl: classes in a file of YAML, and decorated functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from asyncrl.config.sections import Options
from asyncrl.environments.adapters.answers import load_reward, need
from asyncrl.environments.environment import Action, Step, Task, Tool, ToolEnvironment
from asyncrl.environments.table import Named, checked
from asyncrl.errors import ConfigError
from asyncrl.util.text import describe

INSTALL = "--no-deps verl==0.9.1 ray tensordict pyvers omegaconf"


def load_verl(rest: str, options: Options, python: str | None) -> Named:
    """The tools of verl, as `verl:TOOLS.yaml`, or `verl:FILE.py` for decorated functions. Options: `functions`, a file
    of these next to the YAML; `reward`, a function `reward(task, answer)` or one in verl's form in place of comparing
    the answer with the ground truth."""
    name = f"verl:{rest}"
    functions = rest if rest.endswith(".py") else options.get("functions")
    config = None if rest.endswith(".py") else rest
    for file in filter(None, (config, functions)):
        if not Path(str(file)).is_file():
            raise ConfigError(f"environment.name = {name!r}: no file {file}")
    registry = need(name, "verl.tools.tool_registry", INSTALL)
    if os.getcwd() not in sys.path:  # where verl finds the modules of class_name
        sys.path.append(os.getcwd())
    try:
        loaded = registry.load_all_tools(config, functions)
        tools = {tool.name: _tool(tool) for tool in loaded}
    except Exception as error:  # of the file, of verl and of the user's classes
        raise ConfigError(f"environment.name = {name!r}: cannot load its tools: {describe(error)}") from None
    if not tools:
        raise ConfigError(f"environment.name = {name!r}: has no tools")
    members = {"_known": tools, "foreign": {tool.name: tool for tool in loaded}}
    return checked(name, type(Path(rest).name, (VerlEnvironment,), members), options)


class VerlEnvironment(ToolEnvironment):
    """Each call creates, executes and releases its tool, as verl's loop does, so that no state of a tool lives from one
    call to the next. Every exception of a tool is an answer; the sum of the rewards of a turn's calls is its reward."""

    _known: ClassVar[Mapping[str, Tool]]
    _errors_are_answers = True
    foreign: ClassVar[Mapping[str, Any]]

    def __init__(self, task: Task, *, functions: str | None = None, reward: str | None = None) -> None:
        super().__init__(task)
        self._reward = load_reward(reward)
        selected = task.extra_info.get("tool_selection")
        self._selected = {key: tool for key, tool in self._known.items() if not selected or key in selected}
        self.tools = [tool.schema for tool in self._selected.values()]
        self._settings = task.extra_info.get("tools_kwargs") or {}
        self._call_rewards: list[float] = []
        prompt = task.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        self._agent_data = SimpleNamespace(messages=messages, tools_kwargs=self._settings, extra_fields={})

    @classmethod
    def check_setup(cls, **options: Any) -> None:
        load_reward(options.get("reward"))

    async def step(self, action: Action) -> Step:
        self._call_rewards.clear()
        self._agent_data.messages.append({"role": "assistant", **action.message})
        step = await super().step(action)
        self._agent_data.messages += step.observation or []
        return replace(step, reward=sum(self._call_rewards))

    async def reward(self) -> Any:
        return await self.in_thread(lambda: self._reward(self.task, self.answer))

    def _tools(self) -> Mapping[str, Tool]:
        return self._selected

    async def _run_tool(self, tool: Tool, arguments: dict[str, Any]) -> str:
        from verl.tools.function_tool import normalize_function_tool_return  # pyright: ignore[reportMissingImports]

        foreign = self.foreign[tool.name]
        if hasattr(foreign, "fn"):
            response, reward, _ = normalize_function_tool_return(await foreign.call(arguments))
        else:
            settings = self._settings.get(tool.name, {})
            instance, _ = await foreign.create(create_kwargs=settings.get("create_kwargs", {}))
            try:
                response, reward, _ = await foreign.execute(instance, arguments, agent_data=self._agent_data)
            finally:
                await foreign.release(instance)
        if response.image or response.video:
            raise ValueError(f"{tool.name} returned pictures; only text can be shown")
        self._call_rewards.append(0.0 if reward is None else float(reward))
        return response.text or ""


def _tool(tool: Any) -> Tool:
    return Tool(tool.name, tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True), is_async=True)
