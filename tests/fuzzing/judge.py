"""What must hold of every case, whatever the input: a verified success, or one message and nothing left behind."""

from __future__ import annotations

import io
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import ClassVar

from robust import LONGEST_MESSAGE, time_limit

from draftkit.cli import main
from draftkit.errors import DraftkitError


class Kind(ABC):
    """A kind of input. `share`: how many cases it gets for one of the others.

    `run` makes a case of random numbers in an empty folder and returns whether draftkit accepted it. What must not be
    escapes as an exception: a `Hang`, an `AssertionError` for a wrong outcome, anything that draftkit let through.
    """

    share: ClassVar[float] = 1.0

    def __init__(self, corpus: Path):
        self.corpus = corpus

    @abstractmethod
    def run(self, rng: random.Random, folder: Path) -> bool: ...


def refusal(verb: Callable[..., object], *arguments: object, **options: object) -> DraftkitError | None:
    """The error of a call that draftkit may refuse, None where it came back."""
    with time_limit():
        try:
            verb(*arguments, **options)
        except DraftkitError as error:
            check_message(str(error))
            return error
    return None


def command(*arguments: object) -> tuple[int, str, str]:
    """Exit code and streams of the command, as a terminal in UTF-8 would get them; 0 or, with one message, 1."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    before, sys.argv = sys.argv, ["draftkit", *map(str, arguments)]
    code: object = 0
    try:
        with time_limit(), redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as exit:
                code = exit.code or 0
    finally:
        sys.argv = before
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    assert code in (0, 1), (code, texts)
    if code == 1:
        assert not texts[0], f"refused, and still printed {texts[0]}"
        message = texts[1][texts[1].index("error: ") :]
        check_message(message)
    return int(code == 1), texts[0], texts[1]


def check_message(message: str) -> None:
    assert message.strip()
    assert len(message) <= LONGEST_MESSAGE
    assert "Traceback" not in message


def check_clean(folder: Path, *expected: str) -> None:
    """Only what was expected lies in a folder."""
    assert sorted(os.listdir(folder)) == sorted(expected), f"left behind: {sorted(os.listdir(folder))}"
