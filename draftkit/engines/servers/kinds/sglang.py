"""SGLang: each answer's `meta_info` counts its verifications and what they accepted.

Written from its source, and not run: `_calculate_spec_decoding_metrics` and `_handle_batch_output` of
`python/sglang/srt/managers/tokenizer_manager.py` at 001067fffe33427bee0ed2f007fb7551a1d76b44, with the names of earlier
releases beside. A verification is a step of a request, also where an n-gram lookup found nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from draftkit.engines.http import Event
from draftkit.engines.prometheus import parse_samples, total
from draftkit.engines.records import MOST_DRAFTED, Answer, Counters, DraftCounts, Token, whole_number, whole_numbers
from draftkit.engines.servers.server import Server, told
from draftkit.engines.stream import Chunk, answer_of, choice_of, endings, prompt_of, sampling_of
from draftkit.errors import SourceError
from draftkit.requests import Request

# What today's releases call it, then what earlier ones did.
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class SglangServer(Server):
    """A server that `python -m sglang.launch_server` runs."""

    engine = owner = "sglang"

    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        if request.messages:
            return self._chat(request, end_ids)
        began = time.perf_counter()
        events = self.api.ask("/generate", _body(request, end_ids), stream=True)
        chunks = _chunks(events, request.alternatives)
        if not chunks:
            raise SourceError(
                "the server returns no token ids",
                where=f"{self.api.root}/generate",
                expected="output_ids in each event",
            )
        return answer_of(chunks, began, _counts(events[-1][1].get("meta_info")))

    def _chat(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        """Answer a request that is sent as messages. SGLang gives its counts only with answers that are not streamed,
        and so there are no times of single tokens."""
        body = {"model": self.model, "stream": False, "return_meta_info": True, **prompt_of(request)}
        body |= {"logprobs": True, "top_logprobs": request.alternatives, **sampling_of(request)}
        ((_, event),) = self.api.ask("/v1/chat/completions", body | endings(request, end_ids), stream=False)
        choice = choice_of(event)
        meta = choice.get("meta_info")
        if not isinstance(meta, dict):
            raise SourceError(
                "the server does not count single answers to messages",
                where=f"{self.api.root}/v1/chat/completions",
                expected="meta_info in each choice, as later releases of SGLang return for return_meta_info",
                hint="pass --target, the model's folder or Hub id, for its tokenizer: token ids are counted",
            )
        tokens, logprobs, others = _tokens(meta, 0, request.alternatives)
        return Answer(tokens, None, None, None, _counts(meta), logprobs=logprobs or None, alternatives=others or None)

    def version(self) -> str | None:
        return told(self._info().get("version"))

    def draft(self) -> str | None:
        return told(self._info().get("speculative_draft_model_path"))

    def speculates(self) -> bool | None:
        info = self._info()
        return bool(info["speculative_algorithm"]) if "speculative_algorithm" in info else None

    def counted(self) -> Counters:
        """The counters that the server shows if it was started with `--enable-metrics`; none otherwise."""
        try:
            samples = parse_samples(self.api.page("/metrics"))
        except SourceError:
            return Counters()
        finished, tokens = (total(samples, f"sglang:{name}") for name in ("num_requests", "generation_tokens"))
        return Counters(None, finished, tokens)

    def _info(self) -> dict[str, object]:
        return self.api.found("/server_info") or self.api.found("/get_server_info")


def _body(request: Request, end_ids: frozenset[int] | None) -> dict[str, object]:
    drawn = sampling_of(request) | endings(request, end_ids)
    drawn["max_new_tokens"] = drawn.pop("max_tokens")
    if "seed" in drawn:
        drawn["sampling_seed"] = drawn.pop("seed")
    body: dict[str, object] = {"input_ids": list(request.prompt), "sampling_params": drawn, "stream": True}
    if request.alternatives:
        body |= {"return_logprob": True, "top_logprobs_num": request.alternatives}
    return body


def _chunks(events: list[Event], alternatives: int) -> list[Chunk]:
    """What each event adds: all output so far, or with `--incremental-streaming-output` the new part alone."""
    chunks: list[Chunk] = []
    known: list[int] = []
    for when, event in events:
        ids, meta = event.get("output_ids"), event.get("meta_info")
        if not isinstance(ids, list):
            continue
        whole = ids[: len(known)] == known and len(ids) == _told(meta, len(ids))
        new = ids[len(known) :] if whole else ids
        if not new:
            continue
        _, logprobs, others = _tokens(meta, len(known) if whole else 0, alternatives)
        chunks.append(Chunk(when, "", tuple(new), logprobs, others))
        known += new
    return chunks


def _told(meta: object, otherwise: int) -> int:
    """How many tokens of output an event says that the answer has so far."""
    count = meta.get("completion_tokens") if isinstance(meta, dict) else None
    return count if isinstance(count, int) else otherwise


def _tokens(
    meta: object, begin: int, alternatives: int
) -> tuple[tuple[Token, ...], tuple[float, ...], tuple[Mapping[Token, float], ...]]:
    """The tokens from one on with their log-probabilities and the likeliest others, where `meta` has them."""
    rows = _rows(meta, "output_token_logprobs")[begin:]
    tops = _rows(meta, "output_top_logprobs")[begin:] if alternatives else []
    others = tuple({token: logprob for logprob, token, *_ in row or ()} for row in tops)
    return tuple(token for _, token, *_ in rows), tuple(float(logprob) for logprob, *_ in rows), others


def _rows(meta: object, name: str) -> list[Any]:
    rows = meta.get(name) if isinstance(meta, dict) else None
    return rows if isinstance(rows, list) else []


def _counts(meta: object) -> DraftCounts | None:
    """A request's own counts; None of a server without a draft. Raises `ValueError` for what is no count."""
    if not isinstance(meta, dict) or not meta.get("spec_verify_ct"):
        return None
    steps = whole_number(meta["spec_verify_ct"], "spec_verify_ct")
    accepted, proposed, histogram = (
        next((meta[name] for name in names if name in meta), None) for names in (ACCEPTED, PROPOSED, HISTOGRAM)
    )
    proposed = None if proposed is None else whole_number(proposed, PROPOSED[0], steps * MOST_DRAFTED)
    if isinstance(histogram, list) and sum(counts := whole_numbers(histogram, HISTOGRAM[0], steps)) == steps:
        width = 1 + (proposed // steps if proposed else 0)  # a histogram ends with the most that was accepted
        return DraftCounts.of_histogram(counts + [0] * (width - len(counts)), proposed)
    return None if accepted is None else DraftCounts(steps, proposed, whole_number(accepted, ACCEPTED[0]), ())
