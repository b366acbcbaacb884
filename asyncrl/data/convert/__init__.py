"""`asyncrl convert`: writes downloaded datasets as Parquet files in verl's schema."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.data.convert import gsm8k, hellaswag, hh_rlhf, math
from asyncrl.data.convert.converter import Converter, Example, SkippedError, Source, find_files, read_records
from asyncrl.errors import ConfigError
from asyncrl.util.hints import unknown_name

CONVERTERS = {
    "gsm8k": gsm8k.CONVERTER,
    "math": math.CONVERTER,
    "hellaswag": hellaswag.CONVERTER,
    "hh-rlhf": hh_rlhf.CONVERTER,
}


def convert(
    name: str, folder: Path, out: Path, *, split: str = "train", instruction: str | None = None
) -> tuple[int, Counter[str]]:
    """Writes a split of a downloaded dataset to `out`; returns the number of rows written, and the number of skipped
    records by reason.

    `instruction` replaces the text that the converter appends to the question. The same files produce the same bytes.
    Raises ConfigError when files are missing, no row is left, or `out` was not written by this command, and DataError
    that names file and row of a malformed record.
    """
    from asyncrl.data.parquet import check_rows_file, write_rows

    converter = CONVERTERS[name]
    if split not in converter.splits:
        raise unknown_name("--split", split, converter.splits)
    check_rows_file(out)
    suffix = converter.instruction if instruction is None else instruction
    rows: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for file in find_files(folder, converter.forms, names=converter.splits[split]):
        for index, (where, record) in enumerate(read_records(file), start=len(rows) + skipped.total()):
            try:
                example = converter.example(record, Source(file, where))
            except SkippedError as reason:
                skipped[str(reason)] += 1
                continue
            rows.append(_row(converter, example, suffix, {"split": split, "index": index}))
    if not rows:
        raise ConfigError(f"--from {folder}: no row of the split {split!r} can be used ({describe_skipped(skipped)})")
    write_rows(out, rows)
    return len(rows), skipped


def describe_skipped(skipped: Counter[str]) -> str:
    """The number of skipped records for each reason, as text."""
    return ", ".join(f"{count} skipped: {reason}" for reason, count in sorted(skipped.items())) or "0 skipped"


def _row(converter: Converter, example: Example, suffix: str, place: dict[str, Any]) -> dict[str, Any]:
    *before, last = example.chat
    if suffix:
        last = last | {"content": f"{last['content']}\n\n{suffix}"}
    return {
        "data_source": converter.data_source,
        "prompt": [*before, last],
        "ability": converter.ability,
        "reward_model": {"style": converter.style, "ground_truth": example.ground_truth},
        "extra_info": place | example.extra_info,
    }
