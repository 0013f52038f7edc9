"""The target's hidden states: computed in this process or by vLLM, written to a folder of shards, and read from one.

What a run can say of them is here, without torch, as settings are read without it.
"""

from __future__ import annotations

from typing import Literal, get_args

Encoding = Literal["bf16", "float32", "fp8", "int8", "int8-channel"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
WAITING_ROWS = 8  # rows that a stream holds besides the one in use, unless it is told otherwise
