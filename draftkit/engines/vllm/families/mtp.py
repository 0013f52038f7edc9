"""Multi-token prediction heads in vLLM 0.32: method `mtp`, the `*_mtp.py` of its models."""

from __future__ import annotations

from draftkit.layout.families.mtp import MtpSpec


def refusal(mtp: MtpSpec) -> str | None:
    """Nothing: it builds the heads from the target's config, and takes of a folder what their names say."""
    del mtp
    return None
