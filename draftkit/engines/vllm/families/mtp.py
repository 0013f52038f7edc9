"""Multi-token prediction heads in vLLM 0.32: method `mtp`, the `*_mtp.py` of its models."""

from __future__ import annotations

from draftkit.layout.families.mtp import MtpSpec


def refusal(mtp: MtpSpec) -> str | None:
    """Nothing: it builds the heads from the target's config, and takes of a folder what their names say."""
    del mtp
    return None


def tokens(mtp: MtpSpec, wanted: int) -> int:
    """As many draft tokens a round as are wanted, or the next fewer that it takes: beyond one for each module, a
    multiple of them (`config/speculative.py`, n_predict)."""
    return wanted if wanted < mtp.num_modules else wanted - wanted % mtp.num_modules


def notes(mtp: MtpSpec) -> list[str]:
    """What it takes."""
    count = mtp.num_modules
    return [f"vLLM drafts up to {count} tokens a round with {count} modules, or a multiple of {count}."] * (count > 1)
