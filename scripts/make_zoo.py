"""Rebuild the embedded models of draftkit/zoo from nothing: `python scripts/make_zoo.py`.

Target, tokenizer, drafts and prompts come from the Python standard library's sources and one seed. `--only PART`
builds one part; an interrupted training of the target continues from its last checkpoint. The models that ship were
made by this script on two CPU cores with Python 3.11.7, in 4401 s for the target and 1207 s for the drafts, while the
machine did other work too. Other Python versions have other sources and so give other weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import zoo_drafts
import zoo_parallel
import zoo_prompts
import zoo_target

SEED = 20261121
ZOO = Path(__file__).resolve().parent.parent / "draftkit" / "zoo"
MODELS = ZOO / "models"


def make_target(device: str) -> None:
    zoo_target.train_target(MODELS / "target", steps=1200, batch=8, lr=3e-3, seed=SEED, device=device)


def make_drafts(device: str) -> None:
    zoo_drafts.train_drafts(MODELS, steps=600, batch=8, answers=1200, lr=2e-3, seed=SEED, device=device)


def make_parallel(device: str) -> None:
    zoo_parallel.train_parallel_drafts(MODELS, steps=600, batch=8, answers=1200, lr=2e-3, seed=SEED, device=device)


def make_prompts(device: str) -> None:
    zoo_prompts.write_prompts(ZOO / "prompts.jsonl")


PARTS = {"target": make_target, "drafts": make_drafts, "parallel": make_parallel, "prompts": make_prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="build this part alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, make in PARTS.items():
        if options.only not in (None, name):
            continue
        began = time.monotonic()
        make(options.device)
        print(f"{name}: {time.monotonic() - began:.0f} s on {options.device}", flush=True)


if __name__ == "__main__":
    main()
