"""Rebuild the embedded models of draftkit/zoo from nothing: `python -m scripts.zoo.make`.

Target, tokenizer, drafts and prompts come from the Python standard library's sources and one seed. `--only PART` builds
one part. An interrupted training of the target continues from its last checkpoint. `--drafts FOLDER` writes the drafts
elsewhere. `--block-drafts FOLDER` publishes the DFlash and DSpark drafts of `scripts.zoo.speculators_blocks --work
FOLDER`. The embedded MLP speculator is kept as it is: no recipe trains one.

What ships was made on two CPU cores with Python 3.11.7, whose sources give these weights. `p-eagle` was trained with an
embedding of its own. The target's replaced it, and the first layer's q, k and v weights were fitted by least squares.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from scripts._bench import ROOT, arguments
from scripts.zoo import _drafts as zoo_drafts
from scripts.zoo import _prompts as zoo_prompts
from scripts.zoo import _target as zoo_target

SEED = 20261121
ZOO = ROOT / "draftkit" / "zoo"
MODELS = ZOO / "models"


def main() -> None:
    parser = arguments(__doc__)
    names = ("target", "drafts", "block-drafts", "prompts")
    parser.add_argument("--only", choices=names, help="build this part alone")
    parser.add_argument("--drafts", type=Path, default=MODELS, metavar="FOLDER", help="where the drafts are written")
    parser.add_argument("--block-drafts", type=Path, metavar="FOLDER", help="the folder of speculators_blocks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    if options.only == "block-drafts" and options.block_drafts is None:
        parser.error("--only block-drafts needs --block-drafts FOLDER")
    torch.set_num_threads(options.threads)
    device, drafts = options.device, options.drafts
    parts = {
        "target": lambda: zoo_target.train_target(
            MODELS / "target", steps=1200, batch=8, lr=3e-3, seed=SEED, device=device
        ),
        "drafts": lambda: zoo_drafts.train_drafts(drafts, steps=600, answers=1200, lr=2e-3, seed=SEED, device=device),
        "prompts": lambda: zoo_prompts.write_prompts(ZOO / "prompts.jsonl"),
    }
    if options.block_drafts is not None:
        parts["block-drafts"] = lambda: zoo_drafts.publish_block_drafts(options.block_drafts, drafts)
    for name, make in parts.items():
        if options.only in (None, name):
            began = time.monotonic()
            make()
            print(f"{name}: {time.monotonic() - began:.0f} s on {device}", flush=True)


if __name__ == "__main__":
    main()
