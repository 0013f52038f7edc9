"""Runs the cases of an attack and counts how they end; every script here hands its own to `main`.

A case is a name and a function of an empty folder. It ends well where it returns, and where draftkit refuses with a
`DraftkitError`, so that a case which must be refused raises `Silent` after the call. Hangs, and whatever else escapes,
are counted too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from fixtures.fuzzing.judge import check_message, command
from fixtures.fuzzing.robust import Hang, sandbox, time_limit

from draftkit.errors import DraftkitError

Case = tuple[str, Callable[[Path], object]]
ENDINGS = ("silent", "lost", "hangs", "tracebacks")


class Silent(Exception):
    """Something wrong was taken for right, without a word."""


class Lost(Exception):
    """Something that was there before is gone, or is not as it was."""


def asked(*words: object) -> str:
    """What a command prints. Raises `DraftkitError` with its message if it refuses."""
    code, out, err = command(*words)
    if code:
        raise DraftkitError(err[err.index("error: ") + len("error: ") :])
    return out


def main(doc: str | None, cases: Callable[[Path], Iterable[Case]], default: int | None = None) -> None:
    """Runs a script, whose `cases` make their sound inputs in a folder first and may be endless.

    Prints each case that ends badly and one last line of counts; the exit code is 1 where one did, else 0. `default`:
    how many cases are run without `--cases`; None for all.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=default, help="the first N; default: %(default)s")
    parser.add_argument("--case", type=int, help="only the one of this number")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place, sandbox():
        corpus, folder = Path(place, "corpus"), Path(place, "case")
        corpus.mkdir()
        for number, (name, run) in enumerate(islice(cases(corpus), options.cases)):
            if options.case not in (None, number):
                continue
            folder.mkdir()
            ending, said = _ending(run, folder)
            shutil.rmtree(folder)
            counts.update(("cases", ending))
            if ending in ENDINGS:
                print(f"{number}: {name}: {ending}\n{said}", flush=True)
    print(f"{counts['cases']} cases: " + ", ".join(f"{counts[ending]} {ending}" for ending in ENDINGS))
    sys.exit(any(counts[ending] for ending in ENDINGS))


def _ending(run: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    try:
        with time_limit():
            try:
                run(folder)
            except DraftkitError as refusal:
                check_message(str(refusal))
                return "refused", ""
    except Silent as error:
        return "silent", str(error)
    except Lost as error:
        return "lost", str(error)
    except (Hang, subprocess.TimeoutExpired) as error:
        return "hangs", str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # as a panic in Rust is
        return "tracebacks", traceback.format_exc(limit=-12, chain=False)
    return "accepted", ""
