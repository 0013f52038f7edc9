"""Values of `eval` options that are written as text."""

from __future__ import annotations

from draftkit.errors import SettingError
from draftkit.io.jsonfile import loads
from draftkit.requests import SyntheticAcceptance


def parse_integers(setting: str, text: str) -> tuple[int, ...]:
    """`1-8,12` → every whole number from 1 to 8, and 12; ascending. Raises `SettingError` for anything else."""
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            numbers.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        numbers.clear()
    if not numbers or min(numbers) < 1:
        raise SettingError(f"{setting} is {text}", setting, expected="whole numbers from 1 on, as 4, 1,8 or 1-4,8")
    return tuple(sorted(numbers))


def parse_floats(setting: str, text: str) -> tuple[float, ...]:
    """`0,0.7,1` → the numbers. Raises `SettingError` for anything else."""
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise SettingError(f"{setting} is {text}", setting, expected="numbers, as 0 or 0,0.7,1") from None


def parse_contexts(text: str | None) -> tuple[int, ...]:
    """`1k,4k` → tokens, k for 1,024 of them; empty where nothing is given. Raises `SettingError` for anything else."""
    try:
        sizes = [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in (text or "").split(",") if part]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise SettingError(f"context is {text}", "context", expected="numbers of tokens, as 512 or 1k,4k,16k")
    return tuple(dict.fromkeys(sizes))


def parse_slices(text: str | None) -> tuple[str, ...]:
    """`language,tools` → both; empty where nothing is given."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def parse_object(setting: str, text: str | None) -> dict[str, object]:
    """A JSON object; empty where nothing is given. Raises `SettingError` for anything else."""
    try:
        value = loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingError(f"{setting} is {text}", setting, expected="a JSON object")
    return value


def parse_rates(text: str | None, k: int) -> tuple[float, ...] | None:
    """`0.8,0.6,0.5` → the rates of K = 3 positions; one number above 1 is a mean acceptance length.

    Raises `SettingError` for anything else.
    """
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingError(
            f"acceptance_rates is {text}",
            "acceptance_rates",
            expected="a rate for each position, as 0.8,0.6, or a mean length, as 2.5",
        ) from None
    if len(numbers) == 1 and (numbers[0] > 1 or k > 1):
        return SyntheticAcceptance.of_length(numbers[0], k).rates
    return numbers


def parse_schedule(pairs: str | None, disable_above: int | None, k: int) -> dict[int, int] | None:
    """`4:6,16:3` → {4: 6, 16: 3}, largest batch → K; `disable_above` N alone is {N: K}. Raises `SettingError`."""
    if pairs is None:
        return None if disable_above is None else {disable_above: k}
    if disable_above is not None:
        what = "--k-by-batch and --disable-above-batch say the same thing twice"
        raise SettingError(what, "k_by_batch", hint="give one of them")
    try:
        return {int(batch): int(count) for batch, count in (pair.split(":") for pair in pairs.split(","))}
    except ValueError:
        what = f"k_by_batch is {pairs}"
        raise SettingError(what, "k_by_batch", expected="largest batch:K pairs, as 4:6,16:3") from None
