"""Does `eval --engine vllm` count what draftkit's own engine counts? The zoo's drafts in both, greedily, on the CPU.

`python -m scripts.check.vllm_engine --vllm-python ENV/bin/python [--limit 16] [--max-new-tokens 48] [--only NAME]`

Drafts, draft tokens, accepted tokens at each position and acceptance lengths with their intervals must be the same, and
vLLM's counts by request must add up to its counters. What a server would take from the target's generation config must
be what draftkit's requests state. Exits with 1 when anything differs. scripts/check/vllm.py compares more kinds of
drafts, proposal by proposal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from rich.console import Console

import draftkit
from draftkit.engines.vllm.client import SERVER_DEFAULTS
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.report.terminal.engines import counts_agree, engine_pairs, engines_table
from draftkit.results.settings import Settings

TARGET = "zoo:target"
DRAFTS = ("zoo:eagle", "zoo:eagle3", "zoo:draft-model", "zoo:p-eagle", "zoo:pard", "ngram:1-3")

# Prints what vLLM takes from a generation config that states everything, and what a completion request falls back to.
ASK_FOR_DEFAULTS = """
import json
from types import SimpleNamespace
from transformers import GenerationConfig
from vllm.config import ModelConfig
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
everything = dict.fromkeys(GenerationConfig().to_dict().keys() | {"presence_penalty", "frequency_penalty"}, 0.5)
model = SimpleNamespace(generation_config="vllm", override_generation_config=everything)
taken = {*ModelConfig.get_diff_sampling_param(model), *CompletionRequest._DEFAULT_SAMPLING_PARAMS.default}
print(json.dumps(sorted(taken)))
"""


def server_defaults_differ(python: str) -> bool:
    """Whether the installed vLLM fills in other fields than draftkit states; says which."""
    ran = subprocess.run([python, "-c", ASK_FOR_DEFAULTS], stdout=subprocess.PIPE, text=True, check=True)
    differing = set(json.loads(ran.stdout.splitlines()[-1])) ^ set(SERVER_DEFAULTS)
    print(f"fields that vLLM takes from a generation config: {', '.join(sorted(differing)) or 'none'} differ")
    return bool(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--only", default="", help="run the drafts whose name contains this")
    options = parser.parse_args()
    settings = Settings(
        num_speculative_tokens=options.k,
        max_new_tokens=options.max_new_tokens,
        concurrency=options.concurrency,
        limit=options.limit,
        device="cpu",
        repeats=0,
    )
    drafts = [draft for draft in DRAFTS if options.only in draft]
    engines = [OwnEngine(), VllmEngine(VllmSettings(python=options.vllm_python))]
    cells = list(draftkit.evaluate_draft(TARGET, drafts, settings, engines=engines).cells)
    Console(width=140).print(engines_table(cells))
    pairs = [(ours, theirs) for ours, theirs in engine_pairs(cells) if ours is not None and theirs is not None]
    same = [
        counts_agree(ours, theirs)
        and theirs.interval_known
        and theirs.matches_greedy
        and all(
            getattr(ours, key) == getattr(theirs, key) for key in ("acceptance_length", "by_category", "output_tokens")
        )
        for ours, theirs in pairs
    ]
    differ = server_defaults_differ(options.vllm_python)
    sys.exit(0 if len(pairs) == len(drafts) and all(same) and not differ else 1)


if __name__ == "__main__":
    main()
