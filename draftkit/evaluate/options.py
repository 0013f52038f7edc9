"""What can be set of a measurement and of its engines, and values of options that are written as text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol

from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import SettingError
from draftkit.io.settings import Setting, setting, settings_of, tokens_of_text
from draftkit.results.settings import Settings


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
        sizes = [tokens_of_text(part) for part in (text or "").split(",") if part]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise SettingError(f"context is {text}", "context", expected="numbers of tokens, as 512 or 1k,4k,16k")
    return tuple(dict.fromkeys(sizes))


class EngineSettings(Protocol):
    """A dataclass of what can be set of one engine, which it names: whoever sets any of it asks for that engine."""

    engine: ClassVar[str]


@dataclass(frozen=True)
class ServerSettings:
    """Which servers are measured: `url` with a draft, `baseline_url` with the same target and none.

    Without the latter nothing is told of speed. Raises `SettingError` for a baseline alone.
    """

    engine: ClassVar[str] = "server"
    url: str = setting("Measure the server at this address, with the draft that it runs with.", "", name="server")
    baseline_url: str | None = setting(
        "A server with the same target and no draft, to compare with.", None, name="server_baseline", needs="server"
    )
    one_by_one: bool = setting(
        "Send a server that tells totals only one request at a time and read its counters between: prompts then have "
        "counts, and lengths intervals. Refused where others use it meanwhile.",
        False,
        needs="server",
    )

    def __post_init__(self) -> None:
        if not self.url:
            raise SettingError("no server to measure", "server", hint="give --server URL, the one with the draft")


@dataclass(frozen=True)
class LlamaCppSettings:
    """The program to start, and the file that what it prints goes to; of several drafts, one for each is numbered, and
    that of the server without a draft has `.plain` in its name."""

    engine: ClassVar[str] = "llama.cpp"
    program: Path = setting(
        "The llama-server that is started; default: of the PATH.",
        Path("llama-server"),
        name="llama_server",
        needs="llama.cpp, started here",
        reads=Path,
    )
    log: Path = field(default=Path("llama-server.log"), metadata={"internal": True})  # numbered for each draft

    def logging_to(self, log: Path) -> LlamaCppSettings:
        """The same settings with another log."""
        return replace(self, log=log)


# The engines that come with settings. An engine that is looked up by its name brings its own (`settings_type`).
ENGINE_SETTINGS: tuple[type[EngineSettings], ...] = (VllmSettings, LlamaCppSettings, ServerSettings)
# The settings that have an option of their own, by its name.
OPTIONS = {
    "num_speculative_tokens": "--k", "tree": "--tree", "max_new_tokens": "--max-new-tokens",
    "concurrency": "--concurrency",
    "prompts": "--dataset", "limit": "--limit", "context": "--context", "slices": "--slice", "device": "--device",
    "dtype": "--dtype", "compile": "--compile", "temperature": "--temperature", "vllm_python": "--vllm-python",
    "server": "--server",
    "server_baseline": "--server-baseline",
}  # fmt: skip


def known_settings(*engines: type) -> list[Setting]:
    """All settings of a measurement and of the engines that it runs in; `engines`: the settings of further ones."""
    classes: dict[type, None] = dict.fromkeys((Settings, *ENGINE_SETTINGS, *engines))
    return [one for cls in classes for one in settings_of(cls)]


def settable_settings(*engines: type) -> list[Setting]:
    """What `--set` takes: the settings without an option of their own."""
    return [one for one in known_settings(*engines) if one.name not in OPTIONS]
