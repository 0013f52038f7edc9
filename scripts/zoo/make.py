"""Rebuild the embedded models of draftkit/zoo from nothing: `python -m scripts.zoo.make`.

Target, tokenizer, drafts and prompts come from the Python standard library's sources and one seed. `--only PART` builds
one part; an interrupted training of the target continues from its last checkpoint. `--drafts FOLDER` leaves the drafts
that ship as they are and writes new ones elsewhere. `--donor FOLDER` builds a model with another tokenizer too, which
does not ship. `--block-drafts FOLDER` takes DFlash and DSpark from where `scripts.zoo.speculators_blocks.py --work
FOLDER` has made them.

What ships was made by this script on two CPU cores with Python 3.11.7 while the machine did other work too: the target
in 4401 s, the drafts in 17 to 50 minutes each. The sources of other Python versions give other weights. `p-eagle` alone
was trained with an embedding of its own; the target's has since replaced it, and the first layer's weights of queries,
keys and values were fitted anew to what they had given (least squares over all tokens by how often they occur).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from scripts.zoo import _donor as zoo_donor
from scripts.zoo import _drafts as zoo_drafts
from scripts.zoo import _prompts as zoo_prompts
from scripts.zoo import _target as zoo_target

SEED = 20261121
ZOO = Path(__file__).resolve().parents[2] / "draftkit" / "zoo"
MODELS = ZOO / "models"


def make_target(device: str) -> None:
    zoo_target.train_target(MODELS / "target", steps=1200, batch=8, lr=3e-3, seed=SEED, device=device)


def make_drafts(device: str, models: Path) -> None:
    zoo_drafts.train_drafts(models, steps=600, answers=1200, lr=2e-3, seed=SEED, device=device)


def make_donor(device: str, out: Path) -> None:
    zoo_donor.train_donor(out, steps=600, batch=8, lr=3e-3, seed=SEED, device=device)


def make_prompts() -> None:
    zoo_prompts.write_prompts(ZOO / "prompts.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("target", "drafts", "block-drafts", "donor", "prompts")
    parser.add_argument("--only", choices=names, help="build this part alone")
    parser.add_argument("--drafts", type=Path, default=MODELS, metavar="FOLDER", help="where the drafts are written")
    parser.add_argument("--donor", type=Path, metavar="FOLDER", help="build a model with another tokenizer there")
    parser.add_argument(
        "--block-drafts", type=Path, metavar="FOLDER", help="the drafts of scripts.zoo.speculators_blocks.py"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    for name, folder in (("donor", options.donor), ("block-drafts", options.block_drafts)):
        if options.only == name and folder is None:
            parser.error(f"--only {name} needs --{name} FOLDER")
    torch.set_num_threads(options.threads)
    parts = {
        "target": lambda: make_target(options.device),
        "drafts": lambda: make_drafts(options.device, options.drafts),
        "prompts": make_prompts,
    }
    if options.block_drafts is not None:
        parts["block-drafts"] = lambda: zoo_drafts.publish_block_drafts(options.block_drafts, options.drafts)
    if options.donor is not None:
        parts["donor"] = lambda: make_donor(options.device, options.donor)
    for name, make in parts.items():
        if options.only not in (None, name):
            continue
        began = time.monotonic()
        make()
        print(f"{name}: {time.monotonic() - began:.0f} s on {options.device}", flush=True)


if __name__ == "__main__":
    main()
