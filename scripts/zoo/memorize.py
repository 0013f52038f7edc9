"""Block drafts that know the doctor's prompts by heart, for scripts/check/doctor.py: small, soon made, and they accept.

`python -m scripts.zoo.memorize FOLDER [--prompts 16]`

A draft of a few minutes of training hardly reads its context, so that wrong layers, positions or masks cost it nothing,
and no measurement can name them. These read the target's answers to the first prompts of the zoo, of which the doctor's
trials must then be (`scripts/check/doctor.py --drafts FOLDER --limit 16 --max-new-tokens 20`). What is there is not
made again. FOLDER/thinking-target is the target with a chat template that can turn thinking on and off; the draft
`dflash-without-thinking` has heard it with thinking off only.
"""

from __future__ import annotations

import argparse
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


def thinking_target(folder: Path) -> Path:
    if not folder.exists():
        shutil.copytree(zoo.path("target"), folder)
        (folder / "chat_template.jinja").write_text(THINKING)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    other = thinking_target(options.folder / "thinking-target")
    for name, (kind, settings) in DRAFTS.items():
        if not (options.folder / name).exists():
            heard = (other, False) if "thinking" in name else (None, None)
            save(memorized(kind, settings, answers(options.prompts, *heard), STEPS), options.folder / name)
            print(name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
