"""The messages by which a guest joins a run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.wire.bounds import Body, Document, Index, Name, Number, Text

MAX_LOG_LINES = 1000
"""Maximum number of lines in a message."""
Facts = Annotated[dict[Name, Name], Meta(max_length=32)]
"""Facts that must be the same on both machines: versions of packages, digests of files of the model."""


class Hello(Body):
    """Sent by a guest before it starts generators, and every few seconds while they run; answered by `Welcome`."""

    facts: Facts
    """The facts of the guest's machine; those of the model may come later."""


class GuestLog(Body):
    """Sent by a guest with what its generator has logged; answered by `Ok`."""

    generator: Index
    lines: Annotated[list[Text], Meta(max_length=MAX_LOG_LINES)]
    """Complete lines."""


class Welcome(Body):
    """The answer of the queue to `Hello`."""

    problem: Text
    """Why the guest cannot join, what differs by name; empty if it can. Then the other fields count."""
    run: Name
    """Name of the run."""
    run_id: Name
    """Id of the run's launch, which messages of generators have."""
    config: Document
    """The run's config as YAML."""
    first: Index
    """Index of the guest's first generator."""
    generators: Index
    """Maximum number of its generators."""
    prompt_tokens: Number
    greedy_baseline: bool
    ended: bool
    """All steps are trained."""
