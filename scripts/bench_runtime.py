"""Tokens per second of draftkit's runtime and of transformers, on the embedded models, in one process.

`python scripts/bench_runtime.py [--prompts 16] [--max-new-tokens 128] [--threads 1]`

Peers: `generate()` for plain decoding and `generate(assistant_model=…)` for speculative decoding with the same
standalone draft and the same K. All run greedily on the same prompts, in float32 on the CPU or bfloat16 on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftkit import zoo
from draftkit.evaluate.loading import load_drafter, load_model, open_draft
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.models.target import Target
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Request

K = 4
DRAFTS = ("zoo:eagle", "zoo:eagle3", "zoo:draft-model")


def measure(run: Callable[[], int], repeats: int) -> float:
    """Best tokens per second of several runs; the first run, which warms up, does not count."""
    run()
    speeds = []
    for _ in range(repeats):
        began = time.perf_counter()
        tokens = run()
        speeds.append(tokens / (time.perf_counter() - began))
    return max(speeds)


def of_transformers(model: PreTrainedModel, requests: list[Request], **options: object) -> Callable[[], int]:
    """Generation one request at a time, the only batch size of assisted generation."""

    def run() -> int:
        total = 0
        for request in requests:
            ids = torch.tensor([request.prompt], device=model.device)
            out = model.generate(ids, do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0, **options)
            total += out.shape[1] - len(request.prompt)
        return total

    return run


def of_draftkit(engine: Engine, requests: list[Request]) -> Callable[[], int]:
    return lambda: sum(len(generation.tokens) for generation in engine.generate(requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, the same for every tool")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    model, tokenizer = load_model("zoo:target", device=device, dtype=dtype)
    prompts = load_prompts("zoo", options.prompts)
    requests = [Request(p.id, encode_prompt(p, tokenizer), options.max_new_tokens) for p in prompts]
    peer = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=dtype).to(device)
    assistant = AutoModelForCausalLM.from_pretrained(zoo.path("draft-model"), dtype=dtype).to(device)
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    speeds = {
        "transformers generate": measure(of_transformers(peer, requests), options.repeats),
        "transformers assisted, zoo:draft-model": measure(
            of_transformers(peer, requests, assistant_model=assistant), options.repeats
        ),
        "draftkit plain": measure(
            of_draftkit(Engine(Target(model), None, num_speculative_tokens=0, num_slots=1), requests), options.repeats
        ),
    }
    for source in DRAFTS:
        with open_draft(source, "zoo:target") as draft:
            drafter = load_drafter(draft, model)
        engine = Engine(Target(model, drafter.taps), drafter, num_speculative_tokens=K, num_slots=1)
        speeds[f"draftkit, {source}"] = measure(of_draftkit(engine, requests), options.repeats)

    table = Table(
        "run", "tokens/s", "vs generate", "vs assisted", title=f"batch 1, K={K}, {device}, {options.threads} threads"
    )
    plain, assisted = speeds["transformers generate"], speeds["transformers assisted, zoo:draft-model"]
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:.1f}", f"{speed / plain:.2f}×", f"{speed / assisted:.2f}×")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
