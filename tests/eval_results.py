"""Results of `eval --json` made by hand, with the fields that every version has and some that are new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cell(draft: object, /, **changes: Any) -> dict[str, Any]:
    return {
        "target": "org/target",
        "draft": str(draft),
        "method": "eagle3",
        "dataset": "mt-bench",
        "num_speculative_tokens": 3,
        "temperature": 0.0,
        "draft_sampling": "greedy",
        "verification": "rejection",
        "concurrency": 1,
        "num_prompts": 80,
        "max_new_tokens": 256,
        "num_drafts": 100,
        "num_accepted_tokens_per_pos": [70, 50, 30],
        "acceptance_length": {"mean": 2.5, "low": 2.25, "high": 2.75},
        "by_category": {
            "math": {"mean": 2.75, "low": 2.5, "high": 3.0},
            "writing": {"mean": 2.25, "low": 2.0, "high": 2.5},
        },
        "tokens_per_second": 180.0,
        "baseline_tokens_per_second": 100.0,
    } | changes


def write(path: Path, *cells: dict[str, Any], **changes: Any) -> Path:
    provenance = {
        "draftkit": "0.1.0",
        "date": "2026-01-02T03:04:05+00:00",
        "device": "cpu",
        "hardware": "A processor",
        "threads": 2,
        "dtype": "float32",
        "convention": "acceptance_length = 1 + accepted draft tokens / rounds",
        "chat_template_sha256": "0123456789abcdef",
        "dataset": {
            "name": "mt-bench",
            "source": "org/mt-bench",
            "revision": "abc",
            "split": "train",
            "turns": "first",
        },
    }
    path.write_text(json.dumps({"schema": 1, "provenance": provenance, "cells": list(cells)} | changes))
    return path
