"""Block drafts that know the doctor's prompts by heart: small, soon made, and accepted.

`python -m scripts.zoo.memorize FOLDER [--prompts 16]`

A draft of a few minutes of training hardly reads its context, so wrong layers, positions or masks cost it nothing.
These have learned the target's answers to the first prompts of the zoo. Use them with
`scripts.check.doctor --drafts FOLDER --limit 16 --max-new-tokens 20`. Finished drafts are not made again.
FOLDER/thinking-target is the target with a chat template that switches thinking on and off. The draft
`dflash-without-thinking` was trained with thinking off.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints.memorized import answers, memorized, save
from fixtures.checkpoints.templates import THINKING

from draftkit import zoo
from draftkit.train.recipes.bases.dflash import BlockOptions, BlockRecipe
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dspark import DSpark, DSparkOptions
from scripts._bench import arguments

STEPS = 60
SIZES = {"num_layers": 2, "block_size": 5, "max_anchors": None, "loss": "ce"}
MIDDLE: dict[str, Any] = SIZES | {"layers": (2, 5, 7)}  # of a target of 10 layers
ENDS: dict[str, Any] = SIZES | {"layers": (0, 5, 10)}
MARKOV: dict[str, Any] = MIDDLE | {"markov_rank": 32, "confidence": False}
DRAFTS: dict[str, tuple[type[BlockRecipe], BlockOptions]] = {
    "dflash": (DFlash, DFlashOptions(**MIDDLE)),
    "dflash-causal": (DFlash, DFlashOptions(**MIDDLE, causal=True)),
    "dflash-sliding": (DFlash, DFlashOptions(**MIDDLE, sliding_window=8)),
    "dflash-ends": (DFlash, DFlashOptions(**ENDS)),
    "dflash-without-thinking": (DFlash, DFlashOptions(**MIDDLE)),
    "dspark": (DSpark, DSparkOptions(**MARKOV)),
    "dspark-fill-in": (DSpark, DSparkOptions(**MARKOV, slots="fill-in")),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    other = options.folder / "thinking-target"
    if not other.exists():
        shutil.copytree(zoo.path("target"), other)
        (other / "chat_template.jinja").write_text(THINKING)
    for name, (kind, settings) in DRAFTS.items():
        if not (options.folder / name).exists():
            heard = (other, False) if "thinking" in name else (None, None)
            save(memorized(kind, settings, answers(options.prompts, *heard), STEPS), options.folder / name)
            print(name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
