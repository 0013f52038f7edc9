"""Block drafters of tiny targets. They know some answers by heart, so that drafts stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import pico, targets
from fixtures.checkpoints.memorized import memorized
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftkit.data.samples import Sample
from draftkit.data.states.online import load_training_target
from draftkit.requests import Request
from draftkit.train.checkpoint import save_draft
from draftkit.train.recipes.bases.dflash import BlockOptions, BlockRecipe
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dflash2 import DFlash2, DFlash2Options
from draftkit.train.recipes.dflash_dspark import DSpark, DSparkOptions
from draftkit.train.recipes.recipe import Origin
from scripts.check.llama_cpp.heads import plain


class Choosing(DFlash2):
    """A recipe whose selector has tables that are large enough to choose from the first step on."""

    def __init__(self, origin: Origin, options: DFlash2Options):
        super().__init__(origin, options)
        for name, parameter in self.draft.named_parameters():
            if name.endswith("codebook"):
                torch.nn.init.normal_(parameter)


TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3_5_text": targets.GATED_DELTA,
}
SIZES: dict[str, Any] = {"layers": (2, 4, 6), "num_layers": 2, "block_size": 5, "max_anchors": None, "loss": "ce"}
DRAFTS: dict[str, tuple[type[BlockRecipe], BlockOptions]] = {
    "dflash": (DFlash, DFlashOptions(**SIZES)),
    "dspark": (DSpark, DSparkOptions(**SIZES, markov_rank=16, confidence=False)),
    "dflash2": (Choosing, DFlash2Options(**SIZES, selector_rank=8, selector_top_k=4)),
}
STEPS = 30  # so few that a part of the drafts is rejected


def save_target(kind: str, folder: Path, **sizes: int) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(targets.TEXT | TARGETS[kind] | sizes)))
    model.save_pretrained(folder)
    pico.save_tokenizer(folder, ("a", "b"))
    return folder


def save_block_draft(name: str, target: Path, asked: Sequence[Request], out: Path) -> Path:
    """A draft that has learnt the target's answers."""
    model = load_training_target(str(target), device="cpu", dtype=torch.float32)
    samples = []
    for request in asked:
        tokens = [*request.prompt, *plain(model, request)]
        samples.append(Sample.of(request.id, tokens, [(len(request.prompt), len(tokens))]))
    kind, options = DRAFTS[name]
    recipe = memorized(kind, options, tuple(samples), STEPS, model)
    save_draft(out, recipe.spec, recipe.tensors(), target=str(target))
    return out
