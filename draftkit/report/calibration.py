"""What a calibration comes to, in the words that all views have."""

from __future__ import annotations

from draftkit.evaluate.calibrate import Calibration
from draftkit.results.cell import Interval
from draftkit.results.thresholds import Gain, best_fixed, best_threshold

RULES = {"fixed": "K = {:g}", "threshold": "draft_confidence {:g}", "vllm": "vLLM's rule", "sglang": "SGLang's rule"}


def advice(one: Calibration) -> list[str]:
    """What scaling and thresholds come to, a sentence each."""
    lines = []
    if (found := one.scaling) is not None:
        gain = f"the loss of a round falls by {signed(found.gain, 3)} nats on prompts that it was not fitted on"
        if not found.helps:
            lines.append(f"temperatures would not help beyond chance: {gain}")
        elif found.missing:
            lines.append(f"temperatures help, but {found.missing:,} more rounds are needed for a file of them: {gain}")
        else:
            lines.append(f"temperatures help: {gain}")
    if one.doubt is not None:
        lines.append(f"no gain is told, as the round times are not to be relied on: {one.doubt}")
    for batch in sorted({gain.concurrency for gain in one.gains}):
        mine = [gain for gain in one.gains if gain.concurrency == batch]
        threshold, fixed = best_threshold(mine), best_fixed(mine)
        if threshold is not None and fixed is not None and threshold.over_fixed is not None:
            lines.append(
                f"batch {batch}: {rule_name(threshold)}, the best threshold, would be {times(threshold.over_fixed)} as "
                f"fast as {rule_name(fixed)}, the best fixed K"
            )
    return lines


def rule_name(gain: Gain) -> str:
    """A rule as tables call it."""
    return RULES[gain.rule].format(gain.value)


def signed(interval: Interval, digits: int) -> str:
    """A difference with its interval, as far as there is one."""
    if interval.bounds is None:
        return f"{interval.mean:+.{digits}f}"
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def times(interval: Interval) -> str:
    """A ratio with its interval, as far as there is one."""
    ends = "" if interval.bounds is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.mean:.2f} ×{ends}"
