"""How full `data regenerate` keeps servers, and that a killed run answers each row exactly once.

`PYTHONPATH=tests python -m scripts.bench.generation [--rows 20] [--kills 20000] [--bare]`

A server in a process of its own has 64 slots at 1 ms a token, or 256 at 4 ms; answers have 256 tokens, or lognormally
many (median 256, σ = 1). Printed is how many requests were at the server, averaged over time from the first until the
last row was sent, as a share of `--concurrency`. `--rows`: times the slots. Then so many rows are answered by a run
that is killed twice, and each must be in the file once, with the answer that belongs to it. Needs a machine that does
nothing else: where client and server wait for a core, slots are empty. `--bare` asks without rendering, reading or
writing rows, which tells what HTTP alone does.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from fixtures.servers.slots_server import fixed, lognormal

from draftkit.data.endpoints import EndpointResponder
from draftkit.data.regenerate import row_seed
from draftkit.data.responses import RowPrompt, Sampling
from draftkit.requests import SamplingParameters

SIZES = ((64, 1.0), (256, 4.0))  # slots, milliseconds a token
LENGTHS = {"fixed": fixed, "lognormal": lognormal}
MOST = 8192  # tokens of an answer


@contextmanager
def served(slots: int, token_ms: float, lengths: str) -> Iterator[str]:
    """The endpoint of a server in its own process."""
    words = ("--slots", slots, "--token-ms", token_ms, "--lengths", lengths)
    with subprocess.Popen(
        [sys.executable, "-m", "fixtures.servers.slots_server", *map(str, words)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def regenerate(prompts: Path, out: Path, endpoint: str, concurrency: int) -> list[str]:
    return [
        sys.executable, "-m", "draftkit", "data", "regenerate", str(prompts), str(out), "--target", "zoo:target",
        "--endpoint", endpoint, "--concurrency", str(concurrency), "--temperature", "1", "--json",
        "--max-new-tokens", str(MOST),
    ]  # fmt: skip


def written(folder: Path, rows: int) -> Path:
    path = folder / f"{rows}.jsonl"
    path.write_text("".join(json.dumps({"id": f"{n}", "prompt": f"question {n}"}) + "\n" for n in range(rows)))
    return path


def ask(endpoint: str, rows: int, concurrency: int) -> None:
    """Ask without rows, for what HTTP alone does."""
    responder = EndpointResponder(endpoint, Sampling(SamplingParameters(1.0), MOST, frozenset({7})), concurrency)
    left = (RowPrompt(str(n), tuple(range(12)), row_seed(0, str(n), 0)) for n in range(rows))
    for _ in responder.respond(lambda: next(left, None)):
        pass


def busy(folder: Path, times: int, bare: bool) -> None:
    for slots, token_ms in SIZES:
        for lengths in LENGTHS:
            rows = times * slots
            with served(slots, token_ms, lengths) as endpoint:
                began = time.perf_counter()
                if bare:
                    ask(endpoint, rows, slots)
                else:
                    out = folder / f"{slots}-{lengths}.jsonl"
                    command = regenerate(written(folder, rows), out, endpoint, slots)
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                took = time.perf_counter() - began
                found = json.load(urlopen(endpoint.replace("/v1", "/busy")))
            print(
                f"{slots} slots at {token_ms:g} ms, {lengths}: {found['requests']} requests, "
                f"{found['mean'] / slots:.1%} of {slots} there from the first to the last, {took:.1f} s in all",
                flush=True,
            )


def killed(folder: Path, rows: int) -> None:
    prompts, out = written(folder, rows), folder / "killed.jsonl"
    with served(64, 1.0, "lognormal") as endpoint:
        command = regenerate(prompts, out, endpoint, 64)
        for part in (1 / 3, 2 / 3):
            with subprocess.Popen(command) as run:
                while run.poll() is None and lines(out) < part * rows:
                    time.sleep(0.2)
                run.send_signal(signal.SIGKILL)
            print(f"killed at {lines(out):,} rows of {rows:,}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        asked = json.load(urlopen(endpoint.replace("/v1", "/busy")))["requests"]
    found = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    wrong = sum(not _is_its_own(row) for row in found)
    once = len(found) == len({row["id"] for row in found}) == rows
    print(f"{len(found):,} rows, each once: {once}; with another answer: {wrong}; {asked - rows:,} were asked again")
    if wrong or not once:
        sys.exit(1)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def _is_its_own(row: dict[str, list[dict[str, list[list[int]]]]]) -> bool:
    (sequence,) = row["sequences"]
    ((begin, end),) = sequence["supervised"]
    return end - begin == max(min(lognormal(row_seed(0, str(row["id"]), 0)), MOST), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20_000)
    parser.add_argument("--bare", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.rows:
            busy(Path(folder), given.rows, given.bare)
        if given.kills:
            killed(Path(folder), given.kills)


if __name__ == "__main__":
    main()
