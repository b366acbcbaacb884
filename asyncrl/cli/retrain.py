"""`asyncrl retrain`: runs the learner alone on the batches in a run's journal, or on samples of the run, with its or
other settings."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from asyncrl.config.config import Config
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.checks import check_model
from asyncrl.launch.launcher import LocalLauncher, find_launcher
from asyncrl.launch.placement import RoleResources, place_roles
from asyncrl.launch.run_dir import changes, refuse_changes, run_endpoints
from asyncrl.launch.supervisor import with_peer_gpus
from asyncrl.launch.worker import EXIT_CONFIG, RoleSpec
from asyncrl.observe.console import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Interrupts
from asyncrl.observe.curves import OF_STEP, read_metrics
from asyncrl.observe.logs import configure_logs
from asyncrl.observe.samples import Samples
from asyncrl.replay.history import read_index
from asyncrl.rewards.reward_model import uses_reward_model
from asyncrl.util.files import next_free_path, replace_file
from asyncrl.wire.endpoints import Endpoints

TICK_S = 0.1
END_GRACE_S = 2.0
FREE_SECTIONS = ("algorithm", "learner", "observe")
FREE_KEYS = {"critic.lr", "critic.warmup_steps", "critic.clip", "launch.learners", "launch.colocate", "steps"}
FIXED_KEYS = {"learner.zero_stage"}
SHOWN = ("learner/loss", "learner/grad_norm", "correction/ess", "correction/behavior_kl", "kl/reference")
"""Metrics whose first and last values are shown next to the run's."""


def retrain(
    run_dir: Path,
    settings: dict[str, Any],
    console: Console,
    *,
    out: Path | None = None,
    start_step: int = 0,
    samples: Path | None = None,
) -> int:
    """Trains again on the batches of the run in `run_dir`, or on `samples` of it, and writes to `out`. `settings`
    (dotted keys) override the run's. Starts from the run's checkpoint of `start_step`, or with 0 from the run's
    initial model.

    Returns the exit code: 0; that of `compare_weights` when the settings are unchanged; 130 when interrupted. Raises
    ConfigError when the run cannot be retrained with these settings, also when only a role finds out, DataError for a
    file of other content, and RunError when a role fails otherwise or makes no progress.
    """
    saved, config = read_configs(run_dir, settings, samples)
    changed = samples is not None or any(not key.startswith("observe.") for key in changes(saved, config))
    out = make_out(run_dir, out)
    replace_file(out / "config.yaml", config.to_yaml())
    configure_logs(out, "launcher")
    interrupts = Interrupts()
    launcher = find_launcher(config)()
    if not isinstance(launcher, LocalLauncher):  # the roles are on this machine
        launcher = LocalLauncher()
    with interrupts.caught():
        console.print(
            f"training on {samples or f'the batches of {run_dir}'} into {out} ...", highlight=False, soft_wrap=True
        )
        with run_endpoints(config.on_this_machine) as endpoints:
            try:
                start(launcher, config, endpoints, run_dir, out, start_step, samples)
                watch(launcher, config, out, interrupts)
            finally:
                launcher.end(grace_s=END_GRACE_S)
    if interrupts.count:
        console.print(f"interrupted; the results so far are in {out}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    show_metrics(console, run_dir, out)
    if changed or not (run_dir / "model").is_dir():
        return EXIT_DONE
    return compare_weights(console, config, run_dir, out)


def compare_weights(console: Console, config: Config, run_dir: Path, out: Path) -> int:
    """Prints whether the weights equal the run's. Returns the exit code: 1 if they differ, unless another number
    of learner ranks has trained steps of the run."""
    difference = first_difference(out / "model", run_dir / "model")
    answer = f"no: {difference}" if difference else "yes"
    console.print(f"weights identical to {run_dir / 'model'}: {answer}", highlight=False, soft_wrap=True)
    if not difference:
        return EXIT_DONE
    steps = read_index(run_dir / "journal").steps.values()
    others = sorted({step.learners for step in steps} - {config.launch.learners})
    if not others:
        return EXIT_FAILED
    console.print(
        f"{' and '.join(map(str, others))} learner ranks have trained steps of the run, where "
        f"{config.launch.learners} trained them here: their sums are rounded in another order",
        highlight=False,
        soft_wrap=True,
    )
    return EXIT_DONE


def first_difference(ours: Path, theirs: Path) -> str:
    """Describes the first tensor, by name, that differs between the folders; "" if they are identical."""
    with ExitStack() as stack:
        left, right = _open_tensors(ours, stack), _open_tensors(theirs, stack)
        for name in sorted(left.keys() | right.keys()):
            if name not in left or name not in right:
                return f"{name} is only in {ours if name in left else theirs}"
            a, b = left[name].get_tensor(name), right[name].get_tensor(name)
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return f"{name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
            if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
                return f"{name} has other values"
    return ""


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor. Raises RunError when there are none."""
    files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
    tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    if not tensors:
        raise RunError(f"{folder}: no weights in *.safetensors files")
    return tensors


def read_configs(run_dir: Path, settings: dict[str, Any], samples: Path | None) -> tuple[Config, Config]:
    """The config of the run, and the same with the settings applied. Raises ConfigError for settings that recorded
    batches rule out, and when there is no journal, and DataError when `samples` is another file."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir}: not the folder of a run, config.yaml is missing; give runs/NAME")
    if samples is not None:
        Samples.load(samples)
    elif not (run_dir / "journal").is_dir():
        raise ConfigError(f"{run_dir}: has no journal to train from")
    saved, config = load_config(file), load_config(file, settings)
    refuse_changes(
        saved,
        config,
        lambda key: key in FREE_KEYS or (key.partition(".")[0] in FREE_SECTIONS and key not in FIXED_KEYS),
        what=f"{run_dir}: the recorded batches were made with other settings",
        hint="only those of algorithm and learner (not learner.zero_stage), critic.lr, critic.warmup_steps, "
        "critic.clip, launch.learners and steps may change",
    )
    from asyncrl.learner.algorithm import check_algorithm, needs_turns

    check_model(config)
    advantage, _ = check_algorithm(config)
    if samples is not None and needs_turns(advantage):
        raise ConfigError(
            f"algorithm.advantage = {config.algorithm.advantage!r} reads the rewards of turns, which training from "
            "samples leaves out; train from the journal, without --samples, or set another algorithm.advantage"
        )
    return saved, config


def make_out(run_dir: Path, out: Path | None) -> Path:
    """Creates the folder for the results. Raises ConfigError when `out` is not empty."""
    if out is None:
        out = next_free_path(run_dir / "retrained", "")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists and is not an empty folder; name another one")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    return out


def start(
    launcher: LocalLauncher,
    config: Config,
    endpoints: Endpoints,
    run_dir: Path,
    out: Path,
    step: int,
    samples: Path | None = None,
) -> None:
    """Starts the learner and critic ranks on the cores and GPUs that they had in the run."""
    placement = place_roles(config, reward_model=uses_reward_model(config))
    members: list[tuple[RoleSpec, RoleResources]] = []
    for role in ("learner", "critic"):
        for index, resources in enumerate(placement.of(role)):
            spec = RoleSpec(role, index, str(run_dir), endpoints, resources.cpus, 0, offline=str(out))
            spec = replace(spec, offline_step=step, offline_samples=str(samples.resolve()) if samples else "")
            members.append((spec, resources))
    for spec, resources in with_peer_gpus(members):
        launcher.start(spec, resources)


def watch(launcher: LocalLauncher, config: Config, out: Path, interrupts: Interrupts) -> None:
    """Returns when all learners have exited with code 0, or after an interrupt. Raises as `check_roles` does, and
    RunError when no step ends within `launch.progress_timeout_s`."""
    launch = config.launch
    file, size, since_s = out / "metrics.jsonl", 0, time.monotonic() + launch.start_timeout_s
    while not interrupts.count and any(role.code is None for role in launcher.of("learner")):
        check_roles(launcher)
        if file.exists() and file.stat().st_size > size:
            size, since_s = file.stat().st_size, time.monotonic()
        if time.monotonic() - since_s > launch.progress_timeout_s:
            raise RunError(
                f"no step ended within launch.progress_timeout_s = {launch.progress_timeout_s:g} s; see {out / 'logs'}"
            )
        time.sleep(TICK_S)
    check_roles(launcher)


def check_roles(launcher: LocalLauncher) -> None:
    """Raises RunError with the cause when a role has failed, and ConfigError when the cause is a setting or a file."""
    for role in launcher.roles:
        if role.code not in (None, 0):
            raise (ConfigError if role.code == EXIT_CONFIG else RunError)(role.cause())


def show_metrics(console: Console, run_dir: Path, out: Path) -> None:
    """Prints the first and last values of the main metrics, next to the run's in the same steps."""
    rows = [row for row in read_metrics(out / "metrics.jsonl") if OF_STEP in row]
    steps = {row["step"] for row in rows}
    theirs = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] in steps and OF_STEP in row]
    skipped = int(sum(row.get("learner/skipped_updates", 0) for row in rows))
    console.print(f"{len(rows)} steps" + (f", {skipped} updates skipped" if skipped else ""), highlight=False)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("metric", "first", "last", "run first", "run last"):
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True)
    for name in SHOWN:
        if any(name in row for row in rows):
            ends = [*(rows[i].get(name) for i in (0, -1)), *(theirs[i].get(name) for i in (0, -1) if theirs)]
            table.add_row(name, *("-" if value is None else f"{value:.6g}" for value in ends))
    console.print(table)
