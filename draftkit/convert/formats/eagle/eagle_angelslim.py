"""EAGLE-3 as Tencent's AngelSlim trains it.

SafeAILab's tensors; `architectures` `Eagle3LlamaForCausalLM` and the target's type in the config. Its trainer reads
`rope_theta` for multimodal rope only. SpecExit's early-stop signals are extra rows of `fc`, which drafting does not
need. Source: Tencent/AngelSlim `angelslim/compressor/speculative/train/models/draft/llama_eagle3.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "angelslim"
TITLE = "EAGLE-3 (AngelSlim layout)"
DIALECT = Dialect(NAME, {"midlayer.": "layers.0."}, rope="multimodal")
ARCHITECTURES = {"Eagle3LlamaForCausalLM", "CosyVoice3Eagle3LlamaForCausalLM"}
MARKS = {"modal_type", "early_stop_method"}


def recognize(checkpoint: Checkpoint) -> int:
    """Recognize the layout by its class name, or the keys that only its configs have."""
    marked = ARCHITECTURES & set(checkpoint.architectures) or MARKS & checkpoint.config.keys()
    return 3 if marked and "midlayer.self_attn.o_proj.weight" in checkpoint.tensors else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    signals = facts.optional("early_stop_method", str)
    rows, columns = checkpoint.matrix("fc.weight")
    hidden = facts.optional("hidden_size", int) or rows
    if signals is None or rows == hidden:
        return plan_eagle3(checkpoint, facts, target, DIALECT)
    facts.lose(f"the early-stop signals ({signals}): {rows - hidden} rows of fc.weight")
    fc = replace(checkpoint.tensors["fc.weight"], shape=(hidden, columns))
    cut = replace(checkpoint, tensors=checkpoint.tensors | {"fc.weight": fc})
    planned = plan_eagle3(cut, facts, target, DIALECT)
    first_rows = Move("first_rows", ("fc.weight",), "fc.weight", fc.dtype, fc.shape)
    moves = tuple(first_rows if move.destination == "fc.weight" else move for move in planned.moves)
    return replace(planned, moves=moves)
