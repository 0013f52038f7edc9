"""Does a converted draft mean the same to vLLM as to draftkit? Same prompts through both, tokens and counts compared.

`python scripts/check_vllm.py --vllm-python ENV/bin/python [--prompts 16] [--k 4]`

Each draft of the zoo is converted and given to both engines with the embedded target, greedily in float32 on the CPU.
Output tokens, the number of rounds and the accepted tokens at each position must be the same. A draft that vLLM cannot
express must be refused by it. Exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint
from draftkit.evaluate.loading import load_drafter, load_model
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.evaluate.statistics import accepted_per_position
from draftkit.layout.config import refusal_by_vllm
from draftkit.layout.folder import read_draft
from draftkit.models.target import Target
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Request

METHODS = {"eagle": "eagle", "eagle3": "eagle3", "draft-model": "draft_model"}
DRAFTS = ("eagle", "eagle-bias", "eagle3", "draft-model")


def run_vllm(python: str, job: dict[str, object], folder: Path) -> dict[str, object] | None:
    """vLLM's outputs and counters, or None when it refused the draft."""
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    prompts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", options.prompts)]
    requests = [Request(str(i), prompt, options.max_new_tokens) for i, prompt in enumerate(prompts)]
    table = Table("draft", "engine", "drafts", "accepted at 1…K", "acceptance length", "output tokens", title="vLLM")
    differences = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in DRAFTS:
            folder = Path(scratch) / f"draft_{name.replace('-', '_')}"
            draft = read_draft(convert_checkpoint(f"zoo:{name}", folder))
            drafter = load_drafter(draft, model)
            engine = Engine(Target(model, drafter.taps), drafter, num_speculative_tokens=options.k, num_slots=8)
            ours = engine.generate(requests)
            rounds = sum(len(g.rounds) for g in ours)
            accepted = accepted_per_position(ours, options.k)
            table.add_row(name, "draftkit", str(rounds), str(accepted), f"{1 + sum(accepted) / rounds:.4f}", "")
            theirs = run_vllm(
                options.vllm_python,
                {
                    "target": str(zoo.path("target")),
                    "draft": str(folder),
                    "method": METHODS[draft.spec.method],
                    "num_speculative_tokens": options.k,
                    "prompts": prompts,
                    "max_new_tokens": options.max_new_tokens,
                    "eos_token_ids": sorted(Target(model).eos_token_ids),
                },
                Path(scratch),
            )
            if theirs is None:
                table.add_row(name, "vLLM", "–", "–", "–", f"refused: {refusal_by_vllm(draft.spec)}")
                differences += refusal_by_vllm(draft.spec) is None
                continue
            same = sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True))
            counters = theirs["counters"]
            drafts, per_position = counters["num_drafts"], counters["num_accepted_tokens_per_pos"]
            differences += same < len(requests) or (drafts, per_position) != (rounds, accepted)
            length = 1 + counters["num_accepted_tokens"] / drafts
            table.add_row(
                name,
                "vLLM",
                str(drafts),
                str(per_position),
                f"{length:.4f}",
                f"{same} of {len(requests)} outputs equal",
            )
    Console(width=140).print(table)
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
