"""As much of vLLM's offline API as draftkit calls, over `simulation`; two engines answer in turns.

`FAKE_VLLM` in the environment: `old` has no counts by request, `dies`, `vanishes` and `sleeps` in the measurement,
`errs` in its second token when it drafts. What it is asked is appended to the file `FAKE_VLLM_JOURNAL`.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

from simulation import histogram, per_position, simulate

__version__ = "0.0-fake"
BEHAVIOUR = os.environ.get("FAKE_VLLM", "")


def journal(entry):
    with open(os.environ["FAKE_VLLM_JOURNAL"], "a") as file:
        print(json.dumps(entry), file=file)


class EngineArgs:
    if BEHAVIOUR != "old":
        per_request_spec_decode_metrics = "none"


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop_token_ids: list = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    detokenize: bool = True


class LLM:
    def __init__(self, **arguments):
        print("INFO loading the model")  # to standard output, as vLLM does
        journal({"arguments": arguments, "pid": os.getpid()})
        if BEHAVIOUR == "dies":
            raise ValueError("no memory is left for the cache")
        speculative = arguments.get("speculative_config")
        self.k = speculative["num_speculative_tokens"] if speculative else 0
        self.by_request = arguments.get("per_request_spec_decode_metrics") == "summary"
        self.engines = ([], [])  # the accepted drafts of each round
        self.finished = 0
        self.calls = 0

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls += 1
        if BEHAVIOUR == "vanishes" and self.calls == 2:
            os._exit(7)
        if BEHAVIOUR == "sleeps" and self.calls == 2:
            time.sleep(60)
        journal({"prompts": prompts, "sampling": [asdict(sampling) for sampling in sampling_params]})
        return [self.answer(*pair) for pair in zip(prompts, sampling_params, strict=True)]

    def answer(self, prompt, sampling):
        done = simulate(prompt["prompt_token_ids"], sampling.max_tokens, self.k)
        self.engines[self.finished % 2].extend(done.accepted)
        self.finished += 1
        drafts = SimpleNamespace(
            histogram=histogram(done.accepted, self.k), num_draft_tokens=self.k * len(done.accepted)
        )
        tokens = done.tokens
        if BEHAVIOUR == "errs" and self.k:
            tokens[1] += 1
        completion = SimpleNamespace(token_ids=tokens, spec_decode_metrics=drafts if self.by_request else None)
        times = SimpleNamespace(scheduled_ts=10.0, first_token_ts=10.5, last_token_ts=10.5 + 0.25 * (len(tokens) - 1))
        return SimpleNamespace(outputs=[completion], metrics=times)

    def get_metrics(self):
        metrics = [SimpleNamespace(name="vllm:request_success", value=self.finished)]
        for accepted in self.engines if self.k else ():
            counts = {
                "num_drafts": len(accepted),
                "num_draft_tokens": self.k * len(accepted),
                "num_accepted_tokens": sum(accepted),
            }
            metrics += [SimpleNamespace(name=f"vllm:spec_decode_{n}", value=v) for n, v in counts.items()]
            values = per_position(accepted, self.k)
            metrics.append(SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=values))
        return metrics
