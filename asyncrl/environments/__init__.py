"""Environments: episodes of several turns between the policy and a program."""

from asyncrl.environments.environment import Action, Environment, Say, Step, Task

__all__ = ["Action", "Environment", "Say", "Step", "Task"]
