"""The section `placement` of a config: the pools of hosts, and the pool of each role."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from asyncrl.config.base import Entry, Section

PlacedRole = Literal["generator", "learner", "critic", "reward_model"]
"""A role that can be placed; the replay queue is on the launcher's host."""
SHORT_POOL = re.compile(r"(\d+) ?x ?gpu")


class Pool(Entry):
    """Hosts, or GPUs wherever they are."""

    nodes: int | None = Field(default=None, ge=1)
    """Number of hosts; null: as many as it takes for the GPUs or the cores."""
    gpus: int = Field(default=0, ge=0)
    """GPUs of each host; without `nodes` those of all hosts together."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each host; null: 1 for each GPU, without GPUs all that a host has free."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.nodes is None and not self.gpus:
            raise ValueError("has neither nodes nor gpus: say how many hosts or GPUs the pool has")
        return self


class PlacementConfig(Section):
    """Which hosts the roles run on. Without pools all roles share all hosts."""

    pools: dict[str, Pool] = Field(default={})
    """Pools by name, such as `{gen: 8 x gpu, train: {nodes: 2, gpus: 8}}`; `8 x gpu` is short for `{gpus: 8}`."""
    roles: dict[PlacedRole, str] = Field(default={})
    """The pool of each role, such as `{generator: gen, learner: train}`. Several roles may share a pool."""

    def pool_of(self, role: str) -> str:
        """The pool of a role; empty if it may run on all hosts."""
        return next((pool for one, pool in self.roles.items() if one == role), "")

    @field_validator("pools", mode="before")
    @classmethod
    def _read_short(cls, pools: Any) -> Any:
        if not isinstance(pools, dict):
            return pools
        return {name: _pool(name, pool) for name, pool in pools.items()}

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                raise ValueError(
                    f"roles.{role} = {pool!r}: is not a pool; placement.pools has {', '.join(self.pools) or 'none'}"
                )
        if self.pools and (missing := {"generator", "learner"} - set(self.roles)):
            raise ValueError(f"roles lacks {' and '.join(sorted(missing))}: with pools, each role is in one of them")
        if idle := set(self.pools) - set(self.roles.values()):
            raise ValueError(f"pools.{min(idle)}: no role is in it; name one in placement.roles, or leave it out")
        return self


def _pool(name: str, pool: Any) -> Any:
    if not isinstance(pool, str):
        return pool
    if not (short := SHORT_POOL.fullmatch(pool.strip())):
        raise ValueError(f"pools.{name} = {pool!r}: must be N x gpu, or a mapping of nodes, gpus and cpus")
    return {"gpus": int(short[1])}
