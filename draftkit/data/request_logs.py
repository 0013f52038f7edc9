"""Logs of requests to a target, as servers and their clients write them.

A record is a chat or completion of OpenAI's interface: the request's keys with the response's `choices`, or both under
`request` (or a batch's `body`) and `response`; or a row of any shape that `draftkit.data.rows` knows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from draftkit.data.categories import category_of
from draftkit.data.rows import LeftOutRows, Place, Row, data_files, media_root_of, read_file, read_row
from draftkit.errors import FormatError, SourceError


class Logged(NamedTuple):
    """A row of the log. `own`: its last answer is taken as the target's own, and needs no other."""

    row: Row
    own: bool


def read_request_logs(
    source: Path,
    own: Container[str] = (),
    left_out: LeftOutRows | None = None,
    media_root: Path | None = None,
) -> Iterator[Logged]:
    """The requests of a file or folder of logs, each once; `own`: the model names whose answers are the target's own.

    A row's id tells its messages, so that a request is on the same side of any split wherever it occurs again; its
    category says language and tools. Completions are answered anew whoever wrote them, as their text does not say where
    the answer begins. `left_out` and `media_root` as of `read_rows`. Raises `SourceError` and `FormatError`.
    """
    if not source.exists():
        raise SourceError(f"there is no file or folder {source}", where=source)
    seen, root = set(), media_root_of(str(source), media_root)
    for place in itertools.chain.from_iterable(map(read_file, data_files(source))):
        where, record = place.where, place.record
        shaped, model, answer = _request(record, where)
        digest = hashlib.sha256(json.dumps(shaped, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        id = f"traffic-{digest.hexdigest()[:16]}"
        if id in seen:
            continue
        seen.add(id)
        row = read_row(Place(where, shaped, None, root), left_out)
        if row is None:
            continue
        row = replace(row, id=id, category=category_of(row))
        messages = shaped.get("messages")
        if isinstance(model, str) and model in own and answer is not None and isinstance(messages, list):
            answered = read_row(Place(where, as_row(record, where), None, root), left_out)
            if answered is not None:
                yield Logged(replace(row, content=answered.content), True)
        else:
            yield Logged(row, False)


def as_row(record: Mapping[str, object], where: str) -> dict[str, object]:
    """A record in a shape of rows: of a log the request, with the answer as the last of its messages; others as they
    are. Raises `FormatError`."""
    if not _is_logged(record):
        return dict(record)
    shaped, _, answer = _request(record, where)
    messages = shaped.get("messages")
    if answer is None or not isinstance(messages, list):
        return shaped
    return shaped | {"messages": [*messages, {**answer, "role": "assistant"}]}


def _is_logged(record: Mapping[str, object]) -> bool:
    """Whether a record is a request to a server, with what it answered; rows have answers and choices that are text."""
    choices = record.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    answered = isinstance(first, dict) and ("message" in first or "text" in first)
    return answered or any(isinstance(record.get(key), dict) for key in ("request", "response", "body"))


def _request(record: Mapping[str, object], where: str) -> tuple[dict[str, object], object, Mapping[str, object] | None]:
    """The request in a shape of rows, the model that answered, and the message it answered with, where there is one."""
    request = _body(record.get("request", record), where)
    response = _body(record.get("response", record), where)
    choices = response.get("choices")
    if "request" not in record and "body" not in record and choices is None:
        return dict(record), record.get("model"), None
    shaped = {key: request[key] for key in ("messages", "tools", "prompt") if request.get(key) is not None}
    prompt = shaped.get("prompt")
    if "messages" not in shaped and isinstance(prompt, str):
        shaped = {"text": prompt}  # a completion goes on with it as it is
    elif not isinstance(shaped.get("messages"), list):
        raise FormatError(
            f"the request has no messages and no prompt that is text; its keys: {', '.join(request) or 'none'}",
            where=where,
            expected="a chat or completion of OpenAI's interface",
        )
    first = choices[0] if isinstance(choices, list) and choices else {}
    message = first.get("message") if isinstance(first, dict) else None
    return shaped, response.get("model", request.get("model")), message if isinstance(message, dict) else None


def _body(part: object, where: str) -> Mapping[str, object]:
    """A request or response; those of batches are wrapped once more."""
    if isinstance(part, dict) and isinstance(part.get("body"), dict):
        part = part["body"]
    if not isinstance(part, dict):
        raise FormatError("request and response are no objects", where=where)
    return part
