"""A small Llama whose tokenizer is not the embedded target's, to be given that tokenizer.

It is not embedded: `vocab transplant` is tried on it (scripts/check/transplant.py).
"""

from __future__ import annotations

from pathlib import Path

from scripts.zoo._drafts import small_lm_config
from scripts.zoo._lm import Writing, train_lm, train_tokenizer

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# GPT-2's split: other than the target's it never joins a word and the sign before it, and has numbers whole.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WRITING = Writing(
    size=1536,
    special_tokens=SPECIAL_TOKENS,
    bos="<s>",
    eos="<|im_end|>",
    split=SPLIT,
    chat_template=CHAT_TEMPLATE,
)


def train_donor(out: Path, *, steps: int, batch: int, lr: float, seed: int, device: str) -> None:
    """Train tokenizer and donor, which has the size of the embedded draft model, and save both under `out`."""
    tokenizer = train_tokenizer(WRITING)
    config = small_lm_config(tokenizer)
    train_lm(out, tokenizer, config, steps=steps, batch=batch, lr=lr, seed=seed, device=device)
