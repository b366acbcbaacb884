"""Environments: episodes of several turns between the policy and a program."""

from asyncrl.environments.environment import (
    Action,
    Environment,
    Message,
    Say,
    Step,
    Task,
    ToolCall,
    ToolEnvironment,
    ToolError,
)

__all__ = ["Action", "Environment", "Message", "Say", "Step", "Task", "ToolCall", "ToolEnvironment", "ToolError"]
