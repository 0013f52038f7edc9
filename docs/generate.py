"""The reference pages, written from the code: commands, facts, settings, findings, result files, formats.

A Sphinx extension, so that a site cannot show another version than it is built from.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from failures import FAILURES, HOMES
from result_schema import result_schema
from sphinx.application import Sphinx

import draftkit
from draftkit.cli import app
from draftkit.cli.panels import EXAMPLES
from draftkit.convert.destinations import UNIFIED, VLLM, destination_of
from draftkit.convert.detect import all_formats
from draftkit.evaluate.options import OPTIONS, known_settings
from draftkit.finding import Finding
from draftkit.io.settings import without_none, words_of
from draftkit.layout.families import families
from draftkit.train.config import TrainConfig
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.settings import LoraSettings, Optimization, StreamSettings, Validation

PACKAGE = Path(draftkit.__file__).parent
ROOT = PACKAGE.parent
REPLACED = "…"  # for what a message says of the case at hand


# --- Pages


def commands() -> Iterator[str]:
    """Every command with its options, by topic as in its help."""
    yield "# Commands\n"
    yield "Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 known failure, 2 usage, 3 measured"
    yield "but below `--require-al`, 130 interrupted, 143 ended by SIGTERM, 129 by SIGHUP.\n"
    for name, command in _commands():
        context = command.make_context(name, [], resilient_parsing=True)
        yield f"## draftkit {name}\n"
        yield f"{_markdown(command.help or '')}\n"
        yield f"```sh\n{EXAMPLES[name]}\n```\n"
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                record = (re.sub(r"<list\[(\w+)\]>", r"<\1>…", record[0]), record[1])
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for panel, records in panels.items():
            yield f"**{panel}**\n"
            yield from _table(("", ""), ((f"`{flags}`", _markdown(text)) for flags, text in records))


def facts() -> Iterator[str]:
    """What `--set` takes of each family."""
    yield "# Facts of a draft\n"
    yield "What decides which tokens a draft proposes. `draftkit inspect` prints the facts of a checkpoint, and where"
    yield "each is from; `draftkit convert --set FACT=VALUE` says otherwise. Rope facts go by the names of config keys:"
    yield "`rope_theta`, `rope_scaling`, `max_position_embeddings`.\n"
    for name, cls in sorted(families().items()):
        yield from _record(f"{name}", cls)
        for inner in _inner(cls):
            yield from _record(f"{name}: {inner.__name__}", inner)


def settings() -> Iterator[str]:
    """What `--set` takes of a measurement, and of a training run with its file."""
    yield "# Settings\n"
    yield "`draftkit eval --settings` prints them too, `draftkit eval --settings NAME` one of them.\n"
    yield "## Measurements\n"
    yield "`draftkit eval` and `certify` take these with `--set NAME=VALUE`, or by their option.\n"
    rows = (
        (f"`{one.name}`", words_of(one.kind), OPTIONS.get(one.name, ""), _markdown(one.help), one.needs)
        for one in known_settings()
    )
    yield from _table(("name", "value", "option", "what for", "needs"), rows)
    yield "## Training\n"
    yield "`draftkit train --config RUN.yaml`, with `--set SETTING=VALUE` for single ones; `--dry-run` prints the"
    yield "resolved run.\n"
    for prefix, cls in (
        ("", TrainConfig), ("optimization.", Optimization), ("validation.", Validation), ("lora.", LoraSettings),
        ("stream.", StreamSettings),
    ):  # fmt: skip
        yield from _record(f"{prefix}…" if prefix else "The run", cls, prefix)
    for name in recipe_names():
        options = recipe_class(name).options_type
        yield from _record(f"options of {name}", options, "options.")
        for inner in _inner(options):
            yield from _record(f"{inner.__name__} of {name}", inner)


def findings() -> Iterator[str]:
    """What draftkit finds wrong or doubtful, read from the source."""
    yield "# Findings\n"
    yield "What `inspect`, `convert`, `eval`, `doctor` and `data check` say by name, what it costs to ignore it,"
    yield f"and what mends it. `{REPLACED}` stands for what depends on the case.\n"
    for room, rows in _all_findings().items():
        yield f"## {room}\n"
        for found in rows:
            yield f"### {found.name}\n"
            yield f"*{found.severity}.* {_markdown(found.message)}\n"
            for label, text in (("Cost", found.cost), ("Mended by", found.fix), ("Source", found.source)):
                if text:
                    yield f"- {label}: {_markdown(text)}"
            yield ""


def failures() -> Iterator[str]:
    """A gallery of what goes wrong, by what is seen of it."""
    yield "# A gallery of failures\n"
    yield "What others have met in public, by what is seen of it: the causes that draftkit knows, what each costs and"
    yield "what mends it, and the command that tells which it is. [All findings](findings.md) are listed by name.\n"
    causes = {one.name: one for rows in _all_findings().values() for one in rows}
    for failure in FAILURES:
        yield f"## {failure.symptom}\n"
        yield f"```sh\n{failure.do}\n```\n"
        if failure.tried:
            tried = ", ".join(f"`{name}`" for name in failure.tried)
            yield f"`doctor` also measures the draft again under each of {tried}.\n"
        known = [causes[name] for name in failure.findings]
        rows = ((_markdown(one.message), f"[{one.name}](findings.md#{one.name})", _mended(one)) for one in known)
        yield from _table(("cause", "finding", "what it costs, and what mends it"), rows)
        yield "In public: " + "; ".join(_thread(*thread) for thread in failure.threads) + ".\n"


def _mended(found: Finding) -> str:
    """What a finding costs and what mends it, as far as its check says."""
    cost = f"{_markdown(found.cost)}. " if found.cost else ""
    return cost + (f"Mended by: {_markdown(found.fix)}" if found.fix else "")


def _thread(name: str, reported: str) -> str:
    project, _, number = name.partition("#")
    link = f"[{name}](https://github.com/{HOMES[project]}/issues/{number})"
    return f"{link} ({reported})" if reported else link


def _all_findings() -> dict[str, list[Finding]]:
    """What draftkit can find, by the file that says it, read from the source."""
    found: dict[str, list[Finding]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        room = path.relative_to(PACKAGE).with_suffix("").as_posix()
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) >= 3)
        for node in sorted(calls, key=lambda call: call.lineno):
            if getattr(node.func, "id", "") == "Finding":
                said = {word.arg: word.value for word in node.keywords}
                name, severity, message = (_text(part, constants) for part in node.args[:3])
                if re.fullmatch(r"[a-z0-9-]+( / [a-z0-9-]+)*", name):
                    more = {part: _text(said.get(part), constants) for part in ("cost", "fix", "source")}
                    found.setdefault(room, []).append(Finding(name, typing.cast(Any, severity), message, **more))
    return found


def results() -> Iterator[str]:
    """The JSON that `eval --json` and `--out` write."""
    schema = result_schema()
    yield "# Result files\n"
    yield "Later versions add keys; readers pass over unknown ones, and null stands for what was not measured.\n"
    for name, part in {"Result": schema, **schema["$defs"]}.items():
        yield f"## {name}\n"
        yield f"{_markdown(part.get('description', ''))}\n"
        unsure = part["properties"].keys() - part["required"]
        rows = (
            (f"`{key}`", _kind(kind), "may be missing" if key in unsure else "")
            for key, kind in part["properties"].items()
        )
        yield from _table(("key", "type", ""), rows)


def formats() -> Iterator[str]:
    """What `draftkit inspect --formats` prints."""
    yield "# Formats\n"
    yield f"Every draft is also written `--to {UNIFIED}`, the default, and what vLLM runs `--to {VLLM}`.\n"
    rows = (
        (f"`{format.NAME}`", format.TITLE, f"`--to {destination}`" if (destination := destination_of(format)) else "")
        for format in all_formats()
    )
    yield from _table(("format", "what it is", "written by"), rows)


def api() -> Iterator[str]:
    """Every public name of the package, by what it is for."""
    yield "# Python\n"
    yield "All public names are imported from `draftkit`.\n"
    placed = {name for names in TASKS.values() for name in names}
    others = [name for name in draftkit.__all__ if name not in placed and not name.startswith("__")]
    for task, names in (TASKS | ({"Further": tuple(others)} if others else {})).items():
        yield f"## {task}\n"
        for name in names:
            value = getattr(draftkit, name)
            directive = "autoclass" if inspect.isclass(value) else "autofunction"
            home = f"{value.__module__}.{value.__qualname__}"
            options = ":members:\n" if inspect.isclass(value) else ""
            yield f"### {name}\n"
            yield f"```{{eval-rst}}\n.. {directive}:: {home}\n" + (f"   {options}" if options else "") + "```\n"


TASKS = {
    "Convert": ("convert_checkpoint", "inspect_checkpoint", "Draft", "Finding"),
    "Measure": (
        "evaluate_draft", "Settings", "Sweep", "Result", "ResultFile", "Cell", "Interval", "ServerEngine",
        "ServerSettings", "VllmSettings", "gate_results", "Gate",
    ),
    "Explain": ("diagnose_draft", "Diagnosis"),
    "Train": ("train_draft", "TrainConfig", "Sample"),
    "Adapt, and follow a target that is trained": (
        "adapt_draft", "AdaptSettings", "Adaptation", "DraftTuner", "simulate_acceptance", "SimulatedAcceptance",
    ),
    "Decode": (
        "load_target", "load_draft", "load_drafter", "Target", "Engine", "SamplingParameters", "DraftSampling",
        "Request", "Generation",
    ),
    "Publish, and what is raised": ("push_draft", "DraftkitError"),
}  # fmt: skip


PAGES = {
    "commands": commands, "facts": facts, "settings": settings, "findings": findings, "results": results,
    "formats": formats, "api": api, "failures": failures,
}  # fmt: skip


# --- Parts of them


def _commands() -> Iterator[tuple[str, Any]]:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        yield from [(name, command)] if inner is None else [(f"{name} {part}", inner[part]) for part in inner]


def _record(title: str, cls: type, prefix: str = "") -> Iterator[str]:
    """A dataclass: its docstring, and a table of its fields."""
    yield f"## {title}\n"
    yield f"{_markdown(inspect.cleandoc(cls.__doc__ or ''))}\n"
    kinds = typing.get_type_hints(cls, include_extras=True)
    fields = [
        field for field in dataclasses.fields(cls) if not dataclasses.is_dataclass(without_none(kinds[field.name]))
    ]
    rows = [
        (
            f"`{prefix}{field.metadata.get('name', field.name)}`",
            words_of(kinds[field.name]),
            _default(field),
            _markdown(field.metadata.get("help", "")),
        )
        for field in fields
    ]
    columns = 4 if any(row[3] for row in rows) else 3
    yield from _table(("name", "value", "default", "what for")[:columns], (row[:columns] for row in rows))


def _inner(cls: type) -> list[type]:
    """The dataclasses of a dataclass's fields, and theirs."""
    kinds = (without_none(kind) for kind in typing.get_type_hints(cls, include_extras=True).values())
    found = [kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)]
    return list(dict.fromkeys(one for kind in found for one in (kind, *_inner(kind))))


def _default(field: dataclasses.Field[Any]) -> str:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if made is dataclasses.MISSING:
        return ""
    return f"`{json.dumps(made)}`" if made != "" else ""


def _kind(schema: dict[str, Any]) -> str:
    """The type that a JSON Schema says."""
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if "additionalProperties" in schema:
        return f"object of {_kind(schema['additionalProperties'])}"
    return f"`{schema['const']}`" if "const" in schema else schema.get("type", "anything")


def _text(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """What an expression says as text, as far as the source tells."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub(rf"({REPLACED}[, ]*)+{REPLACED}", REPLACED, "".join(_text(part, constants) for part in parts))
        case ast.IfExp(body=body, orelse=orelse):
            said = [_text(part, constants) for part in (body, orelse)]
            return " / ".join(dict.fromkeys(text for text in said if text))
        case ast.Name(id=name) if name in constants:
            return _text(constants[name], {})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case None:
            return ""
    return REPLACED


def _table(head: tuple[str, ...], rows: typing.Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def _markdown(text: str) -> str:
    """Text of help and docstrings, in which only backticks mean something."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<\[\]*_])", r"\\\1", part) for part in parts)


# --- What lies beside docs/


def of_the_project() -> Iterator[tuple[str, str]]:
    """Pages that the repository has outside of docs/, by their place below `reference/project`, and lists of them."""
    for name in ("CHANGELOG", "CONTRIBUTING", "benchmarks/README", "benchmarks/LOG"):
        yield f"{name}.md", (ROOT / f"{name}.md").read_text(encoding="utf-8")
    for folder, title, about in LISTS:
        pages = [path for path in sorted((ROOT / folder).glob("*.md")) if path.name != "template.md"]
        listed = [path.stem for path in pages if path.name != "README.md"]
        contents = "\n".join(f"{folder}/{name}" for name in listed)
        yield f"{folder}.md", f"# {title}\n\n{about}\n\n```{{toctree}}\n:maxdepth: 1\n\n{contents}\n```\n"
        for path in pages:
            if path.stem in listed:
                yield f"{folder}/{path.name}", path.read_text(encoding="utf-8")


LISTS = (
    (
        "model_cards",
        "Model cards",
        "Cards by `draftkit push --dry-run`, of drafts that anybody can make again.",
    ),
)


def link_inward(site: Sphinx, name: str, source: list[str]) -> None:
    """Links of a page to files beside docs/, as they are right in the repository, lead to their copies."""
    up = "../" * name.count("/")
    source[0] = re.sub(
        rf"\]\({re.escape(up)}\.\./((?:benchmarks|model_cards|CHANGELOG|CONTRIBUTING)[\w/-]*\.md)",
        rf"]({up}reference/project/\1",
        source[0],
    )


# --- The extension


def write(site: Sphinx) -> None:
    """All pages into the sources, where git ignores them; a page that is as it was is left alone."""
    folder = Path(site.srcdir) / "reference"
    texts = {f"{name}.md": "\n".join(page()) + "\n" for name, page in PAGES.items()}
    texts |= {f"project/{place}": text for place, text in of_the_project()}
    for place, text in texts.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for pictures in ("model_cards/figures", "docs/pictures"):
        shutil.copytree(ROOT / pictures, folder / "project" / pictures, dirs_exist_ok=True)


def setup(site: Sphinx) -> dict[str, bool]:
    site.connect("builder-inited", write)
    site.connect("source-read", link_inward)
    return {"parallel_read_safe": True}
