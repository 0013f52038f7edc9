"""Values of `eval` options that are written as text, and the settings of llama.cpp's server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.errors import SettingError
from draftkit.io.settings import setting


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


@dataclass(frozen=True)
class LlamaCppSettings:
    """The program to start, and the file that what it prints goes to; of several drafts, one for each is numbered, and
    that of the server without a draft has `.plain` in its name."""

    program: Path = setting(
        "The llama-server that is started; default: of the PATH.",
        Path("llama-server"),
        name="llama_server",
        needs="--engine llama.cpp",
        reads=Path,
    )
    log: Path = Path("llama-server.log")

    def logging_to(self, log: Path) -> LlamaCppSettings:
        """The same with another log."""
        return replace(self, log=log)
