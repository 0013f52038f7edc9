"""What several scripts do: read arguments, say what was measured where, keep what is done, print a table."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from rich.console import Console
from rich.table import Table

from draftkit.evaluate.job import processor
from draftkit.io.atomic import write_file

ROOT = Path(__file__).resolve().parents[1]
Found = TypeVar("Found")


def arguments(doc: str | None, *, vllm: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring. `vllm`: the script needs an environment with vLLM."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if vllm:
        parser.add_argument("--vllm-python", required=True, help="the Python of an environment with vLLM")
    return parser


def commit() -> str:
    """The commit of this checkout, with a `+` if files have changed since."""
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    ran = subprocess.run(described, capture_output=True, text=True, check=False, cwd=ROOT)
    return ran.stdout.strip() or "unknown"


def stamp() -> str:
    """Day, commit, processor and versions, for the title of a table."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{datetime.now(UTC).date().isoformat()}, commit {commit()}, {processor()}, {versions}"


def kept(file: Path | None, make: Callable[[], Found]) -> Found:
    """The JSON of `file`. If there is none, what `make` returns is written to it."""
    if file is not None and file.exists():
        found: Found = json.loads(file.read_text(encoding="utf-8"))
        return found
    made = make()
    if file is not None:
        write_file(file, json.dumps(made).encode())
    return made


def show(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=160).print(table)
