"""The `asyncrl` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from asyncrl.config import load_config, parse_override
from asyncrl.data.convert import CONVERTERS, convert, describe_skipped
from asyncrl.errors import AsyncrlError, ConfigError, DataError, is_disk_full

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous, off-policy, streaming RL training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Make datasets and small models.", no_args_is_help=True)
app.add_typer(data, name="data")

EXIT_CONFIG = 2

FLAGS = {
    "generators": "launch.generators",
    "learners": "launch.learners",
    "max_staleness": "replay.max_staleness",
    "steps": "steps",
    "run": "run",
}
"""Flags of `launch`, and the config key that each one is short for."""


@app.command()
def launch(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="YAML file, or the name of one in configs/; demo, or with --resume that of the run."),
    ] = None,
    generators: Annotated[int | None, typer.Option(help="Generator processes.")] = None,
    learners: Annotated[int | None, typer.Option(help="Learner ranks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard bound on token age, in learner steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; its folder is runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run of this name where it ended.")] = False,
    discard_journal: Annotated[
        bool,
        typer.Option("--discard-journal", help="Resume from the newest checkpoint alone; the journal is put aside."),
    ] = False,
) -> None:
    """Train. Exit code 0: done, 1: the run failed, 2: bad configuration or data, 130: interrupted."""
    from asyncrl.launch.run import launch as launch_run
    from asyncrl.launch.run_dir import config_of_run

    flags: dict[str, Any] = {
        "generators": generators, "learners": learners, "max_staleness": max_staleness, "steps": steps, "run": run,
    }  # fmt: skip
    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {FLAGS[name]: value for name, value in flags.items() if value is not None}
    if discard_journal and not resume:
        raise ConfigError("--discard-journal: is for a run that goes on; give --resume too")
    if resume:
        settings["resume"] = "must"
        config = config or str(config_of_run(settings.get("run", "run")))
    code = launch_run(load_config(config or "demo", settings), Console(), without_journal=discard_journal)
    raise typer.Exit(code)


@app.command()
def scale(
    generators: Annotated[int, typer.Option(help="Generator processes from now on.")],
    run: Annotated[str, typer.Option(help="Name of the run.")] = "run",
) -> None:
    """Change the number of generators of a running run. Exit code 0: done, 1: it did not succeed, 2: no such run."""
    from asyncrl.launch.commands.running import scale as scale_run

    scale_run(run, generators, Console())


@app.command()
def retrain(
    folder: Annotated[Path, typer.Argument(help="Folder of the run, runs/NAME.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of algorithm, learner and critic, or steps."),
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Policy loss, with its default options.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Step of the run's checkpoint to start from; 0: its model.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results; runs/NAME/retrained/1 and so on.")
    ] = None,
) -> None:
    """Train again on the batches of a run's journal, without generators. Exit code 0: done, 1: failed, or with
    unchanged settings the weights came out different, 2: bad configuration, 130: interrupted."""
    from asyncrl.launch.commands.retrain import retrain as retrain_run

    settings: dict[str, Any] = {"algorithm.loss": loss, "algorithm.loss_options": {}} if loss is not None else {}
    settings |= {"learner.lr": lr} if lr is not None else {}
    settings |= dict(parse_override(text) for text in overrides or [])
    raise typer.Exit(retrain_run(folder, settings, Console(), out=out, start_step=start))


@app.command(name="eval")
def evaluate(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "demo",
    model: Annotated[
        str | None, typer.Option(help="Model folder; runs/NAME/model of the config's run, else model.path.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the results to.")] = None,
) -> None:
    """Evaluate a model on data.eval. Exit code 0: done, 1: failed, 2: bad configuration, 130: interrupted."""
    from asyncrl.launch.commands.evaluate import evaluate as evaluate_model

    settings = dict(parse_override(text) for text in overrides or [])
    settings |= {"run": run} if run is not None else {}
    raise typer.Exit(evaluate_model(load_config(config, settings), Console(), model=model, out=out))


@app.command()
def ledger(folder: Annotated[Path, typer.Argument(help="Folder of the run, runs/NAME.")]) -> None:
    """Show where every group, trajectory and token of a run is. Exit code 0: they add up, 1: not, 2: no such run."""
    from asyncrl.launch.commands.show_ledger import show_ledger

    raise typer.Exit(0 if show_ledger(folder, Console()) else 1)


@app.command()
def top(folder: Annotated[Path, typer.Argument(help="Folder of the run, runs/NAME.")]) -> None:
    """Watch a running run from another terminal. Ctrl-C ends the view, not the run."""
    from asyncrl.launch.commands.running import top as show_top

    show_top(folder, Console())


FROM = typer.Option("--from", help="Folder of a run, runs/NAME, or its trace.parquet.")


@app.command()
def simulate(
    run: Annotated[Path | None, FROM] = None,
    generators: Annotated[int | None, typer.Option(help="Generators; with --from that of the run, as below.")] = None,
    learners: Annotated[int | None, typer.Option(help="Learner ranks.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard bound on token age, in learner steps.")] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Groups in the batch of a step.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Trajectories of a prompt.")] = None,
    max_running_groups: Annotated[int | None, typer.Option(help="Groups that a generator works on at once.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longer completions are cut.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    generators_per_device: Annotated[int | None, typer.Option(help="Generators that take turns on a device.")] = None,
    turns: Annotated[
        float | None, typer.Option(min=1, help="Time of an engine step then, beyond their number; 1.1.")
    ] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="Without --from: mean length of a completion.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Spread of the logarithm of the lengths; 1.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest completion; 8 times the mean.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a prompt; 0.")] = None,
    refunded_fraction: Annotated[float | None, typer.Option(help="Groups without signal; 0.")] = None,
    engine_base_ms: Annotated[float | None, typer.Option(help="Of an engine step, whatever runs.")] = None,
    engine_sequence_us: Annotated[float | None, typer.Option(help="Of each sequence in it; 0.")] = None,
    engine_request_ms: Annotated[float | None, typer.Option(help="Of each sequence once, its prompt; 0.")] = None,
    learner_base_s: Annotated[float | None, typer.Option(help="Of an optimizer step, whatever its batch; 0.")] = None,
    learner_token_us: Annotated[float | None, typer.Option(help="Of each token in it, on one learner.")] = None,
    broadcast_s: Annotated[float | None, typer.Option(help="Until generators have new weights; 0.")] = None,
    swap_ms: Annotated[float | None, typer.Option(help="How long a swap of weights holds an engine; 0.")] = None,
    reward_s: Annotated[float | None, typer.Option(help="Until a group has its rewards; 0.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths that are drawn.")] = 0,
) -> None:
    """Predict throughput, idle time and staleness of a run with other settings. Exit code 2: it cannot be predicted."""
    from asyncrl.plan.show import show_simulation

    changes = {
        "generators": generators, "learners": learners, "max_staleness": max_staleness,
        "groups_per_step": groups_per_step, "group_size": group_size, "max_running_groups": max_running_groups,
        "max_new_tokens": max_new_tokens, "steps": steps, "generators_per_device": generators_per_device,
    }  # fmt: skip
    numbers = {
        "mean_tokens": mean_tokens, "sigma": sigma, "max_tokens": max_tokens, "prompt_tokens": prompt_tokens,
        "refunded_fraction": refunded_fraction, "engine_base_ms": engine_base_ms,
        "engine_sequence_us": engine_sequence_us, "engine_request_ms": engine_request_ms,
        "learner_base_s": learner_base_s, "learner_token_us": learner_token_us, "broadcast_s": broadcast_s,
        "swap_ms": swap_ms, "reward_s": reward_s,
    }  # fmt: skip
    given: dict[str, float] = {name: float(value) for name, value in numbers.items() if value is not None}
    changed = {name: value for name, value in changes.items() if value is not None}
    show_simulation(Console(), run, given, changed, turns=turns, seed=seed)


@app.command()
def plan(
    run: Annotated[Path, FROM],
    devices: Annotated[int, typer.Option(help="GPUs, or cores, to split between generators and learners.")],
    max_staleness: Annotated[int, typer.Option(help="Highest staleness limit to consider.")] = 8,
) -> None:
    """Find the split of the devices, and the staleness limit, that would train the most tokens per second. Exit code
    2: there is none."""
    from asyncrl.plan.show import show_plan

    show_plan(Console(), run, devices=devices, max_staleness=max_staleness)


@app.command()
def sweep(
    max_staleness: Annotated[str, typer.Option(help="Limits to try, as in 0,1,2,4,8.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each limit.")] = 3,
    config: Annotated[str, typer.Option(help="YAML file, or the name of one in configs/.")] = "demo",
    name: Annotated[str, typer.Option(help="Of the sweep; its cells are runs/NAME-s0-seed0 and so on.")] = "sweep",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each training.")] = None,
) -> None:
    """Train with several staleness limits and say which to take; again to resume. Exit code 0: done, 1: a training
    failed, 2: bad configuration, 130: interrupted."""
    from asyncrl.plan.sweep.cells import sweep as sweep_runs

    arguments = [*(overrides or []), *([f"steps={steps}"] if steps is not None else [])]
    raise typer.Exit(sweep_runs(name, config, arguments, max_staleness, seeds, Console()))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure the hot paths against their limits and against other systems; --help describes the rows."""
    from asyncrl.launch.commands.bench import run_bench

    raise typer.Exit(run_bench(context.args))


@app.command(name="config")
def show_keys(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings over those of the file.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file, or the name of one in configs/; the defaults when not given.")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only keys whose values are not the defaults.")] = False,
) -> None:
    """Print every key of a config: its value, default, allowed values and meaning. Exit code 2: bad configuration."""
    from asyncrl.launch.commands.show_config import show_config

    show_config(config, dict(parse_override(text) for text in overrides or []), Console(), diff=diff)


@app.command(name="list")
def list_parts() -> None:
    """Print the parts that a config can name, with their options and defaults."""
    from asyncrl.launch.registry import print_parts

    print_parts(Console())


@data.command()
def arithmetic(
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shuffle.")] = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Only the first N rows; all sums when not set.")] = None,
) -> None:
    """Make the arithmetic dataset of the demo."""
    from asyncrl.data.arithmetic import make_arithmetic

    make_arithmetic(out, seed=seed, rows=rows)


@data.command()
def tiny_model(
    out: Annotated[Path, typer.Argument(help="Folder to write the model and its tokenizer to.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights and of the warm start.")] = 0,
) -> None:
    """Make the tiny, warm-started model of the demo."""
    from asyncrl.data.tiny_model import make_tiny_model

    make_tiny_model(out, seed=seed)


def _add_converter(name: str) -> None:
    converter = CONVERTERS[name]

    def run(
        folder: Annotated[Path, typer.Option("--from", help="Folder that the dataset was downloaded to.")],
        out: Annotated[Path, typer.Option(help="Parquet file to write.")],
        split: Annotated[str, typer.Option(help="Part of the dataset to convert.")] = "train",
        instruction: Annotated[
            str, typer.Option(help="Appended to the question; empty for nothing.")
        ] = converter.instruction,
    ) -> None:
        written, skipped = convert(name, folder, out, split=split, instruction=instruction)
        print(f"{out}: {written} rows written, {describe_skipped(skipped)}")

    splits = ", ".join(converter.splits)
    data.command(name, help=f"Convert {converter.data_source} (splits: {splits}) to verl's schema.")(run)


for _name in CONVERTERS:
    _add_converter(_name)


def main() -> None:
    """Runs the command; errors made on purpose, and files that cannot be used, are one line without a traceback."""
    try:
        app()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except AsyncrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if is_disk_full(error):
            print(f"error: {error.filename or 'a file'}: no space is left on the disk; free some", file=sys.stderr)
            sys.exit(1)
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
