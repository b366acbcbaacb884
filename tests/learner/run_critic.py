"""Runs a single critic rank in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from worlds import GAE_CONFIG, critic_endpoints, make_config

from asyncrl.learner.critic import run_critic

port, model, learners = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
config = make_config(
    model,
    **GAE_CONFIG,
    replay={"groups_per_step": 8},
    launch={"learners": learners, "start_timeout_s": 60, "progress_timeout_s": 120},
)
out = Path.cwd()
run_critic(config, rank=0, endpoints=critic_endpoints(port), run_dir=out, out_dir=out, should_stop=lambda: False)
