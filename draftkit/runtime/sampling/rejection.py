"""Speculative sampling with the draft's probabilities (Leviathan et al. 2023, Chen et al. 2023): the default mode.

The output has exactly the target's law. Drafts of one-hot rows were chosen without chance, q = 1 at the draft token:
then a draft stands with the target's probability of it, and the recovered token is drawn from the target without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.kernels.recovered import recover_token
from draftkit.runtime.kernels.rejection import accept_drafts
from draftkit.runtime.sampling.acceptance import expected_acceptance
from draftkit.runtime.sampling.parameters import SamplingTensors
from draftkit.runtime.sampling.probabilities import distribution
from draftkit.runtime.sampling.random import acceptance_stream, target_stream
from draftkit.runtime.sampling.verdict import Drafted, Verdict, emit


def verify_rejection(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
    """`verdict.Verify` by token-wise rejection. `expected` is Σ_v min(p, q), and p of the draft token where one-hot."""
    law = distribution(logits, parameters)
    uniforms = acceptance_stream(parameters.seed, start, drafted.tokens.shape[1])
    accepted, target_probs = accept_drafts(drafted, law, uniforms)
    noise = target_stream(parameters.seed, start + accepted)
    token = recover_token(drafted, law, accepted, torch.ones_like(parameters.scale), noise)
    return emit(drafted, accepted, token, expected_acceptance(drafted, law, target_probs))
