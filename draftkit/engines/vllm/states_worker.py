"""Hidden states from vLLM; run by `draftkit.engines.vllm.states` with the Python of vLLM's own environment.

Reads JSON lines from standard input. The first is the job: model, layer_ids, dtype, max_model_len,
tensor_parallel_size, folder. Each further one is a list of token sequences; once vLLM has written their states, the
answer is a line with the list of their files. Anything that is printed goes to standard error.
"""

import fcntl
import json
import os
import sys
import time
from typing import Any, TypedDict

import torch

POLL_SECONDS = 0.005


class Job(TypedDict):
    model: str
    layer_ids: list[int]
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    folder: str


def engine_settings(job: Job) -> dict[str, object]:
    return {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "enforce_eager": True,
        "max_model_len": job["max_model_len"],
        "max_num_batched_tokens": max(job["max_model_len"], 8192),
        "tensor_parallel_size": job["tensor_parallel_size"],
        # A cached prefix or a prompt in chunks would leave states out.
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layer_ids"]}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["folder"]},
        },
    }


def prepare_cpu() -> None:
    """vLLM's engine in this process, and no pinned memory, which torch has only with an accelerator."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    empty_like = torch.empty_like

    def unpinned(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return empty_like(tensor, **options | {"pin_memory": False})

    torch.empty_like = unpinned  # type: ignore[assignment]


def complete_events() -> None:
    """The CPU build's stand-ins for CUDA events lack `query`: what they would wait for is already done."""
    for event in (torch.Event, torch.cuda.Event):
        if event.__name__ == "_EventPlaceholder":
            event.query = lambda self: True  # type: ignore[method-assign]


def is_written(path: str) -> bool:
    """The writer holds the lock beside a file until it is complete."""
    with open(path + ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # before vLLM, which logs to standard output
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    job: Job = json.loads(sys.stdin.readline())
    if current_platform.is_cpu():
        prepare_cpu()
    llm = LLM(**engine_settings(job))
    if current_platform.is_cpu():
        complete_events()
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(line)]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        while not all(map(is_written, paths)):
            if current_platform.is_cpu():
                llm.llm_engine.step()  # an engine in this process writes the last files only when it is stepped
            time.sleep(POLL_SECONDS)
        print(json.dumps(paths), file=answers, flush=True)


if __name__ == "__main__":
    main()
