"""What was measured, for programs that only simulate it: acceptance without the draft.

A rate is *marginal* where it is the share of rounds in which this and all draft tokens before were accepted, and
*conditional* where it is of the rounds in which those before were; readers want one or the other. Rates are over the
rounds that had a draft, as a simulated engine skips the others by itself. Where the forms come from:

- `speculation_profile.json`: NVIDIA/Model-Optimizer pull request 2247 (specdec_bench), schema 1.0; ai-dynamo/dynamo
  reads the conditional rates (`lib/mocker`, `normalize_conditional_accept_rates`: 1 to 5 of them).
- vLLM 0.32, `vllm/config/speculative.py`: `synthetic_acceptance_rates` are marginal, K of them, and never rise.
- SGLang, `generate_simulated_accept_index`: a mean length alone, which `match-expected` rounds up or down at random.
- SemiAnalysisAI/InferenceX, `golden_al_distribution/*.yaml`: model → setting → K → length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from draftkit.results.cell import Cell
from draftkit.results.record import Result

FILES = {"speculation_profile.json", "vllm.json", "dynamo.sh", "sglang.sh", "golden_length.yaml"}
SCHEMA_VERSION = "1.0"
DYNAMO_MOST = 5  # draft tokens that its simulation knows
NAME_BYTES = 100  # of a draft's name in that of its folder, which has 255
TOLERANCE = 0.02  # of the mean that the marginal rates imply, as Model-Optimizer has it


def profile_files(result: Result) -> dict[str, str]:
    """The files for all readers by their paths: a folder for each draft and temperature.

    Figures are of the smallest batch, on which acceptance does not depend; the profile is of the most draft tokens.
    """
    files: dict[str, str] = {}
    for folder, cells in _groups(result.cells).items():
        widest = cells[max(cells)]
        files[f"{folder}/speculation_profile.json"] = _json(speculation_profile(widest, cells, result))
        files[f"{folder}/vllm.json"] = _json({str(k): synthetic_config(cell) for k, cell in cells.items()})
        files[f"{folder}/dynamo.sh"] = _lines(_dynamo(cell) for k, cell in cells.items() if k <= DYNAMO_MOST)
        files[f"{folder}/sglang.sh"] = _lines(_sglang(cell) for cell in cells.values())
        files[f"{folder}/golden_length.yaml"] = _golden(widest, cells, result)
    return files


def speculation_profile(cell: Cell, by_k: dict[int, Cell], result: Result) -> dict[str, object]:
    """The profile of a cell; `by_k`: those of all K, which only chains of drafts would allow to tell from one."""
    marginal, mean = marginal_rates(cell), _mean(cell)
    prompts = [1 + p.accepted / p.rounds for p in cell.by_prompt or () if p.rounds]
    implied = 1 + sum(marginal)
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": cell.method,
        "draft_checkpoint": {"name": _short(cell.draft), "sha256": cell.draft_sha256},
        "target_model": {"name": _short(cell.target), "sha256": cell.target_sha256},
        "num_speculative_tokens": cell.num_speculative_tokens,
        "block_size": None,
        "max_supported_k": cell.num_speculative_tokens,
        "verification_method": "block" if cell.verification == "block" else "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in conditional_rates_of(marginal)],
        "marginal_accept_rates": [round(rate, 6) for rate in marginal],
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": round(sum(prompts) / len(prompts), 6) if prompts else None,
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(k): round(_mean(other), 6) for k, other in by_k.items()},
        "acceptance_length_histogram": {str(length): count for length, count in histogram(cell).items()},
        "per_category": {
            name: {"mean_accept_length": round(found.mean, 6)} for name, found in cell.by_category.items() if found
        },
        "measurement_conditions": {
            "dataset": cell.dataset,
            "num_samples": cell.num_prompts,
            "osl": cell.max_new_tokens,
            "temperature": cell.temperature,
            "draft_sampling": cell.draft_sampling,
            "concurrency": cell.concurrency,
            "engine": cell.engine,
            "hardware": result.provenance.get("hardware"),
        },
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {"passed": True, "violations": []},  # by how it is counted
        },
    }


def synthetic_config(cell: Cell) -> dict[str, object]:
    """What of vLLM's `speculative_config` makes it accept as was measured, whatever is drafted."""
    return {
        "num_speculative_tokens": cell.num_speculative_tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 6) for rate in marginal_rates(cell)],
    }


def marginal_rates(cell: Cell) -> list[float]:
    """For each position, the share of the rounds with a draft in which its token and all before it were accepted."""
    drafts = cell.num_drafts or 0
    return [count / drafts if drafts else 0.0 for count in cell.num_accepted_tokens_per_pos or ()]


def conditional_rates_of(marginal: Sequence[float]) -> list[float]:
    """For each position, the share of the rounds in which those before it were accepted; 0 where there were none."""
    return [now / before if before else 0.0 for before, now in pairwise([1.0, *marginal])]


def histogram(cell: Cell) -> dict[int, int]:
    """How many rounds with a draft gave so many tokens, the target's own counted."""
    reached = [cell.num_drafts or 0, *(cell.num_accepted_tokens_per_pos or ()), 0]
    return {length: before - after for length, (before, after) in enumerate(pairwise(reached), start=1)}


def _groups(cells: Iterable[Cell]) -> dict[str, dict[int, Cell]]:
    """The cells with counts, by folder and ascending K, each at its smallest batch."""
    groups: dict[str, dict[int, Cell]] = {}
    counted = [c for c in cells if c.num_drafts and c.num_accepted_tokens_per_pos]
    for cell in sorted(counted, key=lambda c: (c.num_speculative_tokens, c.concurrency)):
        engine = "" if cell.other_engine is None else f"-{cell.engine}"
        folder = f"{_in_a_path(_short(cell.draft))}-T{cell.temperature:g}{_in_a_path(engine)}"
        groups.setdefault(folder, {}).setdefault(cell.num_speculative_tokens, cell)
    return groups


def _mean(cell: Cell) -> float:
    return 1 + (cell.num_accepted_tokens or sum(cell.num_accepted_tokens_per_pos or ())) / (cell.num_drafts or 1)


def _short(name: str) -> str:
    """The last two parts of a path, which of a Hub id are all, so that no path of this machine is published."""
    return "/".join([part for part in name.split("/") if part][-2:])


def _in_a_path(name: str) -> str:
    """A name from a result, which may be any text, as part of a folder's; of a long one, its end."""
    safe = re.sub(r"[^\w.-]", "-", name.replace("/", "--"))
    return safe.encode()[-NAME_BYTES:].decode(errors="ignore")


def _dynamo(cell: Cell) -> str:
    rates = ",".join(f"{rate:.6f}" for rate in conditional_rates_of(marginal_rates(cell)))
    return f"--aic-nextn {cell.num_speculative_tokens} --aic-nextn-accept-rates {rates}"


def _sglang(cell: Cell) -> str:
    steps = cell.num_speculative_tokens
    return (
        f"SGLANG_SIMULATE_ACC_LEN={_mean(cell):.6f} SGLANG_SIMULATE_ACC_METHOD=match-expected  "
        f"# with --speculative-num-steps {steps}"
    )


def _golden(widest: Cell, cells: dict[int, Cell], result: Result) -> str:
    """YAML as text, so that it has its comments."""
    setting = f"temperature_{widest.temperature:g}"
    version, dataset = json.dumps(result.provenance.get("draftkit")), json.dumps(widest.dataset)
    lines = [
        f"# Acceptance lengths over the rounds with a draft, by draftkit {version}.",
        f"# dataset: {dataset} | prompts: {widest.num_prompts} | output_len: {widest.max_new_tokens}",
        f"# draft: {json.dumps(_short(widest.draft))}",
        "# key = num_speculative_tokens; value = acceptance length",
        f"{json.dumps(_short(widest.target))}:",
        f"  {setting}:",
        *(f"    {k}: {_mean(cell):.2f}" for k, cell in cells.items()),
    ]
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _lines(lines: Iterable[str]) -> str:
    return "".join(line + "\n" for line in lines)
