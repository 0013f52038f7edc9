"""Running servers, measured as their users are served: one file in `kinds/` for each kind, found by being there.

Such a file defines one subclass of `server.Server`:

- `engine`, its name in results, and `owner`, what its `/v1/models` says under `owned_by`, by which it is recognized;
- `answer(request, end_ids)`: one streamed answer. Its `drafts` are the request's own counts, where the server gives
  them; from these come intervals and categories. A request has token ids, or messages where there is no tokenizer here;
  `alternatives` asks for log-probabilities, which `draftkit certify` needs;
- what else it can tell, each with a default for a server that does not: `version`, `draft`, `speculates` and `counted`
  (before and after a run; others' traffic shows in them).

Nothing that a server says is believed unread: a count is a `whole_number` of `records.py`, a name is `told`, and what
an answer or its counts cannot be is refused by `Server.complete` and by the lane. How much is read of a server, and for
how long, is limited in `http.py`.

Any other server is measured by the sizes of the chunks that it streams, and its figures are marked as estimated.
`stream.py` reads and writes what all share of OpenAI's interface, `server.py` opens a server by its address, and
`evaluate/engines/server.py` runs requests through it.
"""
