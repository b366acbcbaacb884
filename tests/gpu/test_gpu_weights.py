"""Weights from a GPU to a generator's process: by way of host memory, and by NCCL where there are two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from weight_parts import manifest_of, weights

from asyncrl.launch.machine import find_port, visible_gpus
from asyncrl.weights.buffers import checksum
from asyncrl.weights.layout import ROW_BYTES
from asyncrl.weights.sender import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def test_the_checksum_is_that_of_the_cpu(gpu: torch.device) -> None:
    buffer = torch.randint(256, (1000 * ROW_BYTES,), dtype=torch.uint8)
    assert checksum(buffer.to(gpu), 7 * ROW_BYTES) == checksum(buffer, 7 * ROW_BYTES)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_receiver_gets_what_the_learner_has(
    gpu: torch.device, transport: str, cleanup: list[Callable[[], object]]
) -> None:
    names = [card.name for card in visible_gpus()]
    if transport == "nccl" and len(names) < 2:
        pytest.skip("NCCL between two processes needs 2 GPUs")
    port = find_port()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("receive.py")), str(port), transport],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": names[-1], "NCCL_SOCKET_IFNAME": "=lo"},
        stdout=subprocess.PIPE,
        text=True,
    )
    cleanup += [process.wait, process.kill]
    sender = WeightSender(
        f"tcp://127.0.0.1:{port}",
        manifest_of(weights(0)),
        expected_generators=1,
        transport=transport,
        bucket_bytes=1 << 20,
        timeout_s=60.0,
        device=str(gpu),
    )
    cleanup.append(sender.close)
    assert process.stdout is not None
    for version in range(2):
        tensors = [(name, tensor.to(gpu)) for name, tensor in weights(version)]
        sender.send(version, tensors)
        told = json.loads(process.stdout.readline())
        assert told["version"] == version
        assert told["devices"] == (["cuda"] if transport == "nccl" else ["cpu"])
        for name, tensor in tensors:
            assert told["sums"][name] == pytest.approx(float(tensor.double().sum()), rel=1e-9)
        sender.wait()
