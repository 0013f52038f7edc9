"""What a round costs by arithmetic: the bytes that it reads, what it computes, the kernels that it launches.

    python -m scripts.bench.roofline

Prints draftkit's rounds with the kernels of benchmarks/data/launches.json, and what vLLM has published beside what the
cost model predicts. A forward takes the longer of reading weights and cache once and of computing; each kernel adds a
gap. No GPU is needed, and nothing is timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from draftkit.evaluate.round_cost import A100_40, B200, H100, PER_LAYER, PER_PASS, PER_ROUND, Device, Forward, RoundCost
from scripts._bench import ROOT, arguments

LAUNCHES = ROOT / "benchmarks/data/launches.json"


def llama(
    layers: int, width: int, inner: int, heads: int, groups: int, head: int, vocabulary: int, *, bits: float = 16,
    others: int = PER_ROUND, entry: int = 0,
) -> Forward:  # fmt: skip
    """A decoder: `width` of its rows, `inner` of its MLPs, query `heads` and key/value `groups` of `head` numbers, an
    output layer over `vocabulary` tokens. `bits` of a weight in its layers, `others`: kernels beside theirs, `entry`:
    numbers before the first layer."""
    in_layers = layers * (width * head * (2 * heads + 2 * groups) + 3 * width * inner) + entry
    return Forward(
        numbers=in_layers + width * vocabulary,
        weights=in_layers * bits / 8 + 2 * width * vocabulary,  # of the embedding, a row each
        cached=4 * layers * groups * head,
        kernels=PER_LAYER * layers + others,
    )


LLAMA_8B = llama(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = llama(16, 2048, 8192, 32, 8, 64, 128256, others=PER_PASS)
LLAMA_70B_4_BITS = llama(80, 8192, 28672, 64, 8, 128, 128256, bits=4.5)
QWEN3_32B = llama(64, 5120, 25600, 64, 8, 128, 151936)
QWEN3_2B = llama(28, 2048, 6144, 16, 8, 128, 151936, others=PER_PASS)
# One layer that attends over rows twice as wide, and the fusion of three states.
EAGLE3_8B = llama(1, 4096, 14336, 32, 8, 128, 32000, others=PER_PASS, entry=4096 * 128 * 48 + 3 * 4096 * 4096)

# The name of each in benchmarks/data/launches.json.
OWN = (
    ("plain", RoundCost(LLAMA_8B), "a plain round, greedy"),
    ("EAGLE-3, K = 4", RoundCost(LLAMA_8B, EAGLE3_8B, 4, 4), "a round of EAGLE-3, K = 4, greedy"),
    ("Llama 3.2 1B, K = 4", RoundCost(LLAMA_8B, LLAMA_1B, 4, 4), "a round of standalone, K = 4, greedy"),
)


@dataclass(frozen=True)
class Published:
    """Milliseconds a round of vLLM's at a batch size: those between tokens, times the acceptance length where it
    drafts."""

    title: str
    round: RoundCost
    device: Device | None
    milliseconds: float
    source: str
    batch: int = 1


PLAIN_8B, PLAIN_70B, PLAIN_32B = map(RoundCost, (LLAMA_8B, LLAMA_70B_4_BITS, QWEN3_32B))
AR_70B, PARD_70B = RoundCost(LLAMA_70B_4_BITS, LLAMA_1B, 5, 5), replace(PLAIN_70B, draft=LLAMA_1B, passes=1)
AR_32B = RoundCost(QWEN3_32B, QWEN3_2B, 3, 3)
PUBLISHED = (  # plain rounds before those that are compared with them
    Published("Llama-3.1-8B", PLAIN_8B, A100_40, 1e3 / 77.7, "PR 32887"),
    Published("+ PARD 1B, K = 8", RoundCost(LLAMA_8B, LLAMA_1B, 8, 1), A100_40, 3.56e3 / 202.3, "PR 32887"),
    Published("Llama-3.3-70B NVFP4", PLAIN_70B, B200, 1e3 / 82, "PR 32887"),
    Published("+ 1B, K = 5", AR_70B, B200, 3.83e3 / 158, "PR 32887"),
    Published("+ PARD 1B, K = 11", replace(PARD_70B, k=11), B200, 3.69e3 / 254, "PR 32887"),
    Published("Llama-3.3-70B NVFP4", PLAIN_70B, B200, 8e3 / 678, "PR 32887", 8),
    Published("+ 1B, K = 5", AR_70B, B200, 8 * 3.83e3 / 1187, "PR 32887", 8),
    Published("+ PARD 1B, K = 7", replace(PARD_70B, k=7), B200, 8 * 3.57e3 / 1916, "PR 32887", 8),
    Published("Qwen3-32B", PLAIN_32B, None, 46.06, "PR 24322"),
    Published("+ 1.7B, K = 3", AR_32B, None, 2.79 * 22.62, "PR 24322"),
    Published("Qwen3-32B", PLAIN_32B, None, 65.09, "PR 24322", 100),
    Published("+ 1.7B, K = 3", AR_32B, None, 2.79 * 43.70, "PR 24322", 100),
)
POSITIONS = 1024  # that a sequence looks back on, in all cases


def own_rounds() -> Table:
    """Llama 3.1 8B in bfloat16 on an H100."""
    known = json.loads(LAUNCHES.read_text(encoding="utf-8"))
    table = Table("drafter", "batch", "bytes, ms", "kernels", "ms", "× bytes", title="draftkit")
    for title, own, name in OWN:
        for sequences in (1, 8, 64):
            least = own.floor(H100, sequences, POSITIONS)
            whole = least + known[name] * H100.launch_gap
            cells = (f"{1e3 * least:.2f}", f"{known[name]:,}", f"{1e3 * whole:.2f}", f"{whole / least:.2f}")
            table.add_row(title, f"{sequences}", *cells)
    return table


def published_rounds() -> Table:
    """Ratios alone where the device is not named; those are predicted for an H100."""
    table = Table(
        "target, draft", "device", "batch", "published, ms", "predicted, ms", "× predicted", "to plain", "predicted",
        "error", "source", title="vLLM, as published",
    )  # fmt: skip
    plain, errors = PUBLISHED[0], []
    for case in PUBLISHED:
        plain = case if case.round.draft is None else plain
        device = case.device or H100
        predicted, of_plain = (1e3 * one.round.seconds(device, one.batch, POSITIONS) for one in (case, plain))
        cells = [case.title, device.name if case.device else "?", f"{case.batch}", f"{case.milliseconds:.2f}"]
        cells += [f"{predicted:.2f}", f"{case.milliseconds / predicted:.2f}"] if case.device else ["", ""]
        measured, expected = case.milliseconds / plain.milliseconds, predicted / of_plain
        if case is not plain:
            errors.append(expected / measured - 1)
        error = "" if case is plain else f"{errors[-1]:+.0%}"
        table.add_row(*cells, f"{measured:.2f}", f"{expected:.2f}", error, case.source)
    mean = sum(map(abs, errors)) / len(errors)
    table.caption = f"ratios to plain: error {mean:.0%} in the mean, {max(errors, key=abs):+.0%} at most"
    return table


def main() -> None:
    arguments(__doc__).parse_args()
    console = Console(width=140)
    console.print(own_rounds())
    console.print(published_rounds())


if __name__ == "__main__":
    main()
