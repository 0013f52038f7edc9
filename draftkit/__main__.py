"""The `draftkit` command, and `python -m draftkit`: what is said of Ctrl-C before the commands are there to say it."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line, which takes a while, and run it."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # else it is ignored, as for a job in the background
        signal.signal(signal.SIGINT, _stop)
    from draftkit.cli import main as run

    signal.signal(signal.SIGINT, interrupted)
    run()


def _stop(number: int, frame: FrameType | None) -> None:
    """End at once: an exception in the middle of an import would be a traceback."""
    os.write(2, b"\nstopped; nothing was begun\n")
    os._exit(130)


if __name__ == "__main__":
    main()
