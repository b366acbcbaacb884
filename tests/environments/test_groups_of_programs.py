"""The members of a group that a program scores together: when they are, who waits, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from asyncrl.environments.episode import Limits, Turn
from asyncrl.environments.gateway.access import Access
from asyncrl.environments.gateway.server import Gateway
from asyncrl.environments.programs.foreign import Group
from asyncrl.environments.programs.player import ProgramPlayer
from asyncrl.environments.programs.program import Member
from asyncrl.wire.environment_messages import EpisodeEnded, EpisodeStart, GroupPlace, SayNext
from tests.helpers.dialogues import CharacterDialogue, turn


class Scores:
    """Remembers what was scored together; waits for `go` before it returns."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.fails = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, states: list[str]) -> None:
        self.seen.append(list(states))
        await self.go.wait()
        if self.fails:
            self.fails -= 1
            raise ValueError("no score")


class Members:
    """Members of a group of three, in tasks of their own."""

    def __init__(self) -> None:
        self.group, self.scores, self.waiting = Group(3), Scores(), list[int]()

    def play(self, member: int, state: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.group.scored(member, state, self.scores, lambda: self.waiting.append(member)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_last_member_scores_all_in_their_order() -> None:
    async def run() -> None:
        members = Members()
        tasks = [members.play(2, "c"), members.play(0, "a")]
        await settle()
        assert not members.scores.seen and members.waiting == [2, 0]
        await asyncio.gather(members.play(1, "b"), *tasks)
        assert members.scores.seen == [["a", "b", "c"]] and members.waiting == [2, 0] and len(members.group) == 0

    asyncio.run(run())


def test_a_member_that_leaves_is_scored_by_its_next_try_only() -> None:
    async def run() -> None:
        members = Members()
        first, second = members.play(0, "a"), members.play(1, "b")
        await settle()
        second.cancel()
        third = members.play(2, "c")
        await settle()
        assert not members.scores.seen and len(members.group) == 2
        members.scores.go.clear()
        again = members.play(1, "b again")
        await settle()
        first.cancel()  # while it is scored
        await settle()
        members.scores.go.set()
        await settle()
        assert len(members.group) == 2 and not again.done() and not third.done()
        await asyncio.gather(members.play(0, "a again"), again, third)
        assert members.scores.seen == [["a", "b again", "c"], ["a again", "b again", "c"]]

    asyncio.run(run())


def test_a_member_that_comes_back_while_the_others_are_scored_is_scored_with_them() -> None:
    async def run() -> None:
        members = Members()
        first, second = members.play(0, "a"), members.play(1, "b")
        await settle()
        members.scores.go.clear()
        last = members.play(2, "c")
        await settle()
        first.cancel()
        await settle()
        again = members.play(0, "a again")
        await settle()
        assert len(members.scores.seen) == 1, "one after the other"
        members.scores.go.set()
        await asyncio.gather(again, second, last)
        assert members.scores.seen == [["a", "b", "c"], ["a again", "b", "c"]]

    asyncio.run(run())


def test_a_score_that_fails_fails_the_last_member_and_its_next_try_scores_again() -> None:
    async def run() -> None:
        members = Members()
        members.scores.fails = 1
        tasks = [members.play(0, "a"), members.play(1, "b")]
        with pytest.raises(ValueError, match="no score"):
            await members.play(2, "c")
        assert not any(task.done() for task in tasks)
        await asyncio.gather(members.play(2, "c again"), *tasks)
        assert members.scores.seen == [["a", "b", "c"], ["a", "b", "c again"]]

    asyncio.run(run())


class Program:
    """Asks for a turn, and then does as the truth of its task says."""

    name = "mine"

    def check(self) -> None: ...

    async def run(
        self, task: Mapping[str, Any], access: Access, *, stuck: list[asyncio.Future[Any]], member: Member | None = None
    ) -> Any:
        assert member is not None
        member.is_scored_together()
        body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{access.base_url}/chat/completions", json=body) as answer,
        ):
            assert answer.status == 200
        match task["ground_truth"]:
            case "waits":
                member.waits()
                await asyncio.sleep(2.5)
            case "hangs":
                member.waits()
                await asyncio.sleep(60.0)
            case "slow":
                await asyncio.sleep(60.0)
            case _:
                raise ValueError("it is broken")
        return 1.0

    async def close(self) -> None: ...


def play(*truths: str, timeout_s: float, retries: int) -> list[EpisodeEnded]:
    async def run() -> list[EpisodeEnded]:
        dialogue = CharacterDialogue()
        gateway = Gateway(dialogue)
        await gateway.start()

        def say(player: ProgramPlayer, wish: SayNext, tokens: list[int]) -> None:
            asyncio.get_running_loop().call_later(0.01, player.hear, wish.branch, Turn(turn("42"), "completed"))

        waiting: dict[str, set[int]] = {}
        limits = Limits(400, 50, 5, timeout_s, timeout_s, retries)
        players = [
            ProgramPlayer(
                EpisodeStart(f"0.0.{n}", 7, truth, "", {}, None, {}, 5, False, GroupPlace("0.0", n, len(truths))),
                list(map(ord, "hello")), Program(), dialogue, limits, gateway, say, waiting,
            )
            for n, truth in enumerate(truths)
        ]  # fmt: skip
        try:
            return await asyncio.gather(*(player.play() for player in players))
        finally:
            await gateway.close()
            assert not waiting

    return asyncio.run(run())


def test_the_wait_for_others_is_not_time_of_the_member() -> None:
    (one,) = play("waits", timeout_s=2.0, retries=1)
    assert (one.status, one.reward, one.scored_together) == ("completed", 1.0, True)
    assert one.group_wait_s == pytest.approx(2.5, abs=0.5) and one.environment_s < 2.0


def test_who_has_not_ended_in_time_is_named() -> None:
    hangs, slow, broken = play("hangs", "slow", "is broken", timeout_s=2.0, retries=1)
    assert (hangs.status, hangs.ended) == ("failed", "timeout") and hangs.group_wait_s >= 3.9
    assert hangs.error == (
        "mine waited 4 s (environment.timeout_s for each try) for the other members of its group, to be scored with "
        "them; not ended: 1, 2"
    )
    assert (slow.ended, slow.error) == ("timeout", "mine took longer than environment.timeout_s = 2 s")
    assert (broken.ended, broken.error) == ("environment", "mine failed: ValueError: it is broken")
    assert broken.group_wait_s == slow.group_wait_s == 0.0 and broken.scored_together
