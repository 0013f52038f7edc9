"""LoRA adapters of several strengths on the embedded target, for `eval --target-adapter`: how much does a draft lose?

`python -m scripts.study.adapters OUT` trains one adapter with peft on the target's own texts with other words
(`scripts/check/lora.py`), and keeps it after 8, 24 and 64 steps: OUT/weak, OUT/middle, OUT/strong. A minute of one
core. `benchmarks/adapters.md` has what a draft accepts under each.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftkit import zoo
from scripts.check.lora import other_words
from scripts.zoo import _corpus as zoo_corpus
from scripts.zoo import _lm as zoo_lm

KEPT = {8: "weak", 24: "middle", 64: "strong"}  # steps → name
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXTS, BATCH, WINDOW, LR = 600, 4, 256, 3e-3


def stream() -> Tensor:
    """The texts in other words, int64 [tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("target"))
    texts = zoo_corpus.training_texts(zoo_lm.chat_text(tokenizer), random.Random(0))[:TEXTS]
    rows = tokenizer.backend_tokenizer.encode_batch_fast([other_words(text) for text in texts])
    return torch.tensor([token for row in rows for token in row.ids])


def train(out: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=MODULES))
    model.peft_config["default"].base_model_name_or_path = "zoo:target"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    tokens, drawn = stream(), torch.Generator().manual_seed(0)
    for step in range(1, max(KEPT) + 1):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH,), generator=drawn).tolist()
        rows = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in KEPT:
            model.save_pretrained(str(out / KEPT[step]))
            print(f"{KEPT[step]}: after {step} steps, loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    train(parser.parse_args().out)


if __name__ == "__main__":
    main()
