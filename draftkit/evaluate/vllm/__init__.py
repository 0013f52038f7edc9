"""Measuring with vLLM: its offline engine, or a server that runs already."""

from draftkit.evaluate.vllm.measure import check_with_vllm, measure_with_vllm, run_plain
from draftkit.evaluate.vllm.records import VllmRun
from draftkit.evaluate.vllm.settings import VllmSettings

__all__ = ["VllmRun", "VllmSettings", "check_with_vllm", "measure_with_vllm", "run_plain"]
