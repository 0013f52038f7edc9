"""Draft–verify decoding: `Engine` generates with any drafter, and records every round.

Models that it runs are loaded with transformers' `attn_implementation=ATTENTION`.
"""

from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation, Round
from draftkit.runtime.verification_synthetic import SyntheticAcceptance

__all__ = [
    "ATTENTION",
    "DraftSampling",
    "Engine",
    "Generation",
    "Request",
    "Round",
    "SamplingParameters",
    "SyntheticAcceptance",
]
