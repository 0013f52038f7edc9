"""Tokenizers and chat templates as they come: what fails in them is one message, and what would not end is ended."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftkit.errors import FormatError, TargetError, native_failures
from draftkit.io.jsonfile import read_object
from draftkit.layout.target import require_whole_model
from draftkit.targets.pretrained import remote_code_hint, trusts_remote_code

RENDER_SECONDS = 10.0  # of processor time for one conversation, which takes milliseconds
OLD_TEMPLATE = "chat_template.json"  # where processors kept it, and tokenizers do not look
RENDER_CHARACTERS = 100_000_000
# What a template does with a conversation that it was not written for: its own errors, and those of Python's operators.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class TemplateRejection(TargetError):
    """The template raised an error for these messages; the text is the template's."""


def load_tokenizer(folder: str | Path, of: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, which belongs to `of`. Raises `TargetError` where none can be loaded."""
    try:
        with native_failures(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_remote_code())
    except TargetError:
        raise
    except Exception as error:  # a damaged tokenizer.json fails in many types, the bare Exception among them
        require_whole_model(Path(folder))  # which may have a tokenizer, and serve for that
        first = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise TargetError(
            f"the {of} has no tokenizer that transformers can load: {first}",
            where=folder,
            expected="tokenizer.json, or what AutoTokenizer reads",
            hint=remote_code_hint(error) or "copy the tokenizer files of the original model into the folder",
        ) from error
    of_processor = Path(folder) / OLD_TEMPLATE
    if tokenizer.chat_template is None and of_processor.is_file():
        tokenizer.chat_template = read_object(of_processor).get("chat_template")
    return tokenizer


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, object]], **settings: Any) -> Any:
    """What `apply_chat_template` makes of a conversation: text, unless `settings` ask for tokens.

    Raises `TemplateRejection` for messages that the template does not take, `TargetError` for a template that does not
    come to an end.
    """
    with _limited(tokenizer.name_or_path), native_failures(tokenizer.name_or_path):
        try:
            rendered = tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **settings})
        except TEMPLATE_ERRORS as error:
            raise TemplateRejection(str(error) or type(error).__name__) from error
    if isinstance(rendered, str) and len(rendered) > RENDER_CHARACTERS:
        raise TargetError(f"the chat template writes {len(rendered):,} characters", where=tokenizer.name_or_path)
    return rendered


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A digest of the chat template, None where there is none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer adds itself where `special`.

    Raises `FormatError` for text with half of a surrogate pair, `TargetError` where the tokenizer's own code fails.
    """
    try:
        with native_failures(tokenizer.name_or_path):
            return list(tokenizer(text, add_special_tokens=special).input_ids)
    except (TypeError, UnicodeError) as error:
        raise FormatError(f"this text cannot be tokenized: {text[:60]!r}", expected="valid Unicode") from error


@contextmanager
def _limited(where: object) -> Iterator[None]:
    """End what runs for too long. Only the main thread can be interrupted; elsewhere nothing is bounded."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TargetError(
            f"the chat template does not come to an end: {RENDER_SECONDS:g} s for one conversation",
            where=where,
            hint="use the template of the original model",
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
