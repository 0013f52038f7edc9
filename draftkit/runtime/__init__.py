"""Draft–verify decoding: `engine.Engine` generates with any drafter, and records every round.

Models that it runs are loaded with transformers' `attn_implementation=attention.NAME`.
"""
