"""vLLM: counters for all requests together, and each request's own with `--per-request-spec-decode-metrics`.

From 0.32 as installed, and run: `SpecDecodingProm` of `vllm/v1/spec_decode/metrics.py`, `RequestSpecDecodeMetrics` of
`vllm/v1/metrics/stats.py`. In the source of 0.33.0, which was not run, the first file and that class are the same.
"""

from __future__ import annotations

from draftkit.engines.prometheus import parse_samples
from draftkit.engines.records import Answer, Counters
from draftkit.engines.servers.server import Server
from draftkit.engines.vllm.client import CompletionsClient
from draftkit.engines.vllm.metrics import counters_of
from draftkit.errors import FormatError, SourceError
from draftkit.requests import Request


class VllmServer(Server):
    """A `vllm serve`."""

    engine = owner = "vllm"

    def complete(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        return CompletionsClient(self.api).complete(self.model, request, end_ids, stream=True)

    def version(self) -> str | None:
        version = self.api.found("/version").get("version")
        return version if isinstance(version, str) else None

    def speculates(self) -> bool | None:
        return self.counters().drafts is not None

    def counters(self) -> Counters:
        page = self.api.page("/metrics")
        try:
            return counters_of(parse_samples(page))
        except FormatError as error:
            raise SourceError(
                f"the server's metrics cannot be read: {error}", where=f"{self.api.root}/metrics"
            ) from error
