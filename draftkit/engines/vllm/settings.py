"""Where vLLM runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class VllmSettings:
    """vLLM on this machine, or a server that runs already.

    `python`: the interpreter of an environment with vLLM; None takes the running one. `engine_arguments` go to
    `vllm.LLM` over draftkit's own, and what they have under `speculative_config` over what is known of the draft.
    `url`: the address of a server with the draft, as `http://host:8000`; then nothing is started here, and the settings
    above mean nothing. `baseline_url`: one with the same target and no draft.
    """

    python: str | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    engine_arguments: Mapping[str, object] = field(default_factory=dict)
    url: str | None = None
    baseline_url: str | None = None
