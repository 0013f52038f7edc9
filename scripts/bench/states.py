"""Two ways to take back rejected tokens of a recurrent module: which costs a round less, in time and in memory?

`python -m scripts.bench.states [--hidden 512] [--context 256] [--repeats 5]`

- *A state per row*, as draftkit does: a round's rows go through the module one by one, and each leaves its state.
- *One state*, after the last committed token before the last round: the next forward takes in the tokens accepted
  since, then its own rows. It is not built, so its parts are timed: a forward of more rows whose modules take all of
  them at once and keep one state, which flatters it, and one whose modules take them one by one.

Random hybrid targets on the CPU, float32, one thread. Times are medians, in turns; memory is that of one sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftkit.runtime.attention import NAME
from draftkit.runtime.cache import SlotCache
from draftkit.targets.target import Target
from scripts._bench import arguments, show, stamp

LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"
VOCABULARY = 2048


def targets(hidden: int) -> dict[str, dict[str, Any]]:
    """The arguments of each target's configuration, by its type: eight layers, six of them recurrent."""
    common = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 8,
        "num_attention_heads": hidden // 64, "num_key_value_heads": 2, "head_dim": 64,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
    }  # fmt: skip
    delta = {
        "linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 64, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }  # fmt: skip
    mamba = {
        "mamba_num_heads": hidden // 32, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 64,
    }  # fmt: skip
    conv = {"layer_types": [CONV, CONV, CONV, FULL] * 2, "block_auto_adjust_ff_dim": False}
    return {"qwen3_5_text": common | delta, "nemotron_h": common | mamba, "lfm2": common | conv}


def build(kind: str, settings: dict[str, Any]) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings), dtype=torch.float32)
    model.requires_grad_(False).set_attn_implementation(NAME)
    return Target(model)


def forward(target: Target, batch: int, context: int, rows: int, k: int, *, at_once: bool) -> Callable[[], object]:
    """A forward of so many rows after a context, the states of `k` + 1 positions kept."""
    cache, slots = SlotCache(batch, context + rows, k), torch.arange(batch)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (batch, context + rows), generator=generator)
    positions = torch.arange(context + rows).expand(batch, -1)

    def run(begin: int, end: int, prompt: bool) -> object:
        there = positions[:, begin:end]
        return target.forward(tokens[:, begin:end], there, cache.rows(slots, there, end, prompt=prompt))

    run(0, context, True)
    return lambda: run(context, context + rows, at_once)


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of CPU time, which other work on the machine leaves alone."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if repeat:
                times[name].append(1000 * (time.process_time() - began))
    return {name: statistics.median(measured) for name, measured in times.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind, settings in targets(options.hidden).items():
        target = build(kind, settings)
        for batch, k in product((1, 8), (4, 8)):
            runs = {"per row": forward(target, batch, options.context, k + 1, k, at_once=False)}
            for name, taken in (("least", 1), ("half", k // 2 + 1), ("all", k + 1)):
                runs[name] = forward(target, batch, options.context, taken + k + 1, 0, at_once=True)
            runs["slow"] = forward(target, batch, options.context, 2 * k + 2, 2 * k + 1, at_once=False)
            times = medians(runs, options.repeats)
            memory = " : ".join(f"{target.slot_bytes(0, kept) / 1e6:.2f}" for kept in (k, 0))
            rows.append([kind, batch, k, *(f"{times[name]:.1f}" for name in runs), memory])
    ways = ("state per row", "one state: 1 accepted", "half", "all", "all, row by row")
    show(f"{stamp()}, ms", ("target", "batch", "K", *ways, "MB"), rows)


if __name__ == "__main__":
    main()
