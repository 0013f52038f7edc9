"""Do draftkit's tables of a release say what its source says? `python -m scripts.check.releases vllm==0.33.0 …`

pip fetches a release into the folder DRAFTKIT_WHEELS or a cache; an unpacked package, such as
`ENV/lib/python3.11/site-packages/vllm`, is read in place. Nothing of it is imported: files are read with `ast`. Names
that can be read (methods, settings, classes, metrics) are written to `draftkit/engines/ENGINE/names.py`, and what the
tables rest on to `tests/fixtures/engines/ENGINE-NUMBER.json`, which `make test` compares. Printed are rows that only a
person can settle: those whose file or code is gone, and those of names that are gone. Exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from draftkit.engines.known import known
from draftkit.engines.releases import Entry, Release
from scripts._bench import ROOT, arguments

STORED = ROOT / "tests/fixtures/engines"


# Where the package index has the source of an engine's releases: pip's option for this kind of file, and the package's
# files by their path within it. vLLM's source has 47 MB and its wheel 336.
ARCHIVES = {
    "vllm": ("--no-binary", r"[^/]+/(vllm/.+\.py)"),
    "sglang": ("--only-binary", r"(sglang/.+\.py)"),
}
BACKEND = """
import pathlib
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    head = pathlib.Path("PKG-INFO").read_text(encoding="utf-8").split("\\n\\n")[0]
    kept = [line for line in head.splitlines() if line.startswith(("Metadata-Version:", "Name:", "Version:"))]
    name, version = (line.split(": ")[1] for line in kept[1:])
    info = pathlib.Path(folder) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\\n".join([*kept, ""]), encoding="utf-8")
    return info.name
"""
TABLES = ("methods", "config_keys", "architectures", "verifications", "metrics")
EVIDENCE = (*TABLES, "capabilities", "rules", "slots", "quantizations", "plain_parts")
# Engine → table → names that the source has and draftkit leaves out, each for the reason given.
LEFT_OUT: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "vLLM": {
        "methods": {"mlp_speculator": "the option takes it, and nothing proposes with it"},
        "config_keys": dict.fromkeys(
            ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"),
            "vLLM fills it in",
        )
        | {"tensor_parallel_size": "only there to be refused"},
    },
}
DRAFT_CLASS = re.compile(r"Eagle|NextN|MTP|DSpark|DFlash|Assistant")  # in the names of SGLang's classes


@dataclass(frozen=True)
class Package:
    """An unpacked release."""

    folder: Path

    @property
    def engine(self) -> str:
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.folder.name]

    @property
    def number(self) -> str:
        """Its release, without the number of a repair where the tables leave it out."""
        text = (self.folder / "_version.py").read_text(encoding="utf-8")
        (whole,) = re.findall(r"^__version__ = .*'(\d[\d.]*)", text, re.MULTILINE)
        return ".".join(whole.split(".")[:2]) if self.engine == "vLLM" else whole

    @property
    def release(self) -> str:
        return f"{self.engine} {self.number}"

    def names(self, table: str) -> set[str]:
        read = READERS[self.engine].get(table)
        return set() if read is None else read(self.folder) - LEFT_OUT.get(self.engine, {}).get(table, {}).keys()

    def has(self, file: str) -> bool:
        return (self.folder / file).exists()

    def says(self, file: str, code: str) -> bool:
        return code in _text(self.folder / file)


@dataclass(frozen=True)
class Stored:
    """What was read in a release, as `store` has written it."""

    content: Mapping[str, Any]
    release: str

    @classmethod
    def of(cls, path: Path) -> Stored:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content, content["release"])

    def names(self, table: str) -> set[str]:
        return set(self.content["names"][table])

    def has(self, file: str) -> bool:
        return file in self.content["digests"]

    def says(self, file: str, code: str) -> bool:
        return code in self.content["says"].get(file, [])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("releases", nargs="+", help="ENGINE==NUMBER, or the folder of an unpacked package")
    problems: list[str] = []
    for name in parser.parse_args().releases:
        package = Package(fetched(*name.split("==")) if "==" in name else Path(name))
        write_names(package)
        # In a process that imports the names that were just written.
        code = (
            "import sys; from pathlib import Path; from scripts.check.releases import Package, problems_of, store; "
            "package = Package(Path(sys.argv[1])); store(package); print(*problems_of(package), sep='\\n')"
        )
        command = [sys.executable, "-c", code, str(package.folder)]
        problems += subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout.split("\n")
    print("\n".join(filter(None, problems)) or "The tables say what the source says.")
    sys.exit(any(problems))


def fetched(engine: str, number: str) -> Path:
    """The folder of a release's package, fetched by pip where it is not there yet; nothing of it is installed or run.

    Raises `CalledProcessError` where pip cannot fetch it.
    """
    cache = Path(os.environ.get("DRAFTKIT_WHEELS") or Path.home() / ".cache/draftkit/engines")
    out = cache / f"{engine}-{number}"
    if not (out / engine).exists():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _download(engine, number, folder)
            _unpack(next(folder.glob(f"{engine}-*")), ARCHIVES[engine][1], out)
    return out / engine


def _download(engine: str, number: str, folder: Path) -> None:
    """Let pip save a release. Of a source archive it asks the build for a name, which a stand-in answers: the release's
    own would run, and need torch."""
    backend = folder / "backend/setuptools/build_meta.py"
    backend.parent.mkdir(parents=True)
    backend.with_name("__init__.py").touch()
    backend.write_text(BACKEND, encoding="utf-8")
    words = f"-m pip download --quiet --no-deps --no-build-isolation {ARCHIVES[engine][0]} {engine}".split()
    subprocess.run(
        [sys.executable, *words, "--dest", str(folder), f"{engine}=={number}"],
        env=os.environ | {"PYTHONPATH": str(folder / "backend")},
        check=True,
    )


def _unpack(archive: Path, wanted: str, out: Path) -> None:
    """Write the files of an archive whose names match `wanted` to what its group says, below `out`."""
    for name, read in _files(archive):
        if inner := re.fullmatch(wanted, name):
            path = out / inner[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read())


def _files(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield from ((name, partial(packed.read, name)) for name in packed.namelist())
        return
    with tarfile.open(archive) as source:
        for member in source:
            if (file := source.extractfile(member)) is not None:
                yield member.name, file.read


def write_names(package: Package) -> None:
    """Write the names of a release into its engine's `names.py`, beside those of the others."""
    engine = package.folder.name
    module = importlib.reload(importlib.import_module(f"draftkit.engines.{engine}.names"))  # as just written
    names = dict(module.NAMES)
    tables = [*TABLES, "raised_ropes"]
    names[package.number] = {
        table: " ".join(sorted(package.names(table))) for table in tables if table in READERS[package.engine]
    }
    lines = [f'"""The names in releases of {package.engine}, written by `python -m scripts.check.releases`."""', ""]
    lines.append("NAMES: dict[str, dict[str, str]] = {")
    for number in sorted(names, key=lambda number: [int(part) for part in number.split(".")]):
        lines.append(f'    "{number}": {{')
        for table, text in names[number].items():
            wrapped = textwrap.wrap(" ".join(text.split()), 104, break_long_words=False, break_on_hyphens=False)
            lines += [f'        "{table}": """', *(f"            {line}" for line in wrapped), '        """,']
        lines.append("    },")
    path = ROOT / f"draftkit/engines/{engine}/names.py"
    path.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


def store(package: Package) -> None:
    """Store what the tables of a release rest on: its names, the files that rows were read in, what they say."""
    release = release_of(package)
    if release is None:
        return
    digests: dict[str, str] = {}
    says: dict[str, list[str]] = {}
    for row in _rows(release).values():
        if row.read_in is None or not package.has(row.read_in):
            continue
        path = package.folder / row.read_in
        digests[row.read_in] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found = says.setdefault(row.read_in, [])
        found += [code for code in (row.code, row.no_code) if code and code not in found and code in _text(path)]
    content = {
        "release": package.release,
        "names": {table: sorted(package.names(table)) for table in (*TABLES, "raised_ropes")},
        "digests": dict(sorted(digests.items())),
        "says": {file: sorted(codes) for file, codes in sorted(says.items()) if codes},
    }
    path = STORED / f"{package.folder.name}-{package.number}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def problems_of(source: Package | Stored) -> Iterator[str]:
    """What differs between a release and its tables, one line each."""
    release = release_of(source)
    if release is None:
        yield f"{source.release}: no table of this release"
        return
    for table in TABLES:
        rows: Mapping[str, Entry] = getattr(release, table)
        there, found = {name for name, row in rows.items() if row.there}, source.names(table)
        yield from (f"{release}, {table}: the table lacks {name}" for name in sorted(found - there))
        yield from (f"{release}, {table}: {name} is in the table alone" for name in sorted(there - found))
    if (release.raised_ropes or set()) != source.names("raised_ropes"):
        yield f"{release}: the ropes whose positions are raised are {sorted(source.names('raised_ropes'))}"
    for name, row in _rows(release).items():
        if problem := _evidence(source, row):
            yield f"{release}, {name}: {problem}"


def release_of(source: Package | Stored) -> Release | None:
    """The release of a source, where there is a table of it."""
    tables = {str(release): release for releases in known().values() for release in releases}
    return tables.get(source.release)


def _rows(release: Release) -> dict[str, Entry]:
    """The rows of all tables, by table and name."""
    return {f"{table}, {name}": row for table in EVIDENCE for name, row in getattr(release, table).items()}


def _evidence(source: Package | Stored, row: Entry) -> str | None:
    """Why a row is not shown by its file; None where it is, or was run."""
    if row.read_in is None:
        return None
    if not source.has(row.read_in):
        return f"{row.read_in} is not there"
    if row.code and not source.says(row.read_in, row.code):
        return f"{row.read_in} does not say {row.code}"
    stands = row.no_code and source.says(row.read_in, row.no_code)
    return f"{row.read_in} says {row.no_code}" if stands else None


@cache
def _text(path: Path) -> str:
    """A file as `ast.unparse` writes it; nothing of a folder."""
    return "" if path.is_dir() else ast.unparse(_parsed(path))


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(path: Path, name: str) -> ast.ClassDef:
    (found,) = (node for node in _parsed(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def _assigned(tree: ast.Module | ast.ClassDef) -> dict[str, ast.expr]:
    """The values that a file or class gives to names."""
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
    fields = (node.target for node in _class(path, name).body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}


def vllm_methods(folder: Path) -> set[str]:
    """What `method` takes, without the old names of `mtp` for single targets."""
    values = _assigned(_parsed(folder / "config/speculative.py"))
    return {name for name in _literals(values["SpeculativeMethod"], values) if not name.endswith("_mtp")}


def vllm_architectures(folder: Path) -> set[str]:
    """The classes of drafts in vLLM's registry, and those with which it runs the heads of transformers' models."""
    tables = _assigned(_parsed(folder / "model_executor/models/registry.py"))
    every = {name: _keys(table) for name, table in tables.items()}
    of_transformers = {key for keys in every.values() for key in keys if re.fullmatch(r"Transformers\w*MTP", key)}
    return every["_SPECULATIVE_DECODING_MODELS"] | of_transformers


def _keys(node: ast.expr) -> set[str]:
    """The names that a `dict` has values for; none of anything else."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def sglang_methods(folder: Path) -> set[str]:
    """SGLang's algorithms, and the other names that it takes for them."""
    enum = _class(folder / "srt/speculative/spec_info.py", "SpeculativeAlgorithm")
    values = _assigned(_parsed(folder / "srt/speculative/spec_registry.py"))
    return _assigned(enum).keys() | _literals(values["_RESERVED_ALIASES"], {})


def sglang_architectures(folder: Path) -> set[str]:
    """The classes of drafts that SGLang's models enter."""
    found: set[str] = set()
    for path in sorted((folder / "srt/models").glob("*.py")):
        if (entered := _assigned(_parsed(path)).get("EntryClass")) is not None:
            found |= {node.id for node in ast.walk(entered) if isinstance(node, ast.Name)}
    return {name for name in found if DRAFT_CLASS.search(name)}


def vllm_raised_ropes(folder: Path) -> set[str]:
    """The kinds of rope with which a short draft is given the target's positions; none where all are."""
    values = _assigned(_parsed(folder / "config/speculative.py"))
    return _literals(values["_CACHE_ONLY_ROPE_TYPES"], {}) if "_CACHE_ONLY_ROPE_TYPES" in values else set()


def _metrics(path: Path) -> set[str]:
    """The metrics of speculative decoding that a file names."""
    strings = (node.value for node in ast.walk(_parsed(path)) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and re.fullmatch(r"\w+:spec_\w+", text)}


READERS: Mapping[str, Mapping[str, Callable[[Path], set[str]]]] = {
    "vLLM": {
        "methods": vllm_methods,
        "config_keys": lambda folder: _fields(folder / "config/speculative.py", "SpeculativeConfig"),
        "architectures": vllm_architectures,
        "verifications": lambda folder: _literals(
            _assigned(_parsed(folder / "config/speculative.py"))["RejectionSampleMethod"], {}
        ),
        "metrics": lambda folder: _metrics(folder / "v1/spec_decode/metrics.py"),
        "raised_ropes": vllm_raised_ropes,
    },
    "SGLang": {
        "methods": sglang_methods,
        "config_keys": lambda folder: _fields(folder / "srt/arg_groups/fields/spec.py", "Spec"),
        "architectures": sglang_architectures,
        "metrics": lambda folder: _metrics(folder / "srt/observability/metrics_collector.py"),
    },
}

if __name__ == "__main__":
    main()
