"""Text for the embedded models: the Python standard library's own sources, as files and as conversations.

Everything here is deterministic for one Python version: files are visited in sorted order and every random
choice comes from a seeded generator that is passed in.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Some distributions package `test`, `idlelib` and `tkinter` separately; generated tables teach nothing.
SKIPPED = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "encodings", "__pycache__"}
HELD_OUT_PERCENT = 10
MAX_RESPONSE = 1200  # characters
CATEGORIES = ("function", "method", "complete", "docstring", "class", "imports", "explain", "edit")


@dataclass(frozen=True)
class Example:
    """One question with the answer found in the sources."""

    category: str
    question: str
    answer: str


def source_files() -> list[Path]:
    """All standard library sources that every installation has, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.name != "topics.py")


def is_held_out(path: Path) -> bool:
    """Whether a file is kept out of training; decided by its name, so that it is stable across Python versions."""
    return hashlib.sha256(path.name.encode()).digest()[0] % 100 < HELD_OUT_PERCENT


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def topics() -> dict[str, str]:
    """The language reference as shipped for `help()`: topic name to text."""
    from pydoc_data.topics import topics as shipped

    return shipped


def examples_of_file(path: Path) -> Iterator[Example]:
    """Questions about one source file, with the file's own code as the answers."""
    source = read(path)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.split("\n")
    yield from _imports_example(lines, tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from _function_examples(lines, node, owner=None)
        elif isinstance(node, ast.ClassDef):
            yield from _class_example(lines, node)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield from _function_examples(lines, member, owner=node.name)


def examples_of_topics(held_out: bool) -> Iterator[Example]:
    """Questions about the language reference; every seventh topic is held out."""
    for index, (name, text) in enumerate(sorted(topics().items())):
        if (index % 7 == 6) == held_out:
            title = text.strip().split("\n", 1)[0]
            yield Example("explain", f"Explain {name}: {title}", _clip(text.strip()))


def _summary(node: ast.AST) -> str:
    doc = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    return " ".join(doc.split("\n\n", 1)[0].split())[:240]


def _clip(text: str) -> str:
    """Cut a text to at most MAX_RESPONSE characters, at a line end."""
    if len(text) <= MAX_RESPONSE:
        return text
    return text[: text.rfind("\n", 0, MAX_RESPONSE)]


def _segment(lines: list[str], node: ast.stmt) -> str:
    """The whole lines of a statement, dedented. (`ast.get_source_segment` splits the file anew at every call.)"""
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip("\n")


def _function_examples(source: list[str], node: ast.FunctionDef, owner: str | None) -> Iterator[Example]:
    code = _segment(source, node)
    lines = code.split("\n")
    if len(lines) < 4 or len(code) > MAX_RESPONSE:
        return
    signature = f"{node.name}({ast.unparse(node.args)})"
    summary = _summary(node)
    if owner is None:
        yield Example("function", f"Write the Python function `{signature}`. {summary}".strip(), code)
    else:
        yield Example("method", f"Write the method `{signature}` of the class `{owner}`. {summary}".strip(), code)
    half = len(lines) // 2
    yield Example("complete", "Complete this code:\n\n" + "\n".join(lines[:half]), "\n".join(lines[half:]))
    if summary:
        yield from _docstring_examples(code, node)


def _docstring_examples(code: str, node: ast.FunctionDef) -> Iterator[Example]:
    """Two tasks on a documented function: write its docstring, and remove it."""
    first, second = node.body[0], node.body[1] if len(node.body) > 1 else None
    if second is None or first.end_lineno is None:
        return
    lines = code.split("\n")
    start, end = first.lineno - node.lineno, first.end_lineno - node.lineno + 1
    bare = "\n".join(lines[:start] + lines[end:])
    doc = textwrap.dedent("\n".join(lines[start:end]))
    if bare.strip() and doc.strip():
        yield Example("docstring", f"Write a docstring for this function:\n\n{bare}", doc)
        yield Example("edit", f"Remove the docstring from this function:\n\n{code}", bare)


def _class_example(source: list[str], node: ast.ClassDef) -> Iterator[Example]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"{node.name}({bases})" if bases else node.name
    code = _clip(_segment(source, node))
    if code.count("\n") >= 3:
        yield Example("class", f"Write the Python class `{head}`. {_summary(node)}".strip(), code)


def _imports_example(source: list[str], tree: ast.Module) -> Iterator[Example]:
    statements = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    summary = _summary(tree)
    if summary and len(statements) >= 3:
        code = "\n".join(_segment(source, node) for node in statements)
        yield Example("imports", f"Write the imports of this module: {summary}", _clip(code))


def training_texts(chat: Callable[[str, str], str], rng: random.Random) -> list[str]:
    """Training documents: every file once as text, and every example once as a conversation.

    `chat(question, answer)` renders a conversation with the target's template.
    """
    files = [path for path in source_files() if not is_held_out(path)]
    documents = [read(path) for path in files]
    kept = [text for index, (_, text) in enumerate(sorted(topics().items())) if index % 7 != 6]
    conversations = [chat(e.question, e.answer) for path in files for e in examples_of_file(path)]
    conversations += [chat(e.question, e.answer) for e in examples_of_topics(held_out=False)]
    texts = documents + kept + conversations
    rng.shuffle(texts)
    return texts


def held_out_examples() -> list[Example]:
    """Every example of the held-out files and topics, in a fixed order."""
    files = [path for path in source_files() if is_held_out(path)]
    found = [example for path in files for example in examples_of_file(path)]
    return found + list(examples_of_topics(held_out=True))
