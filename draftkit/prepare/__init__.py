"""Vocabulary surgery: giving a small model the target's tokenizer, and finding models that could draft."""
