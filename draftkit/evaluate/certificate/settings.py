"""What a certificate is asked for: the setting to certify, and how much to sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftkit.errors import require_setting
from draftkit.requests import DraftSampling, SamplingParameters, Verification


@dataclass(frozen=True, slots=True)
class CertificateSettings:
    """`dtype` and `device` None: bfloat16 on a GPU where there is one, float32 on the CPU.

    `limit` prompts are decoded to `max_new_tokens` or less, `concurrency` of them together, with each number of draft
    tokens. Sampling is tested at each of `temperatures`, with the cuts and the `draft_sampling`: `sampler_texts` texts
    of the verifier alone for each kind of draft, `continuations` of each of `continuation_prompts` prompts end to end.
    `floor_quantile`: of the measured noise, the part that is taken for its floor. `false_alarm_rate`: of all
    statistical tests together, for a lossless engine.

    Raises `SettingError` for values that leave nothing to measure.
    """

    num_speculative_tokens: tuple[int, ...] = (4,)
    concurrency: int = 4
    max_new_tokens: int = 32
    prompts: str = "zoo"
    limit: int = 8
    device: str | None = None
    dtype: str | None = None
    temperatures: tuple[float, ...] = (1.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_sampling: DraftSampling = field(default_factory=DraftSampling)
    thinking: bool | None = None
    template: bool | None = None
    verification: Verification = "rejection"
    seed: int = 0
    sampler_texts: int = 4000
    continuations: int = 150
    continuation_prompts: int = 2
    floor_quantile: float = 0.999
    false_alarm_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("concurrency", "limit", "continuations", "continuation_prompts"):
            require_setting(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        ks, hot = self.num_speculative_tokens, self.temperatures
        require_setting(min(ks, default=0) >= 1, "num_speculative_tokens", ks, "at least 1")
        require_setting(self.max_new_tokens >= 4, "max_new_tokens", self.max_new_tokens, "at least 4")
        require_setting(self.sampler_texts >= 100, "sampler_texts", self.sampler_texts, "at least 100")
        require_setting(min(hot, default=1) > 0, "temperatures", hot, "above 0: greedy decoding is tested anyway")
        require_setting(0.5 <= self.floor_quantile <= 1, "floor_quantile", self.floor_quantile, "between 0.5 and 1")
        modes = ("rejection", "block")
        require_setting(self.verification in modes, "verification", self.verification, "rejection or block, to certify")
        require_setting(0 < self.false_alarm_rate < 1, "false_alarm_rate", self.false_alarm_rate, "between 0 and 1")

    @property
    def samplings(self) -> tuple[SamplingParameters, ...]:
        """How the first of the sampled requests is drawn, at each temperature."""
        return tuple(SamplingParameters(t, self.top_k, self.top_p, self.min_p, self.seed) for t in self.temperatures)
