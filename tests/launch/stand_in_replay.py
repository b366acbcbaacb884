"""A fake replay process without a queue: `stand_in_replay.py SECONDS [CODE]` reads its spec from standard input,
reports after SECONDS that all steps are done, and ends with the exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import zmq

from asyncrl.launch.worker import read_spec
from asyncrl.wire.frames import decode, encode
from asyncrl.wire.messages import Ok


def main() -> None:
    spec, until_s = read_spec(), float(sys.argv[1])
    stopped = Path(spec.run_dir) / "stopped"
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(spec.endpoints.replay)
    run_id, kind = spec.endpoints.run_id, ""
    while kind != "Shutdown":
        identity, *frames = socket.recv_multipart(copy=False)
        message = decode(run_id, [frame.buffer for frame in frames])
        kind = message.kind
        if kind == "Stop":
            stopped.touch()
        done = time.time() > until_s or stopped.exists()
        answers = {
            "ReadStatus": status(done),
            "ReadSummary": {"idle": {"generator": 0.0, "environments": 0.0, "learner": 0.0}, "steps": 3},
        }
        socket.send_multipart([identity.bytes, *encode(run_id, Ok(answers.get(kind, {})), seq=message.seq)])
    socket.close(linger=500)
    zmq.Context.instance().term()
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)


def status(done: bool) -> dict[str, object]:
    return {
        "done": done,
        "step": 3 if done else 0,
        "generators_wanted": 1,
        "metrics": {},
        "generators": {"0": {"heard_ago_s": 0.0, "session": "a", "tokens": 0}},
        "learners": {"0": 0.0, "1": 0.0},
        "eval": {"prompts_done": 0, "last": None, "running": []},
        "catching_up": None,
        "taken": True,
        "leased": 0,
        "finished": 0,
        "reward": 0.5,
        "rewards": {"scored": 8, "failed": 0, "all_zero": False},
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "tokens_per_s": 0.0,
        "generator_idle": 0.0,
        "generator_environments": 0.0,
        "collapse": {},
        "learner_idle": 0.0,
    }


if __name__ == "__main__":
    main()
