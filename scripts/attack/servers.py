"""Hostile servers on 127.0.0.1: what draftkit believes of them, gives away to them and waits for.

    python -m scripts.attack.servers [--cases N] [--case NUMBER]

Each case is a server of one kind that is honest but for one thing: an impossible count, an endless answer.
A case ends well if the server is refused in one message, or if the figures are those of the honest server. It is lost
if rows that were there before are gone. Hubs redirect elsewhere, and the token must not reach the other server.
"""

from __future__ import annotations

import json
import operator
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "sk-secret"}
from fixtures.fuzzing.judge import command
from fixtures.fuzzing.robust import Hang
from fixtures.servers.completions_server import CompletionsServer
from fixtures.servers.hostile_servers import Exchange, HostileServer, Spoil, at, metric, put, text
from fixtures.servers.hub_server import HubServer
from fixtures.servers.speaking import Dialect, SpeakingServer, simulated

from draftkit.data import endpoints
from draftkit.engines.connections import Limits
from draftkit.engines.records import Answer
from draftkit.engines.servers import server
from draftkit.engines.servers.server import server_at
from draftkit.errors import SourceError
from draftkit.evaluate.engines import server as served
from draftkit.requests import Request
from scripts.attack._count import Case, Lost, Silent, asked, main

ROOT = Path(__file__).resolve().parents[2]

K = 3
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang", "tensorrt_llm", "llamacpp", "openai")
ANSWERS = "completion|generate"  # the paths of answers
MODELS = "/v1/models"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HUGE = 10**12
ODD: tuple[Any, ...] = (-1, True, 2.5, "7", None, HUGE, [], {})
NUMBERS = ("NaN", "+Inf", "-Inf", "-5", "2.5", "1e300", "7e", "")
PATIENCE = 5.0  # seconds that threads have to end

Measure = Callable[[str, Path], Any]
Agrees = Callable[[Any, Any], bool]  # whether what was measured is what the honest server gives


# How a server may speak: all of these at the list of models, and at an answer.


def raw(*parts: bytes) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.write(*parts)


def forever(begin: bytes, part: bytes, pause: float = 0.0) -> Callable[[Exchange], None]:
    def speak(exchange: Exchange) -> None:
        exchange.write(begin)
        exchange.endlessly(part, pause)

    return speak


def silent(begin: bytes) -> Callable[[Exchange], None]:
    def speak(exchange: Exchange) -> None:
        exchange.write(begin)
        exchange.hostile.over.wait()

    return speak


def hang_up(exchange: Exchange) -> None:
    exchange.connection.close()


def status(code: int, body: bytes, **headers: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.send(code, body, headers)


TRANSPORT: dict[str, Callable[[Exchange], None]] = {
    "a byte of the status line at a time": forever(b"HTTP/1.1 2", b"0", 0.05),
    "a byte of a header at a time": forever(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05),
    "headers without end": forever(b"HTTP/1.1 200 OK\r\n", b"X-Header: " + b"x" * 1000 + b"\r\n"),
    "100 Continue without end": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a byte at a time": forever(STREAM, b"x", 0.05),
    "bytes without end": forever(STREAM, b"x" * 65536),
    "lines without end": forever(STREAM, b": ping\n" * 1000),
    "a comment now and then": forever(STREAM, b": ping\n", 0.05),
    "empty objects without end": forever(STREAM, b"data: {}\n" * 1000),
    "an event now and then": forever(STREAM, b'data: {"choices": []}\n', 0.05),
    "silence": silent(b""),
    "silence after the headers": silent(STREAM),
    "silence in an event": silent(STREAM + b'data: {"choices'),
    "a length of a petabyte": silent(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n{"),
    "a body cut short": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}"),
    "a length below zero": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
    "a length that is none": raw(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}"),
    "a chunk of a petabyte": silent(CHUNKED + b"38D7EA4C68000\r\n{}"),
    "a chunk below zero": raw(CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n"),
    "a chunk of no length": raw(CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    "a chunk cut short": raw(CHUNKED + b"64\r\n{}"),
    "chunks without end": forever(CHUNKED, b"1\r\nx\r\n" * 1000),
    "a trailer without end": forever(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: x\r\n" * 1000),
    "nothing": hang_up,
    "garbage": raw(bytes(range(256)) * 4),
    "another protocol": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a status that is none": raw(b"HTTP/1.1 99999 Odd\r\n\r\n{}"),
    "no JSON": status(200, b"<html>Welcome</html>"),
    "a list": status(200, b"[]"),
    "NaN": status(200, b"NaN"),
    "lists in lists": status(200, b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 10,000 digits": status(200, b'{"data": ' + b"9" * 10_000 + b"}"),
    "no UTF-8": status(200, b'{"data": "\xff\xfe"}'),
    "an error with an escape code": status(500, b'{"error": {"message": "\\u001b[2Jgone"}}'),
    "an error without end": forever(b"HTTP/1.1 500 Bad\r\n\r\n", b"x" * 65536),
    "an error, a byte at a time": forever(b"HTTP/1.1 400 Bad\r\n\r\n", b"x", 0.05),
    "an error of a chunk below zero": raw(CHUNKED.replace(b"200 OK", b"404 No") + b"-5\r\nx\r\n"),
    "an error that is a list": status(400, b'{"error": [1]}'),
    "a page that is not there": status(404, b""),
    "nobody may": status(401, b'{"message": "no key"}'),
    "too many requests": status(429, b"", **{"Retry-After": "1000000000"}),
}

# What a server may say of itself, of its drafts and in its answers.


def falling(name: str) -> Spoil:
    """A counter that is less each time that it is read."""
    reads = count()

    def changed(page: str) -> str:
        lines = page.split("\n")
        value = 10**6 - 1000 * next(reads)
        return "\n".join(f"{line.rpartition(' ')[0]} {value}" if line.startswith(name) else line for line in lines)

    return text("/metrics", changed)


def position(label: str) -> Spoil:
    return text("/metrics", lambda page: page.replace('position="1"', label))


Keys = tuple[str | int, ...]
CHOICE: Keys = ("choices", 0)
DRAFTED: Keys = ("metrics", "speculative_decoding")
LOGPROBS: Keys = (*CHOICE, "logprobs")
# Where each kind of server says the tokens of an answer, and what it counts.
TOKENS: dict[Dialect, Keys] = {
    "vllm": (*CHOICE, "token_ids"),
    "tensorrt_llm": (*CHOICE, "token_ids"),
    "sglang": ("output_ids",),
    "llamacpp": ("tokens",),
}
COUNTS: dict[Dialect, tuple[Keys, ...]] = {
    "vllm": ((*DRAFTED, "num_draft_tokens"),),
    "sglang": (("meta_info", "spec_verify_ct"), ("meta_info", "spec_num_proposed_drafts")),
    "tensorrt_llm": (("usage", "completion_tokens"),),
    "llamacpp": tuple(("timings", name) for name in ("draft_n", "draft_n_accepted", "predicted_n")),
    "openai": (("usage", "completion_tokens"),),
}
HISTOGRAMS: tuple[list[Any], ...] = ([-1, 2], [float("nan")], ["1"], [0] * 10**5)
NO_HISTOGRAM = {"spec_correct_drafts_histogram": None, "spec_num_correct_drafts": HUGE}
AVERAGES = (float("nan"), float("inf"), 0, -1, 1e-320, 1e-9, 16, 1e9)
CHOICES: tuple[Dialect, ...] = ("vllm", "tensorrt_llm", "openai")  # that answer in these
# Kinds of servers, what their answers say, instead of what.
LIES: tuple[tuple[tuple[Dialect, ...], str, Any, Keys], ...] = (
    *(
        (("vllm",), f"a histogram {str(odd)[:30]}", odd, (*DRAFTED, "acceptance_histogram"))
        for odd in (*HISTOGRAMS, [float("inf")], [True], [0, 0, 0, HUGE], [50, 0, 0, 0], [0, 0, 0, 50])
    ),
    (("vllm",), "fewer drafted than accepted", 1, (*DRAFTED, "num_draft_tokens")),
    (("vllm",), "another prompt", [1, 2, 3], (*CHOICE, "prompt_token_ids")),
    *(
        (("sglang",), f"a histogram {str(odd)[:30]}", odd, ("meta_info", "spec_correct_drafts_histogram"))
        for odd in (*HISTOGRAMS, [HUGE, 0])
    ),
    (("sglang",), "no histogram, and more than was given", lambda meta: meta | NO_HISTOGRAM, ("meta_info",)),
    (("sglang",), "meta_info that is a list", [1], ("meta_info",)),
    *((("tensorrt_llm",), f"an average of {n}", n, (*CHOICE, "avg_decoded_tokens_per_iter")) for n in AVERAGES),
    (("llamacpp",), "more accepted than drafted", 1, ("timings", "draft_n")),
    (("llamacpp",), "timings that are a list", [1], ("timings",)),
    (("llamacpp",), "tokens that are no list", {"a": 1}, ("tokens",)),
    (CHOICES, "choices that are no list", {"a": 1}, ("choices",)),
    (CHOICES, "a choice that is none", [7], ("choices",)),
    (CHOICES, "log-probabilities that are none", {"content": [{}]}, LOGPROBS),
    (CHOICES, "rows of log-probabilities that are none", {"content": [7]}, LOGPROBS),
)
# Of every kind of server, the text of an answer.
TEXTS: dict[str, Callable[[str], str]] = {
    "an answer without its end": lambda said: said[: len(said) // 2],
    "an error in an answer": lambda said: 'data: {"error": {"message": "\\u001b[2Jno"}}\n' + said,
    "an error of a megabyte": lambda said: f'data: {{"error": "{"x" * 900_000}"}}\n' + said,
    "an answer twice": lambda said: said.replace("data: [DONE]", "") + said,
}
COUNTERS = tuple(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
LABELS = (*(f'position="{value}"' for value in ("x", "-1", HUGE, "\u00b2", "")), 'place="1"')


def claims(dialect: Dialect) -> Iterator[tuple[str, Spoil]]:
    """What a server of a kind says wrongly."""
    for odd in (*ODD, "\x1b[2J", "x" * 10**5):
        yield f"a model called {str(odd)[:20]!r}", put(MODELS, odd, "data", 0, "id")
    yield "a list of models that is none", put(MODELS, {"a": 1}, "data")
    yield "models without end in a list", put(MODELS, [[]] * 10**5, "data")
    if dialect in ("vllm", "llamacpp"):
        yield from _of_metrics(dialect)
    if dialect in TOKENS:
        yield from _of_tokens(*TOKENS[dialect])
    for keys in COUNTS[dialect]:
        for odd in (*ODD, float("nan"), float("inf"), 1e300):
            # Without a value, many are figured out in another way.
            if odd is not None and not (keys[-1] == "spec_verify_ct" and odd in ([], {})):
                yield f"{keys[-1]} {str(odd)[:20]}", put(ANSWERS, odd, *keys)
    for dialects, name, value, keys in LIES:
        if dialect in dialects:
            yield name, put(ANSWERS, value, *keys)
    yield from ((name, text(ANSWERS, change)) for name, change in TEXTS.items())


def _of_metrics(dialect: Dialect) -> Iterator[tuple[str, Spoil]]:
    counters = [f"{dialect}:{name}" for name in (*COUNTERS, "spec_decode_num_accepted_tokens_per_pos_total")]
    if dialect == "vllm":
        counters += ["vllm:request_success_total", "vllm:generation_tokens_total"]
    for name in counters:
        yield from ((f"{name} {value!r}", metric(name, value)) for value in NUMBERS)
        yield f"{name} falls", falling(name)
    yield from ((f"a counter at {label}", position(label)) for label in LABELS)
    yield "a page of something else", text("/metrics", lambda page: "<html>")
    yield "a page of other counters", text("/metrics", lambda page: "other 1\n")


def _of_tokens(*keys: str | int) -> Iterator[tuple[str, Spoil]]:
    for odd in ODD:
        if odd != "7":
            yield f"a token {str(odd)[:20]}", put(ANSWERS, odd, *keys, 0)
    yield "a token of a megabyte", put(ANSWERS, "x" * 900_000, *keys, 0)
    yield "more tokens than were asked for", put(ANSWERS, lambda ids: [*ids, *range(5, 100)], *keys)
    yield "tokens by the hundred thousand", put(ANSWERS, lambda ids: [*ids, *[5] * 100_000], *keys)


# What is asked of a server.


def evaluated(url: str, folder: Path) -> dict[str, object]:
    """The figures of `eval --server`. Raises `DraftkitError` where it refuses."""
    printed = asked(
        "eval", "--server", url, "--target", "zoo:target", "--limit", 3, "--max-new-tokens", 16, "--k", K,
        "--concurrency", 2, "--json",
    )  # fmt: skip
    (cell,) = json.loads(printed)["cells"]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "output_tokens")
    return {name: cell[name] for name in names} | {"mean": cell["acceptance_length"]["mean"]}


def answered(url: str, folder: Path) -> Answer:
    """One answer with its log-probabilities, as `draftkit certify` asks for it."""
    return server_at(url).complete(Request("0", (5, 6), 9, alternatives=2), None)


def same_answer(found: Answer, honest: Answer) -> bool:
    """Log-probabilities may be missing, which the certificate says, and with them what they alone tell."""
    assert found.drafts is not None
    assert honest.drafts is not None
    positions = replace(found.drafts, num_accepted_tokens_per_pos=honest.drafts.num_accepted_tokens_per_pos)
    told = [
        (found.tokens, honest.tokens),
        (found.drafts.num_accepted_tokens_per_pos, honest.drafts.num_accepted_tokens_per_pos),
        (found.logprobs, honest.logprobs),
        *zip(found.alternatives or (), honest.alternatives or (), strict=bool(found.alternatives)),
    ]
    same = (positions, found.num_tokens) == (honest.drafts, honest.num_tokens)
    return same and all(not one or one == other for one, other in told)


def same_figures(found: dict[str, object], honest: dict[str, object]) -> bool:
    """What llama.cpp's counters tell is missing without them."""
    return found == honest or found == honest | {"num_accepted_tokens_per_pos": None}


ROWS = "".join(json.dumps({"id": str(n), "prompt": f"question {n}"}) + "\n" for n in range(4))


def regenerated(url: str, folder: Path) -> dict[str, object]:
    """The answers, by row, of `data regenerate --endpoint`, of which the first two were there before."""
    prompts, out = folder / "prompts.jsonl", folder / "out.jsonl"
    common = ("--target", "zoo:target", "--max-new-tokens", 8)
    with CompletionsServer(completion) as honest:
        prompts.write_text("".join(ROWS.splitlines(True)[:2]))
        command("data", "regenerate", prompts, out, *common, "--endpoint", honest.endpoint)
    before, _ = out.read_text(), prompts.write_text(ROWS)
    try:
        asked("data", "regenerate", prompts, out, *common, "--endpoint", f"{url}/v1")
    finally:
        if not out.read_text().startswith(before):
            raise Lost("rows that were there before are gone")
    rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    return {row["id"]: row["sequences"] for row in rows if "refused" not in row}


def same_rows(found: dict[str, object], honest: dict[str, object]) -> bool:
    """A row that the server rejects is stored as refused, with the reason."""
    return found.items() <= honest.items()


def completion(body: dict[str, object]) -> tuple[int, dict[str, object]]:
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    ids = [(sum(prompt) + at) % 97 + 5 for at in range(int(str(body["max_tokens"])))]
    return 200, {"choices": [{"index": 0, "text": "x", "token_ids": ids, "prompt_token_ids": prompt}]}


# The cases.


def cases(corpus: Path) -> Iterator[Case]:
    server.LIMITS = endpoints.LIMITS = Limits(silence=1.0, page=1.5, answer=2.0, bytes=1 << 20, events=2000)
    endpoints.PAUSES = (0.0, 0.0, 0.0)
    served.SETTLING = 0.1
    found = [*_evaluations(corpus), *_answers(corpus), *_regenerations(corpus), *_hubs()]
    random.Random(0).shuffle(found)  # so that the first cases are of every kind
    return iter(found)


def _evaluations(corpus: Path) -> Iterator[Case]:
    for dialect in DIALECTS:
        honest = honestly(dialect, evaluated, corpus)
        spoils = list(claims(dialect))
        if dialect == "vllm":
            spoils += [
                (f"{place}: {name}", at(place, act)) for name, act in TRANSPORT.items() for place in (MODELS, ANSWERS)
            ]
            spoils += [(f"/metrics: {name}", at("/metrics", act)) for name, act in list(TRANSPORT.items())[::4]]
        for name, spoil in spoils:
            yield f"eval of {dialect}: {name}", against(dialect, spoil, evaluated, honest, same_figures)


def _answers(corpus: Path) -> Iterator[Case]:
    numbers: tuple[Any, ...] = (float("nan"), float("inf"), -float("inf"), 5.0, "x", None, [], {"a": 1})
    columns = ("tokens", "token_logprobs", "top_logprobs")
    places: dict[Dialect, list[Keys]] = {
        "vllm": [(*LOGPROBS, name) for name in columns],
        "openai": [(*LOGPROBS, name) for name in columns],
        "sglang": [("meta_info", "output_top_logprobs"), ("meta_info", "output_top_logprobs", 0)],
        "llamacpp": [("completion_probabilities", 0, "logprob"), ("completion_probabilities", 0, "top_logprobs")],
    }
    for dialect, keys in places.items():
        honest = honestly(dialect, answered, corpus)
        for path in keys:
            for value in numbers:
                spoil = put(ANSWERS, [value] if path[-1] in columns and value is not None else value, *path)
                name = f"an answer of {dialect}: {path[-1]} {value}"
                yield name, against(dialect, spoil, answered, honest, same_answer)


def _regenerations(corpus: Path) -> Iterator[Case]:
    (corpus / "rows").mkdir()
    with CompletionsServer(completion) as server:
        honest = regenerated(server.endpoint.removesuffix("/v1"), corpus / "rows")
    spoils = [(name, at(ANSWERS, act)) for name, act in list(TRANSPORT.items())[1::3]]
    spoils += _of_tokens("choices", 0, "token_ids")
    spoils += [("another prompt", put(ANSWERS, [1], "choices", 0, "prompt_token_ids"))]
    for name, spoil in spoils:
        yield f"regenerate: {name}", against(None, spoil, regenerated, honest, same_rows)


def honestly(dialect: Dialect, measure: Measure, corpus: Path) -> object:
    with SpeakingServer(dialect, simulated(K), K) as server:
        return measure(server.url, corpus)


def against(
    dialect: Dialect | None, spoil: Spoil, measure: Measure, honest: object, agrees: Agrees = operator.eq
) -> Callable[[Path], None]:
    """A case: what is measured of the spoiled server is what the honest one gives; `dialect` None: one of rows."""

    def run(folder: Path) -> None:
        with ExitStack() as stack:
            if dialect is None:
                upstream = stack.enter_context(CompletionsServer(completion)).endpoint
            else:
                upstream = stack.enter_context(SpeakingServer(dialect, simulated(K), K)).url
            server = stack.enter_context(HostileServer(upstream, spoil))
            try:
                found = measure(server.url, folder)
            finally:
                check_threads_end()
        if not agrees(found, honest):
            raise Silent(f"measured {found},\ninstead of {honest}")

    return run


def check_threads_end() -> None:
    """What waits for an answer ends with the command: a process waits for its threads. Raises `Hang`."""
    until = time.monotonic() + PATIENCE
    while waiting := [thread.name for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]:
        if time.monotonic() > until:
            raise Hang(f"still waiting for the server: {waiting}")
        time.sleep(0.01)


# The Hub's client reads its environment when it is imported: each of these has a process.

LOCATE = """
import sys
from draftkit.errors import DraftkitError
from draftkit.hub.locate import locate
try:
    locate("org/draft")
except DraftkitError as error:
    sys.exit(f"error: {error}")
"""


def _hubs() -> Iterator[Case]:
    for path in ("/api/", "/resolve/.*config", "/resolve/.*safetensors"):
        for code in (301, 302, 307, 308):
            yield f"a Hub that redirects {path} with {code}", of_hub(path, code)


def of_hub(path: str, code: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        (folder / "draft").mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / "draft" / name).write_text("{}")
        with (
            HubServer({"org/draft": folder / "draft"}) as hub,
            HostileServer(hub.endpoint) as other,
            HostileServer(
                hub.endpoint, at(path, lambda it: it.send(code, b"", {"Location": other.url + it.path}))
            ) as server,
        ):
            settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_secret"}
            quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
            done = subprocess.run(
                [sys.executable, "-c", LOCATE], env=os.environ | settings | quiet, cwd=ROOT, capture_output=True,
                text=True, timeout=50, check=False,
            )  # fmt: skip
            if any(authorization for _, _, authorization in other.asked):
                raise Lost(f"the token went elsewhere: {other.asked}")
        if done.returncode and "error: " not in done.stderr:
            raise AssertionError(done.stderr)
        if done.returncode:
            raise SourceError(done.stderr[done.stderr.index("error: ") :])

    return run


if __name__ == "__main__":
    main(__doc__, cases)
