"""The messages about versions of the weights in a store: learner rank 0 announces them to the replay queue, generators
read that in the answers to their asks, and report what they have.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.wire.bounds import Body, Count, Index, Items, Text, Version

FolderName = Annotated[str, Meta(max_length=19, pattern=r"\Av[0-9]{6,10}-[0-9a-f]{8}\Z")]
"""The folder of a version in a store."""
Sha256 = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]{64}\Z")]


class Announced(Body):
    """A version that is complete in the store, and what proves it. Part of `Publish` and `Leases`."""

    version: Count
    folder: FolderName
    sha256: Sha256
    """The digest of the manifest."""


class Following(Body):
    """The versions in the store that a generator has. Part of `GeneratorStats`."""

    held: Version
    """The last version that it has fetched; NO_VERSION before the first one."""
    fetching: Version
    """The version that it fetches; NO_VERSION while it fetches none."""
    unread: FolderName | None
    """The version that it could not read last; None once it has read another one."""
    problem: Text
    """Why."""


class Publish(Body):
    """Sent by learner rank 0 for each version that it has published, and from time to time again; answered by
    `Followers`."""

    epoch: Count
    """As in the run's endpoints."""
    announced: Announced


class Follower(Body):
    """Part of `Followers`: a live generator."""

    generator: Index
    following: Following


class Followers(Body):
    """The answer of the queue to `Publish`."""

    followers: Items[Follower]
