"""Hostile targets of `convert HEADS [OUT] --into TARGET`: what is lost, written through links, or waited for.

    python -m scripts.attack.into [--cases N] [--case NUMBER]

Each case spoils a target, its heads or the place of OUT, and puts the heads back, into OUT or the target's own folder.
It ends well if draftkit refuses in one message and everything is as it was. Else the new folder must have the heads,
every other tensor and file must be the target's, and writing into its files must leave the target as it was. Some runs
are killed on the way or find the disk full: the next command must find the old target or the whole new one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from fixtures.checkpoints.mtp_targets import save_with_head
from fixtures.fuzzing.judge import command
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError
from draftkit.hub.locate import locate
from draftkit.io import atomic
from scripts.attack._count import Case, Lost, Silent, asked, main

FILE, INDEX, CONFIG, NEW = "model.safetensors", "model.safetensors.index.json", "config.json", "model-mtp.safetensors"
FIRST, SECOND = "model-00001.safetensors", "model-00002.safetensors"  # of which the second has the head
OWN = "the target's own"
KIND, LAYER, LAST = "deepseek_v3", "model.layers.8.", "model.layers.7."
COUNT, NORM = "num_nextn_predict_layers", "model.norm.weight"

STEPS = 200  # of a run that puts heads back
ODD: tuple[object, ...] = (True, -1, 7, "1", [], 2.5, 10**12)

State = dict[str, tuple[int, object]]  # path → mode, and content, or where a link leads


@dataclass
class Place:
    """What a case works on: a folder with `target`, sharded or not, with the head or without, and `heads`."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def heads(self) -> Path:
        return self.folder / "heads"


Spoil = Callable[[Place], Path | None]  # returns OUT, where that is another than usual


def cases(corpus: Path) -> Iterator[Case]:
    target = save_with_head(KIND, corpus / "target").folder
    for name in ("tokenizer.json", "tokenizer.model", "assets/logo.svg"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(OWN)
    (corpus / "target" / "empty").mkdir()
    convert_checkpoint(str(target), corpus / "heads", format="mtp")
    found = [
        (f"{name}, {layout}, {'in place' if inside else 'to OUT'}", _case(corpus, layout, spoil, inside, refused))
        for layout in ("whole", "whole without the head", "sharded", "sharded without the head")
        for inside in (False, True)
        for name, spoil, refused in SPOILS
    ]
    found += [(f"killed: {name}", _killed(corpus, layout, event)) for name, layout, event in _ends()]
    random.Random(0).shuffle(found)  # so that the first cases are of every kind
    return iter(found)


# What is wrong.


def made(name: str, make: Callable[[Path], object]) -> Callable[[Place], None]:
    """Something else in the place of a file of the target."""

    def spoil(place: Place) -> None:
        path = place.target / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return spoil


def text(name: str, content: str | bytes) -> Callable[[Place], None]:
    return made(name, lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode()))


def link(name: str, to: str) -> Callable[[Place], None]:
    return made(name, lambda path: path.symlink_to(to))


def pipe(name: str) -> Callable[[Place], None]:
    return made(name, os.mkfifo)


def value(name: str, *keys: str, to: object) -> Callable[[Place], None]:
    """Another value in a JSON file of the target, if it has that file."""

    def spoil(place: Place) -> None:
        if (path := place.target / name).exists():
            whole = holder = json.loads(path.read_text())
            for key in keys[:-1]:
                holder = holder.setdefault(key, {})
            holder[keys[-1]] = to
            path.write_text(json.dumps(whole))

    return spoil


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, chdir(path.parent):  # the path of a socket has 107 letters
        server.bind(path.name)


def linked_in_a_circle(path: Path) -> None:
    path.symlink_to("two")
    path.with_name("two").symlink_to(path.name)


def as_in_a_cache(place: Place) -> None:
    """Links to blobs beside, as the Hub's cache has them."""
    (place.folder / "blobs").mkdir()
    for number, path in enumerate(sorted(place.target.iterdir())):
        if path.is_file():
            path.rename(place.folder / "blobs" / str(number))
            path.symlink_to(f"../blobs/{number}")


def linked_target(place: Place) -> None:
    place.target.rename(place.folder / "elsewhere")
    place.target.symlink_to("elsewhere")


def read_only(place: Place) -> None:
    for path in place.target.rglob("*"):
        if path.is_file():
            path.chmod(0o444)


def private(place: Place) -> None:
    place.target.chmod(0o700)
    (place.target / CONFIG).chmod(0o600)


def damaged(content: Callable[[bytes], bytes], of: str = "target") -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        path = max((place.folder / of).glob("*.safetensors"))
        path.write_bytes(content(path.read_bytes()))

    return spoil


def heads_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        stored = load_file(place.heads / FILE)
        change(stored)
        save_file(stored, place.heads / FILE, {"format": "pt"})

    return spoil


def out_at(name: str, make: Callable[[Path], object] = lambda path: None) -> Spoil:
    def spoil(place: Place) -> Path:
        out = place.folder / name
        make(out)
        return out

    return spoil


def linked_into(out: Path) -> None:
    (out.parent / "target" / "deeper").mkdir()
    out.symlink_to("target/deeper")


def filled(out: Path) -> None:
    out.mkdir()
    (out / "notes").write_text(OWN)


# Each: what it is, what does it, and whether it must be refused (None: as may be).
SPOILS: list[tuple[str, Callable[[Place], Path | None], bool | None]] = [
    ("a sound target", lambda place: None, False),
    ("links as in the Hub's cache", as_in_a_cache, False),
    ("a target that is a link", linked_target, False),
    ("files that are read-only", read_only, False),
    ("a private target", private, False),
    ("a leftover of a file that is written", text(f"{FILE}.new", OWN), False),
    ("a leftover of a shard that is written", text(f"{SECOND}.new", OWN), False),
    ("a shard that no index names", text(NEW, OWN), None),
    ("a shard that no index names, a link", link(NEW, "tokenizer.json"), None),
    ("a temporary file", text("config.json.tmp", OWN), False),
    ("a link to nothing", link("vocab.txt", "gone"), True),
    ("a link to itself", link("vocab.txt", "vocab.txt"), True),
    ("two links to each other", made("one", linked_in_a_circle), True),
    ("a link to its own folder", link("again", "."), True),
    ("a link to the folder above", link("above", ".."), True),
    ("a link to everything", link("root", "/"), True),
    ("a link back from below", link("assets/up", ".."), True),
    ("a link to a device", link("zero", "/dev/zero"), True),
    ("a link to a folder beside", link("beside", "../heads"), False),
    ("a pipe", pipe("pipe"), True),
    ("a pipe below", pipe("assets/pipe"), True),
    ("a pipe for config.json", pipe(CONFIG), True),
    ("a pipe for the weights", pipe(FILE), None),
    ("a pipe for the index", pipe(INDEX), None),
    ("a pipe for the tokenizer", pipe("tokenizer.json"), True),
    ("a pipe for the new shard", pipe(NEW), True),
    ("a socket", made("socket", listen), True),
    ("a folder for config.json", made(CONFIG, Path.mkdir), True),
    ("a folder for the new shard", made(NEW, Path.mkdir), None),
    ("a config without end", text(CONFIG, '{"a": ' + "[" * 10_000), True),
    ("a config that is a list", text(CONFIG, "[]"), True),
    ("an empty config", text(CONFIG, ""), True),
    ("no text for a config", text(CONFIG, b"\xff\xfe\x00"), True),
    *((f"{n!r} heads", value(CONFIG, COUNT, to=n), None) for n in ODD),
    *((f"{n!r} layers", value(CONFIG, "num_hidden_layers", to=n), None) for n in ODD),
    *((f"a quantization of {n!r}", value(CONFIG, "quantization_config", to=n), None) for n in ODD),
    *(
        (f"left alone: {n!r}", value(CONFIG, "quantization_config", to={"quant_method": "fp8", "ignore": n}), None)
        for n in (*ODD, None, {"a": 1}, [None])
    ),
    ("an index that leads outside", value(INDEX, "weight_map", NORM, to="../heads/model.safetensors"), None),
    ("an index of a missing shard", value(INDEX, "weight_map", NORM, to="gone.safetensors"), None),
    ("an index of a text", value(INDEX, "weight_map", to="x"), None),
    ("an index of a list", text(INDEX, "[]"), True),
    ("a size that is none", value(INDEX, "metadata", "total_size", to="much"), None),
    ("metadata that is a list", value(INDEX, "metadata", to=[]), None),
    ("weights cut short", damaged(lambda data: data[:-1]), True),
    ("weights with more behind", damaged(lambda data: data + b"x"), True),
    ("a header without end", damaged(lambda data: b"\xff" * 8 + data[8:]), True),
    ("no weights at all", damaged(lambda data: b""), True),
    ("heads cut short", damaged(lambda data: data[:-1], "heads"), True),
    ("heads that lack a tensor", heads_changed(lambda stored: stored.popitem()), True),
    ("heads that have another", heads_changed(lambda stored: stored.update(x=stored[max(stored)].clone())), True),
    ("heads of another shape", heads_changed(lambda s: s.update({max(s): s[max(s)][:1].clone()})), True),
    ("OUT in the target", out_at("target/out"), True),
    ("OUT deep in the target", out_at("target/a/b/out"), True),
    ("OUT in the target, by a link", out_at("link/out", lambda out: linked_into(out.parent)), True),
    ("OUT that is there", out_at("out", filled), True),
    ("OUT that is a file", out_at("out", lambda out: out.write_text(OWN)), True),
    ("OUT that is a pipe", out_at("out", os.mkfifo), True),
    ("OUT that is a link to nothing", out_at("out", lambda out: out.symlink_to("gone")), None),
    ("OUT that is a link to itself", out_at("out", lambda out: out.symlink_to("out")), True),
    ("OUT that is the heads", out_at("heads"), True),
    ("OUT that is the folder above", out_at("."), True),
    ("OUT of a long name", out_at("x" * 300), True),
]  # fmt: skip


# What is looked at.


def _case(
    corpus: Path, layout: str, spoil: Callable[[Place], Path | None], inside: bool, refused: bool | None
) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        place = _made(corpus, layout, folder)
        other = spoil(place)
        if other is not None and inside:
            return  # OUT is the target's own folder
        out = None if inside else other or place.folder / "out"
        before = _state(place.folder)
        wanted = _tensors(place.target) if not refused else {}
        try:
            asked("convert", place.heads, *([out] if out else []), "--into", place.target)
        except DraftkitError:
            if (after := _state(place.folder)) != before:
                raise Lost(f"refused, and not as it was: {_difference(before, after)}") from None
            if refused is False:
                raise AssertionError("a sound target is refused") from None
            raise
        if refused:
            raise Silent("taken for right")
        _check(place, out or place.target, before, wanted)

    return run


def _made(corpus: Path, layout: str, folder: Path) -> Place:
    """The target and the heads in a folder of their own."""
    for name in ("target", "heads"):
        shutil.copytree(corpus / name, folder / name)
    place = Place(folder)
    stored = load_file(place.target / FILE)
    if "without" in layout:
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(LAYER)}
        value(CONFIG, COUNT, to=0)(place)
        save_file(stored, place.target / FILE, {"format": "pt"})
    if "sharded" in layout:
        second = {name: tensor for name, tensor in stored.items() if name.startswith((LAYER, LAST))}
        shards = {FIRST: {n: t for n, t in stored.items() if n not in second}, SECOND: second}
        for shard, tensors in shards.items():
            save_file(tensors, place.target / shard, {"format": "pt"})
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": weight_map}
        (place.target / INDEX).write_text(json.dumps(index))
        (place.target / FILE).unlink()
    own = load_file(place.heads / FILE)
    save_file({name: tensor + 1 for name, tensor in own.items()}, place.heads / FILE, {"format": "pt"})
    return place


def _tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of the tensors of a target, where it has any that can be read."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file() and path.read_bytes() != OWN.encode()]
    stored = [load_file(path) for path in files]
    return {name: tensor.numpy().tobytes() for tensors in stored for name, tensor in tensors.items()}


def _state(folder: Path) -> State:
    """Everything below a folder, without following links."""
    found: State = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base, name)
            status = path.lstat()
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


def _difference(before: State, after: State) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _check(place: Place, out: Path, before: State, wanted: dict[str, bytes]) -> None:
    """Raise `Silent` for a result that is not right, `Lost` where the target is not as it was."""
    heads = {name: tensor.numpy().tobytes() for name, tensor in load_file(place.heads / FILE).items()}
    if _tensors(out) != wanted | heads:
        raise Silent("the result has other tensors")
    real = Path(os.path.realpath(out))
    if out == place.target:
        changed = {name for name in _difference(before, _state(place.folder)) if not name.startswith("blobs/")}
        owned = (".safetensors", INDEX, CONFIG)
        links = {name for name, (mode, _) in before.items() if stat.S_ISLNK(mode)}
        if lost := [name for name in changed - links if not name.endswith(owned)]:
            raise Lost(f"files of the target: {lost}")
        return
    inside = {name for name in _state(place.folder) if (place.folder / name).is_relative_to(real)}
    after = {name: state for name, state in _state(place.folder).items() if name not in inside}
    if left := [name for name in _difference(before, after) if name != out.name]:
        raise Lost(f"beside the result: {left}")
    missing = [n for n in os.listdir(place.target) if n not in os.listdir(real)]
    if missing:
        raise Lost(f"not in the result: {missing}")
    shared = {path.stat().st_ino for path in place.folder.rglob("*.safetensors") if not path.is_relative_to(real)}
    for path in real.rglob("*"):
        if path.is_file() and (path.suffix != ".safetensors" or path.stat().st_ino not in shared):
            path.chmod(0o644)
            path.write_bytes(b"edited")
    after = {name: state for name, state in _state(place.folder).items() if name in before}
    if left := [name for name in _difference(before, after) if not (place.folder / name).is_relative_to(real)]:
        raise Lost(f"the result is written, and the target with it: {left}")


# Runs that end on the way.


def _ends() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Where a run ends: before one of its looks at or changes of the file system, or when a file is too large."""
    for layout in ("whole", "sharded without the head"):
        for exchanges in (True, False):
            how = "one exchange" if exchanges else "two renames"
            for step in range(1, STEPS, 3):
                yield f"before step {step}, {how}, {layout}", layout, partial(_die_at, step, exchanges)
        for size in (0, 100, 10_000):
            yield f"a disk of {size} bytes a file, {layout}", layout, partial(_full, size)


def _die_at(step: int, exchanges: bool) -> None:
    if not exchanges:
        atomic._exchanged = lambda one, other: False
    steps = count(1)

    def on_event(event: str, values: object) -> None:
        if (event == "open" or event.startswith(("os.", "shutil."))) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


def _full(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _killed(corpus: Path, layout: str, install: Callable[[], None]) -> Callable[[Path], None]:
    """Put heads back in place, in a process that is killed on the way; then read the target and put them back again."""

    def run(folder: Path) -> None:
        place = _made(corpus, layout, folder)
        old = _tensors(place.target)
        heads = {name: tensor.numpy().tobytes() for name, tensor in load_file(place.heads / FILE).items()}
        before = {name: state for name, state in _state(place.target).items() if not name.endswith(("json", "tensors"))}
        process = os.fork()
        if process == 0:
            _in_a_process(place, install)
        _, status = os.waitpid(process, 0)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if ended not in (signal.SIGKILL, 0, 1):
            raise AssertionError(f"the run ended with {ended}")
        for again in (False, True):
            if locate(str(place.target)).path != place.target:
                raise Lost("the target is not found")
            if _tensors(place.target) not in (old, old | heads):
                raise Lost("the target is neither the old nor the new one")
            after = _state(place.target)
            if before.items() - after.items():
                raise Lost(f"files of the target: {_difference(before, after)}")
            if not again:
                code, _, err = command("convert", place.heads, "--into", place.target)
                assert code == 0, err
        if sorted(os.listdir(folder)) != ["heads", "target"]:
            raise Lost(f"left behind: {os.listdir(folder)}")

    return run


def _in_a_process(place: Place, install: Callable[[], None]) -> None:
    """Carry out a case in the child process; never returns."""
    code = 3
    try:
        install()
        code, _, _ = command("convert", place.heads, "--into", place.target)
    except BaseException as error:
        code = 2
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(__doc__, cases)
