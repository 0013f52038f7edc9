"""The failures that a user can act on.

The command line prints one of these as one short message and exits with code 1; anything else that escapes is a bug.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LINES = 100
MAX_LINE_LENGTH = 500
ELSEWHERE = "draftkit eval --engine vllm measures drafts for it through vLLM alone"
LAST_LINES = 30  # of what another program has printed


class DraftkitError(Exception):
    """A known failure: what happened, and, where they are known, the place, what was expected and the next step.

    `where` names a file, tensor or key; `hint` is an instruction, preferably a command. Quoted values and lists of
    problems may have any length: the message is cut.
    """

    def __init__(self, what: str, *, where: object = None, expected: str | None = None, hint: str | None = None):
        lines = _short(what)
        for label, text in (("where", where), ("expected", expected), ("next", hint)):
            if text is not None:
                lines += _short(f"  {label}: {text}")
        super().__init__("\n".join(lines))


def _short(text: str) -> list[str]:
    lines = [line if len(line) <= MAX_LINE_LENGTH else f"{line[:MAX_LINE_LENGTH]} …" for line in text.split("\n")]
    left_out = len(lines) - MAX_LINES
    return lines if left_out <= 0 else [*lines[:MAX_LINES], f"    … and {left_out:,} lines more"]


def command(*words: object) -> str:
    """A command line that a shell takes as it is printed: words with spaces or quotes are quoted."""
    return shlex.join(map(str, words))


class SettingError(DraftkitError):
    """A setting outside its range, or one that does not go with another.

    `setting` is the name that the Python API has for it; the command line answers with its own option for that.
    """

    def __init__(self, what: str, setting: str, *, expected: str | None = None, hint: str | None = None):
        super().__init__(what, expected=expected, hint=hint)
        self.setting = setting


def require_setting(fine: bool, setting: str, value: object, expected: str) -> None:
    """Raise `SettingError` for a value that is not `fine`."""
    if not fine:
        raise SettingError(f"{setting} is {value!r}", setting, expected=expected)


def require_count(setting: str, value: object, *, least: int = 1) -> None:
    """Raise `SettingError` for what is no whole number of at least `least`."""
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require_setting(fine, setting, value, f"a whole number from {least} on")


class SourceError(DraftkitError):
    """A checkpoint, repository or file that cannot be reached: missing, gated, offline, no network."""


class FormatError(DraftkitError):
    """A file that is not what it claims to be, or a checkpoint of no known format."""


class UnsafeFileError(FormatError):
    """A file whose loading would run code."""


class LayoutError(DraftkitError):
    """A draft folder or plan whose tensors or facts disagree with its spec."""


class TargetError(DraftkitError):
    """A target that the draft does not fit, or that cannot be loaded."""


class UnsupportedTarget(TargetError):
    """A model that draftkit's own runtime does not run, where another engine may.

    `hint`: what makes it run nevertheless; where there is nothing, the message names vLLM, until `otherwise` says what
    to do for what was asked.
    """

    def __init__(self, problem: str, *, where: object = None, expected: str | None = None, hint: str | None = None):
        super().__init__(problem, where=where, expected=expected, hint=hint or ELSEWHERE)
        self.problem = problem
        self._place, self._expected, self._hint = where, expected, hint

    def otherwise(self, instead: str) -> UnsupportedTarget:
        """The same, saying what to do instead of what was asked."""
        return UnsupportedTarget(self.problem, where=self._place, expected=self._expected, hint=self._hint or instead)


class NonFiniteError(DraftkitError):
    """NaN or an infinity in weights, or in what a forward computes from finite ones."""


def last_words(log: Path) -> str:
    """The end of what another program has printed into a file, for an error that says that it failed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def out_of_device_memory(error: BaseException, doing: str, fewer: str) -> DraftkitError:
    """The error for a GPU whose memory did not suffice while `doing` something, with the sizes that torch names;
    `fewer`: what to do for fewer sequences at a time."""
    sizes = ". ".join(str(error).split(". ")[1:3]) or str(error)
    return DraftkitError(
        f"the device ran out of memory{doing and f' while {doing}'}: {sizes}",
        hint=f"{fewer and f'{fewer}, '}take shorter texts (--context, --max-new-tokens), or let the allocator's blocks "
        "grow: PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


@contextmanager
def native_failures(where: object = None) -> Iterator[None]:
    """Turn a panic of a tokenizer's Rust code, which is no `Exception`, into a `TargetError`, and a GPU's lack of
    memory into `out_of_device_memory`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
            fewer = "take fewer at a time (--concurrency; of train --set tokens_per_row)"
            raise out_of_device_memory(error, "", fewer) from error
        if type(error).__name__ != "PanicException":  # its module cannot be imported
            raise
        raise TargetError(
            f"the tokenizer's own code has failed: {error}",
            where=where,
            hint="a pattern in tokenizer.json is at fault, or this text is: fetch the tokenizer files again",
        ) from None


def in_one_line(error: Exception) -> str:
    """The kind of an error of another library, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:200]
