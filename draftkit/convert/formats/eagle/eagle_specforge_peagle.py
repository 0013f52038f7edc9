"""P-EAGLE as SpecForge trains it.

EAGLE-3 under `layers.`, several layers deep, with `mask_hidden`, its own embedding, and `d2t`/`t2d` even for a full
vocabulary. The mask token is chosen in training and not written down; of rope the class reads the base only.
Source: sgl-project/SpecForge `specforge/modeling/draft/peagle.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "specforge-peagle"
TITLE = "P-EAGLE (SpecForge layout)"
DIALECT = Dialect(NAME, rope="unscaled")


def recognize(checkpoint: Checkpoint) -> int:
    first_layer = "layers.0.self_attn.o_proj.weight" in checkpoint.tensors
    return 3 if first_layer and "PEagleDraftModel" in checkpoint.architectures else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT)
