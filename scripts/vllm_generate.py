"""Greedy generation with vLLM's offline engine; run by check_vllm.py with the Python of vLLM's own environment.

Reads a JSON job from standard input: target, draft (or null), method, num_speculative_tokens, prompts (token ids),
max_new_tokens, eos_token_ids. Writes the outputs and vLLM's speculative-decoding counters to the file `result`.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams  # the settings above must be in the environment first


def main() -> None:
    job = json.load(sys.stdin)
    speculative = None
    if job["draft"] is not None:
        speculative = {
            "model": job["draft"],
            "method": job["method"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], detokenize=False, stop_token_ids=job["eos_token_ids"]
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    counters = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counters[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    with open(job["result"], "w") as file:
        json.dump({"tokens": [list(out.outputs[0].token_ids) for out in outputs], "counters": counters}, file)


if __name__ == "__main__":
    main()
