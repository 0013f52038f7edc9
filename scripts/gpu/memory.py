"""Memory plans against what tensors take by arithmetic, without a GPU.

    python -m scripts.gpu.memory

Weights in bfloat16, and for as many sequences as the plan has room for. Arithmetic counts every tensor of a forward of
prompts and of a round on a fake GPU, with all widths and few layers. `make test` holds that no plan is below what is
counted (`tests/gpu/test_memory_on_a_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fixtures.gpu.fake_cuda import fake_cuda, moved
from fixtures.gpu.launch_counts import eagle
from fixtures.gpu.memory import Live, Taken, taken
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.memory import Load, plan_of
from draftkit.runtime.memory_plan import GIB, MemoryPlan
from draftkit.targets.footprint import Footprint, footprint
from draftkit.targets.target import Target

K = 4
CONTEXTS = (4096, 32768, 131072)
MOST = 256  # slots that are counted; a plan with room for more is one of so many
FREE = {"H100": 78.5, "B200": 178.0}  # GiB, before weights, which is assumed
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A target on `cards` GPUs of a kind. `few`: what makes it small enough to count, with the sizes of its layers;
    `drafted`: the sizes of an EAGLE-3 draft, else what is proposed is looked up in the text."""

    title: str
    gpu: str
    kind: str
    sizes: dict[str, Any]
    few: dict[str, Any]
    cards: int = 1
    drafted: dict[str, int] = field(default_factory=dict)

    def config(self, **changed: Any) -> PretrainedConfig:
        made: PretrainedConfig = CONFIG_MAPPING[self.kind](
            **self.sizes | {"max_position_embeddings": 1 << 18} | changed
        )
        return made


LLAMA = {"vocab_size": 128256, "head_dim": 128}
SMALL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LATENT = {
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
}  # fmt: skip
KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
NEMOTRON = [KINDS[kind] for kind in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"]
CASES = (
    Case(
        "Llama 3.1 8B, EAGLE-3", "H100", "llama", LLAMA | SMALL | {"num_hidden_layers": 32}, {"num_hidden_layers": 3},
        drafted=SMALL,
    ),
    Case(
        "Llama 3.1 70B, EAGLE-3, on four", "H100", "llama", LLAMA | LARGE | {"num_hidden_layers": 80},
        {"num_hidden_layers": 3}, cards=4, drafted=LARGE,
    ),
    Case("DeepSeek V2 Lite (MLA)", "H100", "deepseek_v2", LATENT, {"num_hidden_layers": 2}),
    Case("Qwen3-Next 80B-A3B (gated delta net)", "B200", "qwen3_next", {}, {"num_hidden_layers": 4}),
    Case(
        "Nemotron-H 8B (Mamba 2)", "H100", "nemotron_h", {"layers_block_type": NEMOTRON},
        {"layers_block_type": [KINDS[kind] for kind in "M-*"]},
    ),
)  # fmt: skip


class Row(NamedTuple):
    """A plan for as many sequences as fit, at most `MOST`, and the bytes of the same by arithmetic."""

    title: str
    gpu: str
    context: int
    plan: MemoryPlan
    arithmetic: int


def rows(case: Case, contexts: tuple[int, ...] = CONTEXTS) -> Iterator[Row]:
    """The rows of one case, without a GPU."""
    config = case.config()
    own = footprint(config)
    with fake_cuda(), Live() as live:
        target, drafter = small(case)
        for context in contexts:
            plan = planned(case, config, own, drafter, context)
            if plan.largest_batch:
                sizes = taken(live, target, drafter, k=K, num_slots=plan.num_slots, length=context)
                yield Row(case.title, case.gpu, context, plan, arithmetic(case, own, target, plan, sizes))


def small(case: Case) -> tuple[Target, Drafter]:
    """The target with few layers and its drafter, inside `fake_cuda`."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(case.config(**case.few), dtype=DTYPE, attn_implementation=ATTENTION)
    model.eval().requires_grad_(False)
    drafter = eagle(model, case.drafted) if case.drafted else moved(NgramDrafter(model.vocab_size, min_n=1, max_n=3))
    return Target(model, drafter.aux_layers), drafter


def planned(case: Case, config: PretrainedConfig, own: Footprint, drafter: Drafter, context: int) -> MemoryPlan:
    """What `draftkit eval --dry-run` says of the device with the least room, which is the first."""
    devices = [torch.device("cuda", number) for number in range(case.cards)]
    free = dict.fromkeys(devices, int(FREE[case.gpu] * GIB))
    load = Load(
        config=config,
        footprint=own,
        dtype=DTYPE,
        draft=lambda capacity, _: capacity * draft_numbers(drafter)[1] * DTYPE.itemsize,
        feature_size=3 * config.hidden_size if case.drafted else 0,
        capacity=context + K + 1,
        k=K,
    )
    shares = dict.fromkeys(devices, 1 / case.cards)
    weights = {device: {"target weights": own.parameters * DTYPE.itemsize // case.cards} for device in devices}
    weights[devices[0]]["draft weights"] = draft_numbers(drafter)[0] * DTYPE.itemsize
    most = plan_of(load, 1, shares, free, weights).largest_batch
    return plan_of(load, min(most, MOST), shares, free, weights)


def draft_numbers(drafter: Drafter) -> tuple[int, int]:
    """How many numbers the weights of a draft are, without what it borrows, and a position's keys and values."""
    if not isinstance(drafter, EagleDrafter):
        return 0, 0
    own = [part for name, part in drafter.model.named_parameters() if "embed" not in name]
    return sum(part.numel() for part in own), drafter.model.spec.decoder.cached_numbers


def arithmetic(case: Case, own: Footprint, target: Target, plan: MemoryPlan, sizes: Taken) -> int:
    """The bytes on the first device: weights; what was counted, with the caches of the layers that were left out. A
    captured round keeps its memory beside that of prompts; one over several devices gives it back."""
    left_out = own.slot_bytes(DTYPE, plan.capacity, K) // case.cards - target.slot_bytes(plan.capacity, K)
    weights = sum(size for name, size in plan.fixed.items() if "weights" in name)
    forwards = max(sizes.prompts, sizes.round) if case.cards > 1 else sizes.prompts + sizes.round
    return weights + plan.num_slots * left_out + sizes.slots + forwards


def main() -> None:
    columns = ("weights", "a sequence", "prompts", "sequences", "plan", "its reserve", "arithmetic", "left")
    table = Table("target", "GPU", "context", *columns, title=f"GiB, K = {K}, at most {MOST} sequences")
    for row in (row for case in CASES for row in rows(case)):
        plan = row.plan
        weights = sum(size for name, size in plan.fixed.items() if "weights" in name)
        sizes = (weights, sum(plan.per_slot.values()), plan.fixed["activations"])
        after = (plan.total, plan.fixed["reserve"], row.arithmetic, plan.total - row.arithmetic)
        table.add_row(
            row.title, row.gpu, f"{row.context:,}", *(f"{size / GIB:.2f}" for size in sizes), str(plan.num_slots),
            *(f"{size / GIB:.2f}" for size in after),
        )  # fmt: skip
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
