"""What is asked of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, get_args

from draftkit.errors import DraftkitError, SettingError, require_count, require_setting
from draftkit.requests import (
    DraftSampling,
    SamplingParameters,
    SyntheticAcceptance,
    Turns,
    Verification,
    check_rates,
    check_schedule,
)

SLICES = ("language", "thinking", "tools", "category")


@dataclass(frozen=True)
class Settings:
    """How to measure one cell. `dtype` and `device` None: bfloat16 on a GPU where there is one, float32 on the CPU.

    Request i is drawn with the seed `sampling.seed` + i. `acceptance_rates` are those of synthetic verification, one
    for each position; `SyntheticAcceptance.of_length` has those of a mean length. `k_by_batch`: largest batch → K.
    `turns`: the first of each prompt, or all of them, each after the target's own answers. `thinking`: the chat
    template's `enable_thinking`, None for its default. `template`: whether the chat template is applied; None where
    there is one, and the prompt is no plain text. `context`: tokens that prompts are
    padded to, with real text of the set; 0 leaves them. `slices`: along what the prompts are told apart: language,
    thinking, tools, category. `ignore_eos`: every output has `max_new_tokens`. `repeats`: passes
    over the prompts at most, without a draft and with it by turns, until their ratio is known to ±5 %; 0 runs plain
    decoding once, before all drafts.

    Raises `SettingError` for a value outside its range, and for two that do not go together.
    """

    num_speculative_tokens: int = 4
    max_new_tokens: int = 128
    concurrency: int = 1
    prompts: str = "zoo"
    limit: int | None = None
    turns: Turns = "first"
    thinking: bool | None = None
    template: bool | None = None
    context: int = 0
    slices: tuple[str, ...] = ()
    ignore_eos: bool = False
    repeats: int = 3
    device: str | None = None
    dtype: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    draft_sampling: DraftSampling = field(default_factory=DraftSampling)
    verification: Verification = "rejection"
    acceptance_rates: tuple[float, ...] | None = None
    k_by_batch: dict[int, int] | None = None
    eager: bool = False

    def __post_init__(self) -> None:
        require_count("num_speculative_tokens", self.num_speculative_tokens)
        require_count("max_new_tokens", self.max_new_tokens, least=2)
        require_count("concurrency", self.concurrency)
        require_count("context", self.context, least=0)
        require_count("repeats", self.repeats, least=0)
        if self.limit is not None:
            require_count("limit", self.limit)
        require_setting(self.turns in get_args(Turns), "turns", self.turns, ", ".join(get_args(Turns)))
        modes = get_args(Verification)
        require_setting(self.verification in modes, "verification", self.verification, ", ".join(modes))
        for kind in self.slices:
            require_setting(kind in SLICES, "slices", kind, ", ".join(SLICES))
        rates = None if self.acceptance_rates is None else SyntheticAcceptance(self.acceptance_rates)
        check_rates(rates, self.verification, self.num_speculative_tokens)
        if self.k_by_batch is not None:
            check_schedule(self.k_by_batch, self.num_speculative_tokens)

    @property
    def draft_mode(self) -> str:
        """How drafts are drawn at these settings: greedy or probabilistic."""
        return "probabilistic" if self.draft_sampling.parameters(self.sampling).temperature else "greedy"

    @property
    def exact(self) -> bool:
        """Whether the output must be that of plain decoding, token for token."""
        return self.verification == "coupled" or (self.sampling.temperature == 0 and self.verification != "synthetic")

    def at(
        self,
        *,
        num_speculative_tokens: int | None = None,
        concurrency: int | None = None,
        temperature: float | None = None,
        context: int | None = None,
    ) -> Settings:
        """The same settings but for those that a sweep varies; None keeps what they are."""
        return replace(
            self,
            num_speculative_tokens=_or(num_speculative_tokens, self.num_speculative_tokens),
            concurrency=_or(concurrency, self.concurrency),
            context=_or(context, self.context),
            sampling=replace(self.sampling, temperature=_or(temperature, self.sampling.temperature)),
        )

    def sweep(
        self,
        *,
        k: Sequence[int] = (),
        concurrency: Sequence[int] = (),
        temperature: Sequence[float] = (),
        context: Sequence[int] = (),
    ) -> Sweep:
        """Every combination of these values, all else as it is; without values, that of these settings.

        Raises `SettingError` for several K with acceptance rates or K by batch, which are for one.
        """
        self._check_ks(k)
        return Sweep(
            tuple(
                self.at(num_speculative_tokens=tokens, concurrency=batch, temperature=hot, context=length)
                for length in context or (self.context,)
                for hot in temperature or (self.sampling.temperature,)
                for batch in concurrency or (self.concurrency,)
                for tokens in k or (self.num_speculative_tokens,)
            )
        )

    def _check_ks(self, ks: Sequence[int]) -> None:
        if len(set(ks)) > 1 and (self.acceptance_rates is not None or self.k_by_batch is not None):
            raise SettingError("acceptance rates and schedules are for one K", "num_speculative_tokens", expected="one")


Value = TypeVar("Value", int, float)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


@dataclass(frozen=True)
class Sweep:
    """Settings that are measured one after another: what all of one measurement are asked.

    They are alike but for K, concurrency, temperature and context. Raises `DraftkitError` otherwise, and for none.
    """

    settings: tuple[Settings, ...]

    def __post_init__(self) -> None:
        if len({_shared(settings) for settings in self.settings}) != 1:
            raise DraftkitError(
                f"a sweep of {len(self.settings)} settings",
                expected="at least one, and no difference but in K, concurrency, temperature and context",
            )
        self.first._check_ks(self.k)

    @classmethod
    def of(cls, asked: Settings | Sweep) -> Sweep:
        return asked if isinstance(asked, Sweep) else cls((asked,))

    @property
    def first(self) -> Settings:
        return self.settings[0]

    @property
    def k(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.num_speculative_tokens for settings in self.settings))

    @property
    def concurrency(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.concurrency for settings in self.settings))

    @property
    def temperature(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(settings.sampling.temperature for settings in self.settings))

    @property
    def context(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.context for settings in self.settings))

    @property
    def groups(self) -> list[tuple[Settings, ...]]:
        """The settings, those together that share a run without a draft."""
        groups: dict[tuple[float, ...], list[Settings]] = {}
        for settings in self.settings:
            shared = (settings.context, settings.sampling.temperature, settings.concurrency)
            groups.setdefault(shared, []).append(settings)
        return [tuple(group) for group in groups.values()]

    @property
    def largest(self) -> Settings:
        """The settings that would take the most memory."""
        most = max(self.concurrency)
        return self.first.at(num_speculative_tokens=max(self.k), concurrency=most, context=max(self.context))


def _shared(settings: Settings) -> str:
    """What all settings of a sweep have in common, to compare; there may be dictionaries in it."""
    varied = {"num_speculative_tokens", "concurrency", "context"}
    shared = {name: value for name, value in vars(settings.at(temperature=0.0)).items() if name not in varied}
    return repr(shared)
