"""Greedy generation with vLLM's offline engine; run by scripts/check/vllm.py with the Python of vLLM's own environment.

Reads a JSON job from standard input: target, speculative (its `speculative_config`), prompts (as of the worker of
draftkit's engine, without sampling), images (how many a prompt has at most), max_new_tokens, eos_token_ids, dtype where
that is not float32, v2 where the V2 model runner is wanted, and plain_ops where vLLM's own operations are not (the
CPU's norm is wrong on parts of a tensor, as latents are). Requests run one after the other. Writes the outputs, vLLM's
speculative-decoding counters and every proposal in order to the file `result`.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from draftkit.engines.vllm.worker import media_of
from scripts.check.parts import vllm_on_cpu

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def record_proposals(v2: bool) -> list[list[int]]:
    """Every proposal from now on, in order. The engine must exist already: it replaces kernels when it starts."""
    if v2:
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator  # DSpark's and DFlash2's base
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        proposers = [DFlashSpeculator, MultiModuleMTPSpeculator, TargetDependentARSpeculator]  # the last: EAGLE's base
    else:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        proposers = [SpecDecodeBaseProposer, NgramProposer]
    proposals: list[list[int]] = []
    for proposer in proposers:
        propose = proposer.propose

        def recorded(self: Any, *args: Any, propose: Callable[..., Any] = propose, **kwargs: Any) -> Any:
            drafted = propose(self, *args, **kwargs)
            rows = drafted.tolist() if hasattr(drafted, "tolist") else drafted
            proposals.extend([int(token) for token in row] for row in rows)
            return drafted

        proposer.propose = recorded
    return proposals


def main() -> None:
    job = json.load(sys.stdin)
    v2 = job.get("v2", False)
    if v2:
        vllm_on_cpu.choose_v2_runner()
    vllm_on_cpu.know_mimo()
    vllm_on_cpu.mend_kernels()
    from vllm import LLM, SamplingParams  # what is above must be in the environment first

    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=not job.get("images"),
        limit_mm_per_prompt={"image": job["images"], "video": 0} if job.get("images") else None,
        dtype=job.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative"],
        compilation_config={"custom_ops": ["none"]} if job.get("plain_ops") else None,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], detokenize=False, stop_token_ids=job["eos_token_ids"]
    )
    proposals = record_proposals(v2)
    tokens, proposed = [], []
    for prompt in job["prompts"]:
        asked = {"prompt_token_ids": prompt["tokens"]} | media_of(prompt)
        (output,) = llm.generate([asked], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        proposed.append(list(proposals))
        proposals.clear()
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counters[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    with open(job["result"], "w") as file:
        json.dump({"tokens": tokens, "proposals": proposed, "counters": counters}, file)


if __name__ == "__main__":
    main()
