"""What a calibration comes to, in the words that all views have."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draftkit.evaluate.calibrate import Calibration
from draftkit.io.jsonfile import dump
from draftkit.results.calibration import sglang_calibration
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
    names = {
        "fixed": "K = {:g}",
        "threshold": "draft_confidence {:g}",
        "vllm": "vLLM's rule",
        "sglang": "SGLang's rule",
    }
    return names[gain.rule].format(gain.value)


def signed(interval: Interval, digits: int) -> str:
    """A difference with its interval, as far as there is one."""
    if interval.bounds is None:
        return f"{interval.mean:+.{digits}f}"
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def times(interval: Interval) -> str:
    """A ratio with its interval, as far as there is one."""
    ends = "" if interval.bounds is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.mean:.2f} ×{ends}"


def calibration_files(found: Sequence[Calibration]) -> dict[str, str]:
    """What a folder of calibrations holds, by name: page, JSON, and what SGLang reads of each draft: temperatures where
    they help beyond chance and are of enough rounds, and a table of costs where round times are known."""
    from draftkit.report.page.calibration import calibration_page

    whole = {"schema": 1, "calibrations": [one.to_dict() for one in found]}
    files = {"calibration.html": calibration_page(found), "calibration.json": dump(whole)}
    for one in found:
        name = f"{_plain(one.draft)}-k{one.num_speculative_tokens}-t{one.temperature:g}"
        if one.scaling is not None and one.scaling.written:
            files[f"{name}.sts.json"] = dump(sglang_calibration(one.scaling, ", ".join(one.slices)))
        if one.costs is not None:
            files[f"{name}.sps.json"] = dump(one.costs)
    return files


def _plain(name: str) -> str:
    """A name as that of a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "draft"
