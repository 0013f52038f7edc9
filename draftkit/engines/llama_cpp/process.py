"""llama.cpp's server in a process of its own: started on a free port, and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftkit.engines.connections import Limits
from draftkit.engines.http import Api
from draftkit.errors import DraftkitError, SourceError, last_words

PATIENCE = 600.0  # seconds that a model may take to load
READY = Limits(silence=10.0, page=10.0)  # in which a server that is ready says so
# Arguments with which the server computes in float32 throughout, as draftkit does; its caches are float16 otherwise.
EXACT = ("-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")


@contextmanager
def llama_server(binary: Path, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run `llama-server` with these arguments until the body ends; yields its address. What it prints goes to `log`.

    Raises `DraftkitError` where there is no such program, and where it does not get ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "--host", "127.0.0.1", "--port", str(port), "--metrics", "--slots", *arguments]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise DraftkitError(
                f"{binary} cannot be run: {error.strerror}", hint="give the path of llama.cpp's llama-server"
            ) from error
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the models are loaded. Raises `DraftkitError` where the server ends, or takes too long."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with suppress(SourceError):
            Api(url, limits=READY, hint="").page("/health")
            return
        time.sleep(0.1)
    raise DraftkitError(f"llama-server does not start:\n{last_words(log)}", where=log)
