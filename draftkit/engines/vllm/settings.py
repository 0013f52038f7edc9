"""Settings of vLLM: the environment that it runs in and its engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from draftkit.errors import require_count, require_setting
from draftkit.io.settings import setting

STARTED = "vLLM, started here"  # the engine for which most of these settings have a meaning


@dataclass(frozen=True)
class VllmSettings:
    """Settings of a vLLM that draftkit runs on this machine.

    `python`: the interpreter of an environment with vLLM; None takes the running one. `engine_arguments` go to
    `vllm.LLM` over draftkit's own, and what they have under `speculative_config` over what is known of the draft.
    Raises `SettingError` for values outside their range.
    """

    engine: ClassVar[str] = "vllm"
    python: str | None = setting(
        "The Python of an environment with vLLM; default: this one.", None, name="vllm_python", needs=STARTED
    )
    tensor_parallel_size: int = setting("GPUs that vLLM splits the target over.", 1, unit="GPUs", needs=STARTED)
    gpu_memory_utilization: float | None = setting("Share of a GPU's memory that vLLM takes.", None, needs=STARTED)
    engine_arguments: Mapping[str, object] = setting(
        "Further arguments of vllm.LLM, as a JSON object.", factory=dict, name="vllm_arguments", needs=STARTED
    )

    def __post_init__(self) -> None:
        require_count("tensor_parallel_size", self.tensor_parallel_size)
        if (share := self.gpu_memory_utilization) is not None:
            require_setting(0 < share <= 1, "gpu_memory_utilization", share, "above 0, at most 1")
