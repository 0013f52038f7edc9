"""A result file of `eval --json` with every part a report can show, and one as the first version wrote it."""

from __future__ import annotations

from typing import Any

DRAFTS = {"zoo:eagle3": ("eagle3", 0.78, 0.055), "acme/llama-draft-0.2b": ("draft_model", 0.64, 0.11)}
CATEGORIES = {"coding": 1.12, "math": 1.06, "reasoning": 1.0, "roleplay": 0.86, "writing": 0.9}
KS = (1, 2, 3, 4, 5, 6)
BATCHES = (1, 4, 16, 64)

PROMPT = "Write a function that adds two numbers.\nKeep it short."
ROUNDS = [
    {"drafted": [" add", "(", "a", ","], "accepted": 4, "emitted": [" add", "(", "a", ",", " b"]},
    {"drafted": [")", " ->", " int", ":"], "accepted": 1, "emitted": [")", ":"]},
    {"drafted": ["\n", "    ", "return", " a"], "accepted": 4, "emitted": ["\n", "    ", "return", " a", " +"]},
    {"drafted": [" 1", "\n", "\n", "def"], "accepted": 0, "emitted": [" b"]},
    {"drafted": [], "accepted": 0, "emitted": ["\n"]},
    {"drafted": ["\n", "print", "(", "add"], "accepted": 3, "emitted": ["\n", "print", "(", "sum"]},
    {"drafted": ["(", "1", ",", " 2"], "accepted": 4, "emitted": ["(", "1", ",", " 2", "))"]},
]
SAMPLES = [
    {"id": "coding-1", "category": "coding", "prompt": PROMPT, "first": "def", "rounds": ROUNDS},
    {"id": "writing-3", "category": "writing", "prompt": "Tell me a story.", "first": "Once", "rounds": ROUNDS[3:]},
]


def full_result() -> dict[str, Any]:
    """Two drafts, six K, four batches, categories, samples, memory and a speed model for each draft."""
    cells = [_cell(draft, k, batch) for draft in DRAFTS for batch in BATCHES for k in KS]
    return {
        "schema": 1,
        "provenance": {
            "draftkit": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "python": "3.12.3",
            "date": "2026-11-21T18:00:00+00:00",
            "hardware": "NVIDIA H100 80GB HBM3",
            "device": "cuda",
            "dtype": "bfloat16",
            "threads": 1,
            "convention": "acceptance_length = 1 + accepted draft tokens / rounds",
            "dataset": {"name": "mt-bench", "source": "philschmid/mt-bench", "turns": "first", "thinking": None},
            "chat_template_sha256": "d3193a6c81bf0cd7160dd76fdb642a37417070e7314e0c50b092d5d7d8d89abd",
            "first_prompt_ids": [1, 529, 29989, 1792, 29989, 29958],
        },
        "cells": cells,
        "warnings": [{"name": "repetition", "message": "2 of 80 outputs repeat themselves, which raises acceptance."}],
        "speed_models": [_speed_model(draft, [c for c in cells if c["draft"] == draft]) for draft in DRAFTS],
    }


def old_result() -> dict[str, Any]:
    """One cell without any field that was added later."""
    return {
        "schema": 1,
        "provenance": {"draftkit": "0.1.0", "device": "cpu", "dtype": "float32"},
        "cells": [
            {
                "target": "zoo:target",
                "draft": "zoo:eagle",
                "method": "eagle",
                "dataset": "zoo",
                "num_speculative_tokens": 4,
                "temperature": 0.0,
                "draft_sampling": "greedy",
                "verification": "rejection",
                "concurrency": 1,
                "num_prompts": 4,
                "max_new_tokens": 32,
                "output_tokens": 128,
                "num_drafts": 46,
                "num_draft_tokens": 184,
                "num_accepted_tokens": 88,
                "num_accepted_tokens_per_pos": [30, 22, 19, 17],
                "acceptance_length": {"mean": 2.91, "low": 2.2, "high": 3.75},
                "expected_acceptance_length": {"mean": 2.91, "low": 2.2, "high": 3.75},
                "by_category": {"class": {"mean": 1.94, "low": 1.94, "high": 1.94}},
                "tokens_per_second": 112.8,
                "baseline_tokens_per_second": 84.5,
                "ttft_ms": {"mean": 24.0, "p50": 23.9, "p99": 30.4},
                "tpot_ms": {"mean": 8.4, "p50": 7.8, "p99": 12.3},
                "itl_ms": None,
                "matches_greedy": True,
                "num_matching_prompts": 4,
            }
        ],
    }


def _cell(draft: str, k: int, batch: int) -> dict[str, Any]:
    method, rate, _ = DRAFTS[draft]
    conditional = [rate - 0.02 * position for position in range(k)]
    accepted = _products(conditional)
    length = 1 + sum(accepted)
    plain, fast = batch / _round_ms(draft, 0, batch), length * batch / _round_ms(draft, k, batch)
    return {
        "target": "meta-llama/Llama-3.1-8B-Instruct",
        "draft": draft,
        "method": method,
        "engine": "draftkit",
        "dataset": "mt-bench",
        "num_speculative_tokens": k,
        "temperature": 0.0,
        "draft_sampling": "greedy",
        "verification": "rejection",
        "concurrency": batch,
        "num_prompts": 80,
        "max_new_tokens": 256,
        "output_tokens": 20480,
        "num_drafts": 1000,
        "num_accepted_tokens_per_pos": [round(1000 * share) for share in accepted],
        "acceptance_per_pos": accepted,
        "conditional_acceptance_per_pos": conditional,
        "acceptance_length": _interval(length),
        "expected_acceptance_length": _interval(length * 1.01),
        "acceptance_length_by_convention": {"vllm": length, "sglang": length * 0.98, "modelopt": length * 0.96},
        "by_category": {name: _interval(1 + (length - 1) * factor) for name, factor in CATEGORIES.items()},
        "tokens_per_second": 1000 * fast * 0.97,
        "baseline_tokens_per_second": 1000 * plain,
        "speedup": fast * 0.97 / plain,
        "runtime_s": 20.48 / fast,
        **{
            f"{name}_ms": {"mean": ms, "p50": ms, "p99": 2 * ms} for name, ms in _times(draft, k, batch, length).items()
        },
        **{
            f"{name}_quantiles_ms": [ms * (0.6 + 0.6 * (i / 100) + (i / 100) ** 12) for i in range(101)]
            for name, ms in _times(draft, k, batch, length).items()
        },
        "matches_greedy": True,
        "num_matching_prompts": 80,
        "memory": _memory(draft, k, batch),
        "samples": SAMPLES,
        "predicted": [
            {"temperature": t, "draft_sampling": mode, "num_speculative_tokens": k, "acceptance_length": length - t / 4}
            for t, mode in ((0.6, "greedy"), (1.0, "probabilistic"))
        ],
    }


def _speed_model(draft: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = {cell["num_speculative_tokens"]: cell["acceptance_length"]["mean"] for cell in cells}
    predicted = [
        {
            "concurrency": batch,
            "num_speculative_tokens": k,
            "speedup": lengths[k] * _round_ms(draft, 0, batch) / _round_ms(draft, k, batch),
            "ideal_speedup": (k + 1) * _round_ms(draft, 0, batch) / _round_ms(draft, k, batch),
        }
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for k in KS
    ]
    return {
        "draft": draft,
        "rounds_ms": [
            {"concurrency": batch, "num_speculative_tokens": k, "ms": _round_ms(draft, k, batch)}
            for batch in BATCHES
            for k in (0, *KS)
        ],
        "predicted": predicted,
        "measured": [
            {
                "concurrency": cell["concurrency"],
                "num_speculative_tokens": cell["num_speculative_tokens"],
                "speedup": cell["speedup"],
                "predicted": cell["speedup"] / 0.97,
            }
            for cell in cells
        ],
        "best_k": 4,
        "schedule": [[1, 4, 5], [5, 16, 3], [17, 64, 1]],
        "stop_above": 64,
        "mean_error": 0.031,
    }


def _round_ms(draft: str, k: int, batch: int) -> float:
    """Verification is free while weights are what is read, and costs more with every token after that."""
    cost = DRAFTS[draft][2]
    return 7.0 * (1 + 0.012 * batch * (k + 1) / 4 + cost * k * (1 + batch / 64))


def _times(draft: str, k: int, batch: int, length: float) -> dict[str, float]:
    round_ms = _round_ms(draft, k, batch)
    return {"ttft": 14 + 2.5 * batch, "tpot": round_ms / length, "itl": round_ms}


def _memory(draft: str, k: int, batch: int) -> dict[str, Any]:
    capacity, available = 2048, 70 << 30
    weights, cached = (700 << 20, 4096) if draft == "zoo:eagle3" else (420 << 20, 24576)
    fixed = {"target weights": 16 << 30, f"weights of {draft}": weights}
    per_slot = {
        "target cache": capacity * 131072,
        "draft cache": capacity * cached,
        "hidden states": (k + 1) * 24576,
        "logits": (k + 1) * 128256 * 6,
        "draft probabilities": k * 128256 * 4,
    }
    total = sum(fixed.values()) + batch * sum(per_slot.values())
    largest = (available - sum(fixed.values())) // sum(per_slot.values())
    plan = {"fixed": fixed, "per_slot": per_slot, "num_slots": batch, "available": available, "capacity": capacity}
    return plan | {"total": total, "largest_batch": largest}


def _products(rates: list[float]) -> list[float]:
    shares, share = [], 1.0
    for rate in rates:
        share *= rate
        shares.append(share)
    return shares


def _interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.12, "high": mean + 0.11}
