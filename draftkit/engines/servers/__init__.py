"""Running servers, measured as their users are served: one file in `kinds/` for each kind, found by being there.

Such a file defines one subclass of `server.Server`:

- `engine`, its name in results, and `owner`, what its `/v1/models` says under `owned_by`, by which it is recognized;
- `complete(request, end_ids)`: one streamed answer. Its `drafts` are the request's own counts, where the server gives
  them; from these come intervals and categories. A request has token ids, or messages where there is no tokenizer here;
  `alternatives` asks for log-probabilities, which `--certify` needs;
- what else it can tell, each with a default for a server that does not: `version`, `draft`, `speculates` and `counters`
  (before and after a run; others' traffic shows in them).

Any other server is measured by the sizes of the chunks that it streams (`chunks.py`), and its figures are marked as
estimated. `stream.py` reads and writes what all share of OpenAI's interface, `connect.py` opens a server by its
address, `lane.py` runs requests through it.
"""
