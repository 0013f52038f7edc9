"""vLLM: counters for all requests together, and each request's own with `--per-request-spec-decode-metrics`.

From 0.32 as installed, and run: `SpecDecodingProm` of `vllm/v1/spec_decode/metrics.py`, `RequestSpecDecodeMetrics` of
`vllm/v1/metrics/stats.py`. In the source of 0.33.0, which was not run, the first file and that class are the same.
"""

from __future__ import annotations

from draftkit.engines.prometheus import parse_samples
from draftkit.engines.records import Answer, Counters
from draftkit.engines.servers.server import Server, told
from draftkit.engines.vllm.client import CompletionsClient, counters_of
from draftkit.requests import Request


class VllmServer(Server):
    """A server that `vllm serve` runs."""

    engine = owner = "vllm"
    by_request = "--per-request-spec-decode-metrics summary"

    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        return CompletionsClient(self.api).complete(self.model, request, end_ids, stream=True)

    def version(self) -> str | None:
        return told(self.api.found("/version").get("version"))

    def speculates(self) -> bool | None:
        return self.counters().drafts is not None

    def counted(self) -> Counters:
        return counters_of(parse_samples(self.api.page("/metrics")))
