"""What a measurement is to be made with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.modes import Verification

Turns = Literal["first", "all"]


@dataclass(frozen=True)
class Settings:
    """How to measure. `dtype` and `device` None: bfloat16 on a GPU where there is one, float32 on the CPU.

    Request i is drawn with the seed `sampling.seed` + i. `acceptance_rates` are those of synthetic verification.
    `turns`: the first of each prompt, or all of them, each after the target's own answers. `thinking`: the chat
    template's `enable_thinking`, None for its default. `template`: whether the chat template is applied; None where
    there is one, and the prompt is no plain text. `ignore_eos`: every output has `max_new_tokens`.
    """

    num_speculative_tokens: int = 4
    max_new_tokens: int = 128
    concurrency: int = 1
    prompts: str = "zoo"
    limit: int | None = None
    turns: Turns = "first"
    thinking: bool | None = None
    template: bool | None = None
    ignore_eos: bool = False
    device: str | None = None
    dtype: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    draft_sampling: DraftSampling = field(default_factory=DraftSampling)
    verification: Verification = "rejection"
    acceptance_rates: tuple[float, ...] | None = None
    k_by_batch: dict[int, int] | None = None
    eager: bool = False

    @property
    def draft_mode(self) -> str:
        """How drafts are drawn at these settings: greedy or probabilistic."""
        return "probabilistic" if self.draft_sampling.parameters(self.sampling).temperature else "greedy"

    @property
    def exact(self) -> bool:
        """Whether the output must be that of plain decoding, token for token."""
        return self.verification == "coupled" or (self.sampling.temperature == 0 and self.verification != "synthetic")


@dataclass(frozen=True)
class Sweep:
    """The settings that are varied, each over several values; empty for the one of the settings."""

    k: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    temperature: tuple[float, ...] = ()

    def groups(self, settings: Settings) -> Iterator[tuple[Settings, list[Settings]]]:
        """Settings that share a run without a draft, and those of each K among them."""
        for temperature in self.temperature or (settings.sampling.temperature,):
            for concurrency in self.concurrency or (settings.concurrency,):
                sampling = replace(settings.sampling, temperature=temperature)
                shared = replace(settings, sampling=sampling, concurrency=concurrency)
                drafting = self.k or (settings.num_speculative_tokens,)
                yield shared, [replace(shared, num_speculative_tokens=k) for k in drafting]

    def largest(self, settings: Settings) -> Settings:
        """The settings that take the most memory."""
        return replace(
            settings,
            num_speculative_tokens=max(self.k, default=settings.num_speculative_tokens),
            concurrency=max(self.concurrency, default=settings.concurrency),
        )
