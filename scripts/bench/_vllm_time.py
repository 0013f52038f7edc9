"""Times generation with vLLM's offline engine; run by `runtime.py` with the Python of vLLM's own environment.

The first line of standard input is a JSON job: target, speculative (its `speculative_config`, null for plain decoding),
dtype, eager, clock (a function of `time`), num_slots, prompts (token ids), max_new_tokens, eos_token_ids. Each further
line has two numbers: how many requests run together, and how many of the first prompts are generated. Each is answered
with one line of JSON, tokens and seconds. The number of threads is OMP_NUM_THREADS.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other work may be on any core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams  # the settings above must be in the environment first


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    job = json.loads(sys.stdin.readline())
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        max_model_len=1024,
        max_num_seqs=job["num_slots"],
        enable_prefix_caching=False,  # every repeat pays for its prompts, as the other tools do
        speculative_config=job["speculative"],
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], detokenize=False, stop_token_ids=job["eos_token_ids"]
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    clock = getattr(time, job["clock"])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for line in sys.stdin:
        together, count = map(int, line.split())
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = together  # the others wait for a place
        began = clock()
        outputs = llm.generate(prompts[:count], sampling, use_tqdm=False)
        seconds = clock() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
