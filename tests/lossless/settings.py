"""What a certificate is asked for: the settings to certify, and how much to sample."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftkit.errors import require_setting
from draftkit.requests import SamplingParameters
from draftkit.results.settings import Settings, Sweep


def _usual() -> Sweep:
    return Settings(concurrency=4, max_new_tokens=32, limit=8).sweep(temperature=(1.0,))


@dataclass(frozen=True)
class CertificateSettings:
    """The settings of `sweep` that are certified, and how.

    The prompts are decoded with each K of the sweep, by the most requests together that it has. Sampling is tested at
    each of its temperatures above 0, with the cuts and the drafts' own sampling: `sampler_texts` texts of the verifier
    alone for each kind of draft, `continuations` of each of `continuation_prompts` prompts end to end.
    `floor_quantile`: of the measured noise, the part that is taken for its floor. `false_alarm_rate`: of all
    statistical tests together, for a lossless engine.

    Raises `SettingError` for values that leave nothing to measure.
    """

    sweep: Sweep = field(default_factory=_usual)
    sampler_texts: int = 4000
    continuations: int = 150
    continuation_prompts: int = 2
    floor_quantile: float = 0.999
    false_alarm_rate: float = 1e-3

    def __post_init__(self) -> None:
        self.sweep.require_certifiable()
        for name in ("continuations", "continuation_prompts"):
            require_setting(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        most = self.eval_settings.max_new_tokens
        require_setting(most >= 4, "max_new_tokens", most, "at least 4")
        require_setting(self.sampler_texts >= 100, "sampler_texts", self.sampler_texts, "at least 100")
        require_setting(0.5 <= self.floor_quantile <= 1, "floor_quantile", self.floor_quantile, "between 0.5 and 1")
        require_setting(0 < self.false_alarm_rate < 1, "false_alarm_rate", self.false_alarm_rate, "between 0 and 1")

    @property
    def eval_settings(self) -> Settings:
        """What all settings of the sweep have in common."""
        return self.sweep.first

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those at which sampling is tested; greedy decoding is tested anyway."""
        return tuple(temperature for temperature in self.sweep.temperature if temperature > 0)

    @property
    def samplings(self) -> tuple[SamplingParameters, ...]:
        """How the first of the sampled requests is drawn, at each temperature."""
        return tuple(replace(self.eval_settings.sampling, temperature=temperature) for temperature in self.temperatures)
