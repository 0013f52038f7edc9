"""EAGLE-3 as Tencent's AngelSlim trains it.

SafeAILab's tensors; `architectures` `Eagle3LlamaForCausalLM` and the target's type in the config. Its trainer never
reads `rope_theta`. SpecExit's early-stop signals are extra rows of `fc`, which drafting does not need.
Source: Tencent/AngelSlim `angelslim/compressor/speculative/train/models/draft/llama_eagle3.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "angelslim"
TITLE = "EAGLE-3 (AngelSlim layout)"
DIALECT = Dialect(NAME, "midlayer.", rope_base="fixed")


MARKS = {"target_model_type", "modal_type", "early_stop_method"}


def recognise(checkpoint: Checkpoint) -> int:
    marked = "Eagle3LlamaForCausalLM" in checkpoint.architectures or checkpoint.config.keys() & MARKS
    return 3 if marked and "midlayer.hidden_norm.weight" in checkpoint.tensors else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    facts.drop("target_model_type", "names the target's family")
    facts.drop("modal_type", "names the target's kind of input")
    signals = facts.optional("early_stop_method", str)
    hidden = facts.size("hidden_size")
    fc = checkpoint.tensors["fc.weight"]
    if signals is None or fc.shape[0] == hidden:
        return plan_eagle3(checkpoint, facts, target, DIALECT, {})
    facts.lose(f"the early-stop signals ({signals}): {fc.shape[0] - hidden} rows of fc.weight")
    shape = (hidden, *fc.shape[1:])
    cut = replace(checkpoint, tensors=checkpoint.tensors | {"fc.weight": replace(fc, shape=shape)})
    planned = plan_eagle3(cut, facts, target, DIALECT, {})
    first_rows = Move("first_rows", ("fc.weight",), "fc.weight", fc.dtype, shape)
    moves = tuple(first_rows if move.destination == "fc.weight" else move for move in planned.moves)
    return replace(planned, moves=moves)
