"""Does a converted draft mean the same to vLLM as to draftkit? Same prompts through both, drafts compared step by step.

`python scripts/check_vllm.py --vllm-python ENV/bin/python [--prompts 16] [--k 4] [--only NAME]`

Each draft of the zoo, and variants of it that set one fact differently, is converted and given to both engines with the
embedded target, greedily in float32 on the CPU. Output tokens, every proposal, the number of rounds and the accepted
tokens at each position must be the same. A draft that vLLM cannot express must be refused by it. Exits with 1 when
anything differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint
from draftkit.convert.serve import vllm_settings
from draftkit.evaluate.loading import load_drafter, load_model
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.evaluate.statistics import accepted_per_position
from draftkit.layout.config import refusal_by_vllm
from draftkit.layout.folder import read_draft
from draftkit.models.target import Target
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation, Request


@dataclass(frozen=True)
class Case:
    """A draft of the zoo, the facts set differently, and the layout that vLLM gets."""

    name: str
    source: str
    to: str = "unified"
    overrides: dict[str, str] = field(default_factory=dict)


CASES = (
    Case("EAGLE-1", "eagle"),
    Case("EAGLE-1 with fc.bias", "eagle-bias"),
    Case("EAGLE-1 with fc.bias, folded", "eagle-bias", to="vllm"),
    Case("EAGLE-3", "eagle3"),
    Case("EAGLE-3, norm before residual", "eagle3", overrides={"norm_before_residual": "true"}),
    Case("EAGLE-3, normed feedback", "eagle3", overrides={"feedback": "post_norm"}),
    Case("EAGLE-3, rope base 500000", "eagle3", overrides={"rope_theta": "500000"}),
    Case("EAGLE-3, other layers", "eagle3", overrides={"aux_layer_ids": "1,4,6"}),
    Case("EAGLE-3, speculators layout", "eagle3", to="speculators"),
    Case("EAGLE-3, SafeAILab layout", "eagle3", to="eagle"),
    Case("P-EAGLE", "p-eagle"),
    Case("P-EAGLE, speculators layout", "p-eagle", to="speculators"),
    Case("PARD", "pard"),
    Case("MLP speculator", "mlp-speculator"),
    Case("standalone", "draft-model"),
)


def run_draftkit(drafter: Drafter, requests: list[Request], k: int) -> tuple[list[Generation], list[list[list[int]]]]:
    """The generations, and the proposals of each request."""
    proposals: list[list[list[int]]] = []
    propose = drafter.propose

    def recorded(committed: Committed, count: int, draw: Draw) -> Proposal:
        drafted = propose(committed, count, draw)
        proposals[-1].extend(drafted.tokens.tolist())
        return drafted

    drafter.propose = recorded  # type: ignore[method-assign]
    target = Target(load_model("zoo:target", device="cpu", dtype=torch.float32)[0], drafter.taps)
    engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=1)
    generations = []
    for request in requests:
        proposals.append([])
        generations += engine.generate([request])
    return generations, proposals


def run_vllm(python: str, job: dict[str, object], folder: Path) -> dict[str, object] | None:
    """vLLM's outputs, proposals and counters, or None when it refused the draft."""
    result = folder / "vllm.json"
    result.unlink(missing_ok=True)
    runner = Path(__file__).with_name("vllm_generate.py")
    job = job | {"result": str(result)}
    ran = subprocess.run([python, str(runner)], input=json.dumps(job), capture_output=True, text=True, check=False)
    if result.is_file():
        return json.loads(result.read_text())
    if "are not supported for now" in ran.stderr:
        return None
    sys.exit(f"vLLM failed:\n{ran.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--only", help="run the cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("draft", "rounds", "accepted at 1…K", "acceptance length", "vLLM: outputs", "drafts", "counts")
    differences = 0
    for case in CASES:
        if options.only is None or options.only in case.name:
            row, differs = compare(case, options)
            table.add_row(case.name, *row)
            differences += differs
    Console(width=150).print(table)
    sys.exit(1 if differences else 0)


def compare(case: Case, options: argparse.Namespace) -> tuple[list[str], bool]:
    """A row of the table, and whether the engines differ."""
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    prompts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.prompts)]
    requests = [Request(str(i), prompt, options.max_new_tokens) for i, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        unified, served = Path(scratch) / "unified", Path(scratch) / "served"
        arguments = {"overrides": case.overrides, "target": "zoo:target"}
        convert_checkpoint(f"zoo:{case.source}", unified, **arguments)
        convert_checkpoint(f"zoo:{case.source}", served, to=case.to, **arguments)
        # The fold for vLLM changes the tensors within their rounding; both engines must run the same ones.
        draft = read_draft(served if case.to in ("unified", "vllm") else unified)
        ours, proposals = run_draftkit(load_drafter(draft, model), requests, options.k)
        rounds = sum(len(g.rounds) for g in ours)
        accepted = accepted_per_position(ours, options.k)
        row = [str(rounds), str(accepted), f"{1 + sum(accepted) / rounds:.4f}"]
        job: dict[str, object] = {
            "target": str(zoo.path("target")),
            "speculative": vllm_settings(draft.spec, served) | {"num_speculative_tokens": options.k},
            "prompts": prompts,
            "max_new_tokens": options.max_new_tokens,
            "eos_token_ids": sorted(Target(model).eos_token_ids),
        }
        theirs = run_vllm(options.vllm_python, job, Path(scratch))
    if theirs is None:
        reason = refusal_by_vllm(draft.spec)
        return [*row, f"refused: {reason}", "–", "–"], reason is None or case.to != "unified"
    same = sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True))
    pairs = zip(proposals, theirs["proposals"], strict=True)
    # Not strict: vLLM also proposes after the last round of a request, which nothing verifies.
    steps = [step for mine, other in pairs for step in zip(mine, other, strict=False)]
    equal = sum(a == b for a, b in steps)
    counters = theirs["counters"]
    counts = (counters["num_drafts"], counters["num_accepted_tokens_per_pos"]) == (rounds, accepted)
    row += [f"{same} of {len(requests)} equal", f"{equal} of {len(steps)} equal", "equal" if counts else str(counters)]
    return row, not (same == len(requests) and equal == len(steps) >= rounds and counts)


if __name__ == "__main__":
    main()
