"""Environments of other projects for tests: written as in their documentation, and packages that come from an index."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "gymnasium": ("gymnasium==1.4.0", "farama-notifications==0.0.6"),
    "skyrl": ("skyrl-gym==0.4.0", "func-timeout==4.3.5", "omegaconf==2.4.0", "pandas==3.1.1", "tzdata==2026.6"),
    "verl": ("verl==0.9.1", "ray==2.60.0", "tensordict==0.15.3", "pyvers==0.2.3", "omegaconf==2.4.0"),
}
"""Packages that the environment of each project needs next to those of asyncrl."""
INSTALL_S = 200.0

TRL = '''
"""A counter and an environment with the conventions of TRL's documentation."""

class CounterEnv:
    def __init__(self):
        self.count = 0

    def reset(self, **kwargs) -> str | None:
        self.count = int(kwargs.get("start") or 0)
        self.calls = 0
        return f" The counter is at {self.count}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: The amount to add to the counter.

        Returns:
            The new value of the counter.
        """
        self.calls += 1
        if step > 5:
            raise ValueError("too large a step")
        self.count += step
        return self.count

    async def look(self) -> dict:
        """
        Look at the counter.

        Returns:
            The counter.
        """
        return {"count": self.count}

    def _hidden(self):
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.count)


class Unscored:
    def reset(self, **kwargs):
        self.log = []

    def note(self, text: str) -> str:
        """Note a text.

        Args:
            text: The text.
        """
        self.log.append(text)
        return [{"type": "text", "text": "noted "}, {"type": "text", "text": text}]

    async def step(self, action: str) -> str:
        """A tool of a name that environments of asyncrl have for something else.

        Args:
            action: Anything.
        """
        return action[::-1]


class Resetless:
    def note(self, text: str) -> str:
        """Note a text.

        Args:
            text: The text.
        """
        return text


def make_counter():
    return CounterEnv()


def noted(prompts, completions, environments, answer, **kwargs):
    return [
        float(len(environment.log)) + 10.0 * len(completion) + 0.5 * (prompt[-1]["role"] == "user") + float(known)
        for prompt, completion, environment, known in zip(prompts, completions, environments, answer)
    ]
'''

MCP = '''
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
calls = 0

@server.tool()
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    global calls
    calls += 1
    return first + second

@server.tool()
def count() -> str:
    """Says how many sums there were."""
    return f"{calls} in {os.getpid()}"

@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''

SKYRL = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Echo(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.scale, self.extras = env_config.get("scale", 1.0), extras
        self.max_turns = extras.get("max_turns", 2)
        self.closed = False

    def init(self, prompt):
        if self.extras["extra_info"].get("changed"):
            return [{"role": "user", "content": "something else"}], {}
        begin = [{"role": "user", "content": "Begin."}] if self.extras["extra_info"].get("begin") else []
        return prompt + begin, {}

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        messages = [] if done else [{"role": "user", "content": f"> {action[:10]}"}]
        reward = self.scale * (len(action) % 3)
        return BaseTextEnvStepOutput(
            observations=messages, reward=reward, done=done, metadata={}, postprocessed_action=action[:10]
        )

    def get_metrics(self):
        return {"turns": self.turns, "name": "echo"}
"""

VERL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Ledger(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.instances, self.log = {}, []

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.instances[instance_id] = (create_kwargs or {}).get("truth", 0)
        self.log.append("create")
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        amount = int(parameters["amount"])
        assert kwargs["agent_data"].messages[-1]["role"] == "assistant"
        if amount < 0:
            raise ValueError("unknown amount")
        right = amount == self.instances[instance_id]
        return ToolResponse(text=f"booked {amount}"), 0.5 if right else -0.05, {"right": right}

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]
        self.log.append("release")
"""
VERL_YAML = """
tools:
  - class_name: {module}.Ledger
    config:
      type: native
    tool_schema:
      type: function
      function:
        name: book
        description: Books an amount.
        parameters:
          type: object
          properties:
            amount:
              type: integer
              description: The amount.
          required: [amount]
"""
VERL_FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def double(value: int) -> str:
    """Doubles a number.

    Args:
        value: The number.
    """
    return str(2 * value), 0.25

@function_tool("later")
async def wait(value: int) -> dict:
    """Gives a number back.

    Args:
        value: The number.
    """
    return {"value": value}
'''


def installed(name: str) -> Path:
    """The folder of a project's packages, which are installed when they are needed for the first time."""
    packages = PACKAGES[name]
    folder = ROOT / "build" / "packages" / f"{name}-{zlib.crc32(' '.join(packages).encode()):08x}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part)]
        constraints = ["--constraint", str(ROOT / "requirements" / "cpu.txt")]
        subprocess.run([*pip, *constraints, *packages], check=True, timeout=INSTALL_S)
        part.rename(folder)
    return folder
