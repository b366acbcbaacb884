"""A learner rank that sends versions of a policy in buckets, or a generator with a real engine that they are loaded
into.

    python policy_process.py learner RANK RANKS ADDRESS FOLDER TRANSPORT    sends what "send VERSION" on its input says;
                                                                            "await" has rank 0 wait for the generators
    python policy_process.py generator RANK ADDRESS FOLDER TRANSPORT        completes prompts all the time

By the transport ipc it is one of each, else two.

A generator prints every completion, with its log-probs and versions, as a line of JSON. "die MOMENT" on the input has
the process kill itself: at "sum:N", the Nth piece from now on that is sent or received, at "say:KIND", after the next
message of this kind, or at "commit".
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.load import load_config
from asyncrl.weights import buffers as buckets
from asyncrl.weights import membership
from asyncrl.weights import receiver as session
from asyncrl.weights.layout import WeightManifest, slice_of
from asyncrl.weights.ranks import RankShareSender
from asyncrl.weights.receiver import WeightReceiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.transports import CONNECT_S
from asyncrl.wire.endpoints import Endpoints
from tests.helpers.forked_scripts import print_json

BUCKET_BYTES = 1 << 16
TIMEOUT_S = 2 * CONNECT_S
"""Leaves time for a second round after one in which a receiver did not connect."""
PROMPTS = [[3 + (7 * i + 5 * j) % 40 for j in range(4 + i)] for i in range(4)]
wanted = ""
"""The moment at which this process ends."""
pieces = 0


def policy(folder: str, version: int) -> PreTrainedModel:
    """The policy of a version."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def at(moment: str) -> None:
    """Ends this process if that is its moment."""
    if moment == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def watch_moments() -> None:
    checksum = buckets.checksum
    say, tell = session.SenderSession.say, membership.Membership.tell

    def counted(bucket: torch.Tensor, first_byte: int) -> int:
        global pieces
        pieces += 1
        at(f"sum:{pieces}")
        return checksum(bucket, first_byte)

    def saying(self: Any, message: Any) -> None:
        say(self, message)
        at(f"say:{type(message).__name__}")

    def telling(self: Any, peers: Any, kind: Any, **fields: Any) -> None:
        tell(self, peers, kind, **fields)
        if peers:
            at(f"say:{kind.__name__}")

    buckets.checksum = counted
    session.SenderSession.say, membership.Membership.tell = saying, telling  # type: ignore[method-assign]


def die_at(line: str) -> None:
    global wanted, pieces
    wanted, pieces = line.split()[1], 0


def learn(rank: int, ranks: int, address: str, folder: str, transport: str) -> None:
    model = policy(folder, 0)
    manifest = WeightManifest.of((name, one.dtype, one.shape) for name, one in model.named_parameters())
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S, "copies": False}
    if rank == 0:
        sender = WeightSender(address, manifest, ranks=ranks, expected_generators=2, transport=transport, **options)
    else:
        places = Endpoints("", "", address, "")
        sender = RankShareSender(manifest, places, rank=rank, ranks=ranks, start_timeout_s=60.0, **options)
    print_json({"up": rank})
    for line in sys.stdin:
        if line.startswith("die"):
            die_at(line)
            continue
        if line.startswith("await"):
            assert isinstance(sender, WeightSender)
            await_engines(sender, ranks)
            continue
        version = int(line.split()[1])
        weights = []
        for name, one in policy(folder, version).named_parameters():
            first, last = slice_of(one.numel(), rank, ranks)
            weights.append((name, one.detach().view(-1)[first:last] if ranks > 1 else one.detach()))
        sender.send(version, weights)
        sender.copied()
        print_json({"sent": version})
    sender.close()


def await_engines(sender: WeightSender, count: int) -> None:
    """Returns when `count` generators are there."""
    peers = sender._membership
    peers._await(lambda: sum(peer.up for peer in peers.present()) == count, 60.0)


def generate(rank: int, address: str, folder: str, transport: str) -> None:
    from asyncrl.generator.engine import WeightSwaps
    from asyncrl.generator.transformers_backend.engine import TransformersEngine

    settings = {
        "model.path": folder, "data.train": "unused", "generator.engine": "transformers", "generator.group_size": 2,
        "generator.max_running_groups": 4, "generator.max_new_tokens": 24, "generator.kv_cache_bytes": 4 << 20,
        "weights.staging": "buckets", "weights.kv_cache": "recompute",
    }  # fmt: skip
    engine = TransformersEngine(load_config(None, settings), seed=rank)
    receiver = WeightReceiver(address, rank=rank, transport=transport, timeout_s=TIMEOUT_S, max_bytes=1 << 26)
    commit = engine.loader.commit
    engine.loader.commit = lambda version: (at("commit"), commit(version))[1]  # type: ignore[method-assign]
    swaps = WeightSwaps(engine, receiver, timeout_s=60.0, meanwhile=lambda: True)
    receiver.start()
    receiver.engine_is_up(engine.loader)
    number = 0
    while True:
        swaps.swap()
        if engine.version < 0:
            continue
        if select.select([sys.stdin], [], [], 0)[0]:
            die_at(sys.stdin.readline())
        while engine.num_running < len(PROMPTS):
            engine.add(str(number), PROMPTS[number % len(PROMPTS)])
            number += 1
        for one in engine.step():
            found = {"prompt": int(one.key) % len(PROMPTS), "tokens": one.tokens}
            found |= {"logprobs": one.logprobs.tolist(), "versions": one.versions.tolist()}
            print_json(found)


def main() -> None:
    torch.set_num_threads(1)
    role, *given = sys.argv[1:]
    watch_moments()
    if role == "learner":
        learn(int(given[0]), int(given[1]), *given[2:])
    else:
        generate(int(given[0]), *given[1:])


if __name__ == "__main__":
    main()
