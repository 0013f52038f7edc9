"""Rebuild the embedded models of draftkit/zoo from nothing: `python scripts/make_zoo.py`.

Target, tokenizer, drafts and prompts come from the Python standard library's sources and one seed. `--only PART`
builds one part; an interrupted training of the target continues from its last checkpoint. `--drafts FOLDER` leaves the
drafts that ship as they are and writes new ones elsewhere.

The target that ships was made by this script on two CPU cores with Python 3.11.7, in 4401 s while the machine did other
work too. The drafts that ship are older than draftkit's recipes and were not made by this script as it is now, but by
training loops that it had before: those of commit fe614bb for EAGLE, EAGLE-3 and the draft model, of 6598c86 for
P-EAGLE, PARD and the MLP speculator. What it makes now has the same layouts and other weights; so has what it makes
from the sources of other Python versions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import zoo_drafts
import zoo_prompts
import zoo_target

SEED = 20261121
ZOO = Path(__file__).resolve().parent.parent / "draftkit" / "zoo"
MODELS = ZOO / "models"


def make_target(device: str) -> None:
    zoo_target.train_target(MODELS / "target", steps=1200, batch=8, lr=3e-3, seed=SEED, device=device)


def make_drafts(device: str, models: Path) -> None:
    zoo_drafts.train_drafts(models, steps=600, answers=1200, lr=2e-3, seed=SEED, device=device)


def make_prompts() -> None:
    zoo_prompts.write_prompts(ZOO / "prompts.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("target", "drafts", "prompts"), help="build this part alone")
    parser.add_argument("--drafts", type=Path, default=MODELS, metavar="FOLDER", help="where the drafts are written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    parts = {
        "target": lambda: make_target(options.device),
        "drafts": lambda: make_drafts(options.device, options.drafts),
        "prompts": make_prompts,
    }
    for name, make in parts.items():
        if options.only not in (None, name):
            continue
        began = time.monotonic()
        make()
        print(f"{name}: {time.monotonic() - began:.0f} s on {options.device}", flush=True)


if __name__ == "__main__":
    main()
