"""Console output of `asyncrl plan --fleet`: tables in Markdown, as they are in docs/cluster.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.plan.fleet import Fleet, least_gpus, plan_fleet
from asyncrl.plan.hardware import ASSUMED, MODELS, Constants, Job, ModelShape, constants_in_use
from asyncrl.util.hints import unknown_name

MAX_GPUS = 1 << 15
RUN_TITLES = (
    "model", "GPUs", "engines x TP + learner", "groups a step", "step, s", "tokens/s a GPU", "sequences an engine",
    "answer, steps", "queue, cores", "failure every, h", "lost, %", "lost by hand, %", "limits",
)  # fmt: skip
WEIGHT_TITLES = (
    "model", "GPUs", "version, GB", "tree", "chain", "NCCL", "shards", "delta", "delta, MB", "fastest", "20 Mb/s",
)  # fmt: skip
CONSTANT_TITLES = ("constant", "value", "what", "source")
MODEL_TITLES = ("model", "weights", "a token uses", "layers", "hidden", "key-value heads", "shape of")


def show_fleet(console: Console, gpus: str, models: str, *, max_staleness: int, answer_tokens: float) -> None:
    """Prints the run of each model on each number of GPUs, the ways of its weights, and the constants. Raises
    ConfigError."""
    if not 1 <= answer_tokens <= 1 << 20:
        raise ConfigError(f"--mean-tokens {answer_tokens:g}: must be from 1 to {1 << 20:,}")
    given = Constants(job=Job(answer_tokens=answer_tokens))
    shapes, numbers = _models(models), _numbers(gpus)
    fleets = [
        (shape, number, plan_fleet(shape, number, max_staleness=max_staleness, constants=given))
        for shape in shapes
        for number in numbers
    ]
    runs = [_run_row(shape, number, fleet, given) for shape, number, fleet in fleets]
    weights = [_weight_row(fleet) for _, _, fleet in fleets if fleet is not None]
    _print(console, f"Computed, not measured. max_staleness {max_staleness}.", RUN_TITLES, runs)
    _print(console, "Seconds until all engines have a version; in brackets the same in steps.", WEIGHT_TITLES, weights)
    _print(console, "Models:", MODEL_TITLES, (_model_row(shape) for shape in shapes))
    _print(console, f"Constants ({ASSUMED}: by nobody measured for this):", CONSTANT_TITLES, _constant_rows(given))


def _models(names: str) -> list[ModelShape]:
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in MODELS:
            raise unknown_name("--model", name, MODELS)
    return [MODELS[name] for name in wanted]


def _numbers(gpus: str) -> list[int]:
    try:
        numbers = [int(text) for text in gpus.split(",")]
    except ValueError:
        raise ConfigError(f"--gpus {gpus}: must be numbers, as in 8,64,512") from None
    if wrong := [number for number in numbers if not 2 <= number <= MAX_GPUS]:
        raise ConfigError(f"--gpus {wrong[0]}: must be from 2 to {MAX_GPUS:,}")
    return numbers


def _run_row(model: ModelShape, gpus: int, fleet: Fleet | None, given: Constants) -> list[str]:
    if fleet is None:
        told = f"does not fit: at least {least_gpus(model, given)} GPUs"
        return [model.name, f"{gpus:,}", told, *[""] * (len(RUN_TITLES) - 3)]
    return [
        model.name,
        f"{gpus:,}",
        f"{fleet.engines:,}x{fleet.tp} + {fleet.learners:,}",
        f"{fleet.groups:,}",
        short(fleet.step_s),
        short(fleet.tokens_per_s / gpus),
        f"{short(fleet.sequences)} of {fleet.fitting_sequences}",
        short(fleet.answer_s / fleet.step_s),
        short(fleet.queue_cores),
        short(fleet.failure_s / 3600),
        short(100 * fleet.loss),
        short(100 * fleet.loss_by_hand),
        ", ".join(fleet.limits),
    ]


def _weight_row(fleet: Fleet) -> list[str]:
    ways, step_s = fleet.deliveries, fleet.step_s
    stride = ways.far_stride(step_s)
    follows = "no" if stride is None else "each step" if stride == 1 else f"each {stride}th"
    return [
        fleet.model.name,
        f"{fleet.gpus:,}",
        short(fleet.model.bytes / 1e9),
        *(_in_steps(way_s, step_s) for way_s in (ways.tree_s, ways.chain_s, ways.nccl_s, ways.shards_s, ways.delta_s)),
        short(ways.delta_bytes / 1e6),
        ways.fastest[0],
        f"{_in_steps(ways.far_s, step_s)}: {follows}",
    ]


def _model_row(model: ModelShape) -> list[str]:
    sizes = (f"{number / 1e9:g}e9" for number in (model.parameters, model.active))
    return [model.name, *sizes, str(model.layers), f"{model.hidden:,}", str(model.kv_heads), model.source]


def _constant_rows(given: Constants) -> Iterable[list[str]]:
    return ([f"`{name}`", f"{value:g}", meaning, source] for name, value, meaning, source in constants_in_use(given))


def _in_steps(seconds: float, step_s: float) -> str:
    steps = seconds / step_s
    return short(seconds) + (f" ({short(steps)})" if steps >= 0.1 else "")


def short(number: float) -> str:
    """The number with two digits, or with all of those before the point."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


def _print(console: Console, text: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [titles, ["---"] * len(titles), *rows]
    console.print(f"\n{text}\n", highlight=False, markup=False, soft_wrap=True)
    for line in lines:
        console.print(f"| {' | '.join(line)} |", highlight=False, markup=False, soft_wrap=True)
