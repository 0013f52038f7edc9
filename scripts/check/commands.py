"""Do the commands of another commit still parse? Those of its README, docs and examples in help.

`python -m scripts.check.commands REV` prints each command that the present command line refuses, with the reason, and
last how many it takes. Nothing is run, and the exit code is 0: the note of a change names what is gone on purpose.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import typer
import typer.main

from draftkit.cli import app
from scripts._bench import arguments

PAGES = ("README.md", "docs", "model_cards", "draftkit/cli")
ENDS = re.compile(r"\s+#.*|`.*|\s*[|>&]\s.*|\s*\\$")  # a comment, the end of code in a sentence, what a shell does


def commands_of(revision: str) -> Iterator[str]:
    """What follows `draftkit` on a line of code, or in code within a sentence."""
    found = subprocess.run(
        ["git", "grep", "-hE", r"draftkit [a-z]+", revision, "--", *PAGES], capture_output=True, text=True, check=True
    ).stdout
    for line in found.splitlines():
        for words in re.findall(r"(?:^\s*|`|\"|\$ )draftkit ([a-z][^\"]*)", line):
            yield ENDS.sub("", words).strip()


def refusal(words: list[str]) -> str | None:
    """Why the command line refuses a command; None for one that it takes."""
    command, context = typer.main.get_command(app), None
    while True:
        try:
            name = words[0] if words else ""
            inner = getattr(command, "commands", None)
            if inner is None:
                with command.make_context(command.name, list(words), parent=context):
                    return None
            if name not in inner:
                return f"no command {name}"
            context = command.make_context(command.name, [name], parent=context, resilient_parsing=True)
            command, words = inner[name], words[1:]
        except typer.Exit:
            return None
        except Exception as error:  # a usage error of the parser, which Typer vendors
            return getattr(error, "message", str(error)) or type(error).__name__


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("revision", metavar="REV")
    taken, commands = 0, sorted(set(commands_of(parser.parse_args().revision)))
    for text in commands:
        try:
            why = refusal(shlex.split(text))
        except ValueError:
            why = "not whole"
        taken += why is None
        if why is not None:
            print(f"{text}\n    {why}")
    print(f"{taken} of {len(commands)} are taken")


if __name__ == "__main__":
    main()
