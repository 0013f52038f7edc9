"""What a calibration comes to, in the words that all views have."""

from __future__ import annotations

from draftkit.evaluate.calibrate import Calibration
from draftkit.results.cell import Interval


def advice(one: Calibration) -> list[str]:
    """What scaling comes to."""
    lines = []
    if (found := one.scaling) is not None:
        gain = f"the loss of a round falls by {signed(found.gain, 3)} nats on prompts that it was not fitted on"
        if not found.helps:
            lines.append(f"temperatures would not help beyond chance: {gain}")
        elif found.missing:
            lines.append(f"temperatures help, but {found.missing:,} more rounds are needed for a file of them: {gain}")
        else:
            lines.append(f"temperatures help: {gain}")
    return lines


def signed(interval: Interval, digits: int) -> str:
    """A difference with its interval, as far as there is one."""
    if interval.bounds is None:
        return f"{interval.mean:+.{digits}f}"
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"
