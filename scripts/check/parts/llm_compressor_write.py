"""A tiny Llama as llm-compressor writes it in each scheme; run by scripts/check/llm_compressor.py with the Python of an
environment that has llmcompressor. For each scheme, `OUT/plain-SCHEME` and `OUT/SCHEME`."""

import sys
from pathlib import Path

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONFIG = LlamaConfig(
    vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip


def main() -> None:
    out = Path(sys.argv[1])
    vocabulary = {chr(code + 32): code for code in range(CONFIG.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, [])))
    for scheme in sys.argv[2:]:
        torch.manual_seed(0)
        plain = out / f"plain-{scheme}"
        LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=model, processor=tokenizer, recipe=recipe)
        model.save_pretrained(out / scheme, save_compressed=True)


if __name__ == "__main__":
    main()
