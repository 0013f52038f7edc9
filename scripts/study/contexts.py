"""Several drafts of one target by context, on states that are computed once: what does training on long samples change?

`python -m scripts.study.contexts --target T --draft A --draft B --prompts FILE [--context 256,1k,4k] [--limit 6]`

As `doctor --context` measures changes of one draft: the target writes each answer once, behind other conversations of
the file, and every draft is asked for it. Acceptance lengths are from the probabilities, at T = 0.5; the differences to
the first draft are prompt by prompt.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

import torch

from draftkit.doctor.measure import TEMPERATURE
from draftkit.doctor.replay import record, replay
from draftkit.evaluate.contexts import Filler
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.options import parse_contexts
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.loading import load_drafter, open_draft, open_target
from draftkit.requests import Request, SamplingParameters
from draftkit.results.metrics import length
from draftkit.results.settings import Settings
from draftkit.results.statistics import expected_acceptance_length, expected_sums, gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, action="append")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--context", default="256,1k,4k")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = open_target(asked.target)
    model = target.load(device="cpu", dtype=getattr(torch, asked.dtype))
    prompts = load_prompt_set(asked.prompts, asked.limit).prompts
    filler = Filler({p.text: "\n\n".join(p.turns) for p in load_prompt_set(asked.prompts).prompts}, target.tokenizer)
    with ExitStack() as stack:
        drafts = [stack.enter_context(open_draft(name, asked.target)) for name in asked.draft]
        drafters = [load_drafter(draft, model, target.tokenizer) for draft in drafts]
        for context in parse_contexts(asked.context):
            asking = Conversations(prompts, target.tokenizer, Settings(context=context), filler=filler)
            requests = [
                Request(text.id, text.prompt, asked.max_new_tokens, SamplingParameters(TEMPERATURE, seed=number))
                for number, text in enumerate(asking.first_requests)
            ]
            found = []
            recorded = {
                layers: record(model, layers, requests, asked.k)
                for layers in dict.fromkeys(drafter.aux_layers for drafter in drafters)
            }
            for drafter in drafters:
                found.append(replay(model, drafter, asked.k, recorded[drafter.aux_layers]))
            sums = [expected_sums([one.rounds for one in generations]) for generations in found]
            for name, generations, own in zip(asked.draft, found, sums, strict=True):
                told = length(expected_acceptance_length(generations))
                against = "–" if own is sums[0] else length(gain(sums[0], own, len(sums) - 1), signed=True)
                print(f"{context:,}: {name}: {told}, against the first {against}", flush=True)
    print(f"{time.process_time():.0f} s of one core")


if __name__ == "__main__":
    main()
