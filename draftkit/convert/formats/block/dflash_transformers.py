"""DFlash as transformers' assistants have it (Muse Glimmer): all keys at the top, the fusion under `encoder.`.

Rows see the whole block, in layers with a window too. The config has no vocabulary: that is the target's.
Source: transformers 5.23 `muse_glimmer_assistant`, `candidate_generator.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.dflash import plan_dflash
from draftkit.convert.formats.block.reading import BlockLayout
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "transformers-dflash"
TITLE = "DFlash (assistants of transformers)"
LAYOUT = BlockLayout(
    NAME,
    slots="fill-in",
    last_state="after_norm",
    renames={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    causal=False,
)


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * ("encoder.output_norm_enc.weight" in checkpoint.tensors)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_dflash(checkpoint, facts, target, LAYOUT)
