"""Do draftkit's tables of a release say what its source says? `python -m scripts.check.releases FOLDER [FOLDER …]`

FOLDER is the package of an unpacked release, as `ENV/lib/python3.11/site-packages/vllm` or one of SGLang. Nothing of it
is imported: its files are read with `ast`. Each name that the release has and the table lacks is printed, each that the
table has and the release does not, and each row whose file, or whose code in it, is not there any more. Exits with 1
where there is any. What differs for a known reason is in `KNOWN`, which must not hold more than that.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from draftkit.engines.releases import Entry, Release
from draftkit.engines.sglang.releases import PRESENT as SGLANG
from draftkit.engines.vllm.releases import RELEASES

# Release → table → names that the source has and the table does not say to be there, each for the reason given.
KNOWN: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "vLLM 0.32": {
        "methods": {"mlp_speculator": "the option takes it, and nothing proposes with it"},
        "config_keys": dict.fromkeys(
            ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"),
            "vLLM fills it in",
        )
        | {"tensor_parallel_size": "only there to be refused"},
    },
}
DRAFT_CLASS = re.compile(r"Eagle|NextN|MTP|DSpark|DFlash|Assistant")  # in the names of SGLang's classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    problems = [problem for folder in parser.parse_args().folders for problem in problems_of(folder)]
    print("\n".join(problems) or "The tables say what the source says.")
    sys.exit(bool(problems))


def problems_of(folder: Path) -> Iterator[str]:
    """What differs between a release and its tables, one line each."""
    release = release_of(folder)
    if release is None:
        yield f"{folder}: no table of this release"
        return
    for table, read in READERS[release.engine].items():
        rows: Mapping[str, Entry] = getattr(release, table)
        known = KNOWN.get(str(release), {}).get(table, {})
        there = {name for name, row in rows.items() if row.there}
        found = read(folder)
        yield from (f"{release}, {table}: the table lacks {name}" for name in sorted(found - there - known.keys()))
        yield from (f"{release}, {table}: {name} is in the table alone" for name in sorted(there - found))
        yield from (
            f"{release}, {table}: {name} is known to differ, and does not"
            for name in known.keys() - found | known.keys() & there
        )
    for table in ("methods", "config_keys", "architectures", "capabilities"):
        for name, row in getattr(release, table).items():
            if problem := _evidence(folder, row):
                yield f"{release}, {table}, {name}: {problem}"


def release_of(folder: Path) -> Release | None:
    """The release whose package a folder is, where there is a table of it."""
    (number,) = re.findall(
        r"^__version__ = .*'(.+)'", (folder / "_version.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    known = (release for release in (*RELEASES, SGLANG) if release.engine.lower() == folder.name)
    return next((release for release in known if f"{number}.".startswith(f"{release.number}.")), None)


def _evidence(folder: Path, row: Entry) -> str | None:
    """Why a row is not shown by its file; None where it is, or was run."""
    if row.read_in is None:
        return None
    path = folder / row.read_in
    if not path.exists():
        return f"{row.read_in} is not there"
    text = ast.unparse(_parsed(path)) if path.is_file() and (row.code or row.no_code) else ""
    if row.code not in text:
        return f"{row.read_in} does not say {row.code}"
    return f"{row.read_in} says {row.no_code}" if row.no_code and row.no_code in text else None


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The values that a file gives to names."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _literals(node: ast.expr, values: Mapping[str, ast.expr]) -> set[str]:
    """The strings of a `Literal`, those of the others that it names too."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.add(part.value)
        elif isinstance(part, ast.Name) and part.id in values:
            found |= _literals(values[part.id], values)
    return found


def _fields(path: Path, name: str) -> set[str]:
    """The annotated fields of a class, but those that begin with an underscore."""
    (found,) = (node for node in _parsed(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}


def vllm_methods(folder: Path) -> set[str]:
    """What `method` takes, without the old names of `mtp` for single targets."""
    values = _assigned(_parsed(folder / "config/speculative.py"))
    return {name for name in _literals(values["SpeculativeMethod"], values) if not name.endswith("_mtp")}


def vllm_architectures(folder: Path) -> set[str]:
    """The classes of drafts in vLLM's registry."""
    table = _assigned(_parsed(folder / "model_executor/models/registry.py"))["_SPECULATIVE_DECODING_MODELS"]
    return (
        {str(key.value) for key in table.keys if isinstance(key, ast.Constant)}
        if isinstance(table, ast.Dict)
        else set()
    )


def sglang_methods(folder: Path) -> set[str]:
    """SGLang's algorithms, and the other names that it takes for them."""
    (enum,) = (
        node
        for node in _parsed(folder / "srt/speculative/spec_info.py").body
        if isinstance(node, ast.ClassDef) and node.name == "SpeculativeAlgorithm"
    )
    names = {
        target.id
        for node in enum.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    values = _assigned(_parsed(folder / "srt/speculative/spec_registry.py"))
    return names | _literals(values["_RESERVED_ALIASES"], {})


def sglang_architectures(folder: Path) -> set[str]:
    """The classes of drafts that SGLang's models enter."""
    found: set[str] = set()
    for path in sorted((folder / "srt/models").glob("*.py")):
        if (entered := _assigned(_parsed(path)).get("EntryClass")) is not None:
            found |= {node.id for node in ast.walk(entered) if isinstance(node, ast.Name)}
    return {name for name in found if DRAFT_CLASS.search(name)}


READERS: Mapping[str, Mapping[str, Callable[[Path], set[str]]]] = {
    "vLLM": {
        "methods": vllm_methods,
        "config_keys": lambda folder: _fields(folder / "config/speculative.py", "SpeculativeConfig"),
        "architectures": vllm_architectures,
    },
    "SGLang": {
        "methods": sglang_methods,
        "config_keys": lambda folder: _fields(folder / "srt/arg_groups/fields/spec.py", "Spec"),
        "architectures": sglang_architectures,
    },
}

if __name__ == "__main__":
    main()
