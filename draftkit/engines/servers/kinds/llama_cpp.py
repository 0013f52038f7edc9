"""llama.cpp's `llama-server`: each answer's `timings` count the draft tokens and those that stood.

From b11434 as built, and run: `server_slot_stats::to_json` and `to_metrics` of `tools/server`. A draft is cut to the
tokens that are left but one, and an accepted token that ends the text counts only at the end of its draft. The server
counts verifications for all requests together, and only those that had a draft: a request's own are told from its
tokens, of which each verification gives one more than stood. Answers end with the tokens that the target's file names.
In a stream, of tokens that are one character together only the last is named: they are counted by the server alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from draftkit.engines.http import Event
from draftkit.engines.prometheus import by_position, parse_samples, total
from draftkit.engines.records import Answer, Counters, DraftCounts, Token, whole_number
from draftkit.engines.servers.server import Server, told
from draftkit.engines.stream import Chunk, answer_of, sampling_of
from draftkit.errors import DraftkitError, SourceError
from draftkit.io.jsonfile import loads
from draftkit.requests import Request

PREFIX = "llamacpp:spec_decode_num_"


class LlamaCppServer(Server):
    """A `llama-server`, with `--metrics` where acceptance at each position is to be known."""

    engine, owner = "llama.cpp", "llamacpp"
    untold = (
        "the rounds of a request, of which there are as many as its tokens need",
        "acceptance at each position by request or category: its counters, with --metrics, are of all requests",
        "the probabilities of the draft, so that there is no expected acceptance length",
    )
    expected = False  # that it drafts

    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        began = time.perf_counter()
        events = self.api.ask("/completion", self.body(request), stream=True)
        chunks = [chunk for event in events if (chunk := _chunk(event)) is not None]
        if not chunks:
            raise SourceError("the server's answer is empty", where=f"{self.api.root}/completion")
        timings = events[-1][1].get("timings")
        count = timings.get("predicted_n") if isinstance(timings, dict) else None
        known = None if count is None else whole_number(count, "predicted_n")
        return answer_of(chunks, began, self._counts(timings), known)

    def version(self) -> str | None:
        return told(self.api.found("/props").get("build_info"))

    def speculates(self) -> bool | None:
        """What its slots say: a draft that does not fit, or one without `--spec-type`, is loaded and not used."""
        try:
            slots = loads(self.api.page("/slots"))
        except (DraftkitError, ValueError):
            return None
        first = slots[0] if isinstance(slots, list) and slots else None
        return bool(first.get("speculative")) if isinstance(first, dict) else None

    def counted(self) -> Counters:
        try:
            samples = parse_samples(self.api.page("/metrics"))
        except SourceError:  # of a server without --metrics
            return Counters()
        drafts, drafted, accepted = (total(samples, PREFIX + n) for n in ("drafts", "draft_tokens", "accepted_tokens"))
        if drafts is None or accepted is None:
            return Counters()
        return Counters(
            DraftCounts(drafts, drafted, accepted, by_position(samples, f"{PREFIX}accepted_tokens_per_pos"))
        )

    def body(self, request: Request) -> dict[str, object]:
        """The body of a request to `/completion`."""
        drawn = sampling_of(request)
        return {
            "prompt": self._rendered(request) if request.messages else list(request.prompt),
            "n_predict": drawn.pop("max_tokens"),
            "repeat_penalty": drawn.pop("repetition_penalty"),
            **drawn,
            "ignore_eos": request.ignore_eos,
            "n_probs": request.alternatives,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,  # each prompt is computed anew, as elsewhere
        }

    def _rendered(self, request: Request) -> object:
        """Messages as text, by the target's own template."""
        if any(not isinstance(content, str) for _, content in request.messages):
            raise DraftkitError(
                f"request {request.id} has images or sounds, which are not sent to llama.cpp",
                where=self.api.root,
                hint="leave such prompts out, or measure a server of vLLM or SGLang",
            )
        messages = [{"role": role, "content": content} for role, content in request.messages]
        body: dict[str, object] = {"messages": messages}
        if request.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
        ((_, answer),) = self.api.ask("/apply-template", body, stream=False)
        return answer["prompt"]

    def _counts(self, timings: object) -> DraftCounts | None:
        """A request's own counts. Raises `SourceError` where nothing was drafted and the server does not say that it
        could have."""
        found: Mapping[str, Any] = timings if isinstance(timings, dict) else {}
        if "draft_n" in found:
            drafted, tokens = (whole_number(found[name], name) for name in ("draft_n", "predicted_n"))
            accepted = whole_number(found["draft_n_accepted"], "draft_n_accepted", tokens)
            return DraftCounts(max(tokens - 1 - accepted, 1), drafted, accepted, ())
        if self.expected and self.speculates() is not True:
            raise SourceError(
                "the server has drafted nothing: its answer has no draft_n",
                where=f"{self.api.root}/completion",
                hint="start it with --spec-type; its log says where the vocabularies differ",
            )
        return DraftCounts(0, 0, 0, ()) if self.expected else None

    def require(self, *, speculates: bool) -> None:
        super().require(speculates=speculates)
        self.expected = speculates


def _chunk(event: Event) -> Chunk | None:
    """The part of an answer that one event of its stream adds."""
    when, said = event
    tokens, shown = said.get("tokens"), said.get("completion_probabilities")
    if not isinstance(tokens, list) or not tokens:
        return None
    rows: list[Any] = shown if isinstance(shown, list) else []
    logprobs = tuple(float(row["logprob"]) for row in rows)
    others: tuple[Mapping[Token, float], ...]
    others = tuple({int(one["id"]): float(one["logprob"]) for one in row["top_logprobs"]} for row in rows)
    return Chunk(when, str(said.get("content", "")), tuple(tokens), logprobs, others)
