"""The embedded target: tokenizer, and a small Llama trained from nothing."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

from scripts.zoo._lm import Writing, train_lm, train_tokenizer

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header|>",
    "<|end_header|>",
    "<|eot|>",
    "<|reserved_0|>",  # never in any text: the mask token of parallel drafts
    "<|reserved_1|>",
    "<|reserved_2|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header|>{{ message['role'] }}<|end_header|>\n{{ message['content'] }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n{% endif %}"
)
# The split of GPT-4-style tokenizers: words, numbers of up to three digits, punctuation, runs of white space.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The tokenizer and the form of conversations resemble Llama 3's.
WRITING = Writing(
    size=4096,
    special_tokens=SPECIAL_TOKENS,
    bos="<|begin_of_text|>",
    eos="<|eot|>",
    split=SPLIT,
    chat_template=CHAT_TEMPLATE,
)


def target_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=WRITING.size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


def train_target(out: Path, *, steps: int, batch: int, lr: float, seed: int, device: str) -> None:
    """Train tokenizer and target and save both under `out`."""
    tokenizer = train_tokenizer(WRITING)
    config = target_config(tokenizer)
    train_lm(out, tokenizer, config, steps=steps, batch=batch, lr=lr, seed=seed, device=device)
