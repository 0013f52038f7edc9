"""The pair under test, and how it is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from draftkit.evaluate.prompts import encode_prompt, load_prompt_set
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import DraftSampling, Request, SamplingParameters, Verification
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import MAX_SPECULATIVE_TOKENS, Engine
from draftkit.runtime.records import Generation
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.target import Target
from lossless.settings import CertificateSettings

SHARES = (1.0, 0.5, 0.75, 0.35)  # of `max_new_tokens`: sequences of a batch end at different times


@dataclass(frozen=True)
class Pair:
    """A target, loaded once, the drafter that is tested with it, greedy requests of different lengths, and how drafts
    of sampled requests are drawn."""

    model: PreTrainedModel
    drafter: Drafter
    requests: tuple[Request, ...]
    draft_sampling: DraftSampling = field(default_factory=lambda: DraftSampling("probabilistic"))

    @property
    def most_tokens(self) -> int:
        """The most tokens that the drafter can draft in a round."""
        return min(self.drafter.max_tokens or MAX_SPECULATIVE_TOKENS, MAX_SPECULATIVE_TOKENS)

    def sampled(self, sampling: SamplingParameters) -> tuple[Request, ...]:
        """The same requests, drawn."""
        return tuple(replace(r, sampling=sampling.numbered(i)) for i, r in enumerate(self.requests))

    def plain(self, requests: Sequence[Request]) -> list[Generation]:
        """Decoding without a draft, one request at a time."""
        engine = Engine(Target(self.model), None, num_speculative_tokens=0, num_slots=1, verification="coupled")
        return engine.generate(requests)

    def speculative(
        self,
        requests: Sequence[Request],
        *,
        k: int,
        num_slots: int,
        verification: Verification = "rejection",
        k_by_batch: Mapping[int, int] | None = None,
        drafter: Drafter | None = None,
        target: type[Target] = Target,
        eager: bool = False,
    ) -> list[Generation]:
        """Decoding with the draft.

        `drafter` replaces the pair's own, `target` the usual kind of target. `eager`: for those of them that look at
        values on the host.
        """
        drafter = drafter or self.drafter
        engine = Engine(
            target(self.model, drafter.aux_layers),
            drafter,
            num_speculative_tokens=k,
            num_slots=min(num_slots, len(requests)),
            verification=verification,
            draft_sampling=self.draft_sampling,
            k_by_batch=k_by_batch,
            eager=eager,
        )
        return engine.generate(requests)


@contextmanager
def open_pair(target: str, draft: str, settings: CertificateSettings) -> Iterator[Pair]:
    """Load a target, a draft and prompts, all as `evaluate_draft` takes them. Raises `DraftkitError`."""
    asked = settings.eval_settings
    device = device_named(asked.device)
    prompts = load_prompt_set(asked.prompts, asked.limit, strict=asked.strict).prompts
    with open_draft(draft, target) as opened:
        model, tokenizer = load_model(target, device=device, dtype=dtype_named(asked.dtype, device))
        tune_for_cpu(model)
        drafter = load_drafter(opened, model, tokenizer)
        texts = [(prompt.id, encode_prompt(prompt, tokenizer, asked.thinking, asked.template)) for prompt in prompts]
        yield Pair(model, drafter, ragged_requests(texts, asked.max_new_tokens), asked.draft_sampling)


def ragged_requests(prompts: Sequence[tuple[str, tuple[int, ...]]], max_new_tokens: int) -> tuple[Request, ...]:
    """Greedy requests of different lengths from ids and prompts; none ends early, so that sample sizes are known."""
    return tuple(
        Request(name, prompt, max(int(max_new_tokens * SHARES[i % len(SHARES)]), 2), ignore_eos=True)
        for i, (name, prompt) in enumerate(prompts)
    )
