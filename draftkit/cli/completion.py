"""What the shell completes, without a network and without anything slow to import.

Bash ends a word at a colon and at an equals sign, so that of `zoo:eag` typer sees three; `join_words` puts such words
together again.
"""

from __future__ import annotations

import os
import re

_typed = ""  # of the word that is completed: what bash keeps, as `zoo:`


def models() -> list[str]:
    """The embedded models, as `zoo:target`; without what bash keeps of the word."""
    from draftkit import zoo

    names = [f"zoo:{name}" for name in zoo.names()]
    return [name.removeprefix(_typed) for name in names if name.startswith(_typed)]


def drafts() -> list[str]:
    """The embedded models, and the drafts without a checkpoint."""
    from draftkit.layout.families import families

    return [*models(), "mtp", *(name for name, family in families().items() if not family.has_checkpoint)]


def facts() -> list[str]:
    """What `convert --set` takes, of drafts of any family."""
    from draftkit.io.settings import settings_of
    from draftkit.layout.facts import PATHS
    from draftkit.layout.families import families

    names = {one.name.rpartition(".")[2] for family in families().values() for one in settings_of(family)}
    return sorted(f"{name}=" for name in names | PATHS.keys())


def engines() -> list[str]:
    """The engines that have settings, and draftkit's own."""
    from draftkit.evaluate.options import ENGINE_SETTINGS

    return ["draftkit", *(settings.engine for settings in ENGINE_SETTINGS)]


def evaluation_settings() -> list[str]:
    """What `eval --set` takes."""
    from draftkit.evaluate.options import settable_settings

    return sorted(f"{one.name}=" for one in settable_settings())


def training_settings() -> list[str]:
    """What `train --set` takes, but for the options of single recipes."""
    from draftkit.io.settings import settings_of
    from draftkit.train.config import TrainConfig

    return sorted(f"{one.name}=" for one in settings_of(TrainConfig))


def join_words() -> None:
    """Let typer see words as they were typed where bash, which asks for a completion, has split them."""
    global _typed
    line, at = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if os.environ.get("_DRAFTKIT_COMPLETE") != "complete_bash" or not at.isdigit():
        return
    joined = re.sub(r"\n([:=])(?:\n|$)", r"\1", line)  # typer's script gives a line to each word
    before, newline, word = joined.rpartition("\n")
    last = line.rpartition("\n")[2].strip(":=") if joined != line else word
    _typed = word.removesuffix(last)
    os.environ["COMP_WORDS"] = f"{before}{newline}{last}"
    os.environ["COMP_CWORD"] = str(int(at) - (line.count("\n") - joined.count("\n")))
