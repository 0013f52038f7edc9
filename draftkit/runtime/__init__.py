"""Draft–verify decoding: `Engine` generates with any drafter, and records every round.

Models that it runs are loaded with transformers' `attn_implementation=ATTENTION`.
"""

from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation, Request, Round
from draftkit.runtime.sampling.parameters import DraftSampling, SamplingParameters
from draftkit.runtime.sampling.synthetic import SyntheticAcceptance

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
