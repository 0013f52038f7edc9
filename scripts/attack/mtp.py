"""Multi-token prediction heads that are wrong: in a target, alone, as speculators writes them, and put back.

    python -m scripts.attack.mtp [--cases N] [--case NUMBER]

A tensor of another shape or dtype, a missing one and one too many must be refused wherever heads are read. So must
heads of another target, and non-finite numbers, when heads are put back. A config may say anything: it is refused, or
kept as it is. A target into which nothing was put is as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints.mtp_targets import HEADS, RELATIVES, save_with_head
from fixtures.checkpoints.published import all_published
from fixtures.fuzzing.mutate import HOSTILE, WRONG
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftkit import inspect_checkpoint
from draftkit.convert.api import convert_checkpoint, put_heads_back
from draftkit.errors import DraftkitError
from scripts.attack._count import Case, Lost, Silent, main

KINDS = sorted(HEADS | RELATIVES)
FILE = "model.safetensors"
LIBRARY = "speculators-mtp"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of which a target's config may have the other one
FIRST = ("zero", "a fraction", "a billion", "no text", "deep", "as many digits as Python prints")
VALUES: dict[str, Any] = WRONG | {name: HOSTILE[name] for name in FIRST} | {"2": 2}
DTYPES = {
    torch.float32: "F32", torch.bool: "BOOL", torch.int8: "I8", torch.uint8: "U8", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.complex64: "C64",
}  # fmt: skip
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Heads:
    """A folder from which heads are read, the names of their own tensors, and how they are read."""

    name: str
    folder: Path
    own: tuple[str, ...]
    read: Callable[[Path, Path], object]

    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def tensors(self) -> Tensors:
        return load_file(self.folder / FILE)


def cases(corpus: Path) -> Iterator[Case]:
    for kind in KINDS:
        head = save_with_head(kind, corpus / kind / "target").head
        unified = convert_checkpoint(str(corpus / kind / "target"), corpus / kind / "heads", format="mtp")
        own = tuple(load_file(unified / FILE))
        target = Heads(f"{kind} in a target", corpus / kind / "target", own, taken_out)
        yield from of_tensors(target)
        yield from of_config(target)
        config = json.loads((corpus / kind / "target" / "config.json").read_text())
        alone = saved(corpus / kind / "alone", config, load_file(unified / FILE))
        yield from of_tensors(Heads(f"{kind} alone", alone, own, converted))
        yield from of_tensors(
            Heads(f"{kind} in the layout", unified, own, lambda source, _: inspect_checkpoint(str(source)))
        )
        yield from puts(kind, corpus, head.projection + ".weight")
    library = all_published()[LIBRARY].write(corpus / LIBRARY)
    own = tuple(name for name in load_file(library / FILE) if "verifier" not in name)
    yield from of_tensors(Heads(LIBRARY, library, own, converted))
    yield from of_config(Heads(LIBRARY, library, own, converted))


def taken_out(folder: Path, out: Path) -> object:
    return convert_checkpoint(str(folder), out, format="mtp")


def converted(folder: Path, out: Path) -> object:
    return convert_checkpoint(str(folder), out)


def saved(folder: Path, config: object, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    return folder


def of_config(heads: Heads) -> Iterator[Case]:
    config = heads.config()
    holders = [None, *(key for key, value in config.items() if isinstance(value, dict))]
    for holder in holders:
        for key in [*(config if holder is None else config[holder]), *(COUNTS if holder is None else ())]:
            for name, value in VALUES.items():
                place = f"{holder}.{key}" if holder else key
                yield f"{heads.name}: {place} is {name}", partial(kept, heads, holder, key, value)


def of_tensors(heads: Heads) -> Iterator[Case]:
    for name in heads.own:
        if ".experts." not in name or ".experts.1." in name:
            for what, change in changes(heads.tensors()[name]):
                yield f"{heads.name}: {name} {what}", partial(refused, heads, name, change)


def changes(tensor: Tensor) -> Iterator[tuple[str, Callable[[str, Tensor], Tensors]]]:
    """What may be done to a tensor, all of which is wrong: the tensors in its place, by name."""
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        yield "transposed", lambda name, t: {name: t.T}
    yield "missing", lambda name, t: {}
    yield "under another name", lambda name, t: {f"{name}s": t}
    yield "twice, once under another name", lambda name, t: {name: t, f"{name}x": t.clone()}
    for dtype in DTYPES:
        if dtype != torch.float32:
            yield f"as {dtype}", lambda name, t, dtype=dtype: {name: t.to(dtype)}  # type: ignore[misc]
    yield "a row more", lambda name, t: {name: torch.cat((t, t[:1]))}
    yield "a row less", lambda name, t: {name: t[:-1]}
    yield "a dimension more", lambda name, t: {name: t[None]}
    yield "empty", lambda name, t: {name: t[:0]}
    yield "a number", lambda name, t: {name: t.flatten()[0].clone()}


def refused(heads: Heads, name: str, change: Callable[[str, Tensor], Tensors], folder: Path) -> None:
    tensors = heads.tensors()
    tensors |= change(name, tensors.pop(name))
    heads.read(saved(folder / "changed", heads.config(), tensors), folder / "out")
    raise Silent("accepted")


def kept(heads: Heads, holder: str | None, key: str, value: object, folder: Path) -> None:
    """A config that is accepted is in the result, as it is."""
    config = heads.config()
    (config if holder is None else config[holder])[key] = value
    try:
        text = json.dumps(config)
    except (RecursionError, ValueError):
        return  # no JSON
    saved(folder / "changed", {}, heads.tensors())
    (folder / "changed" / "config.json").write_text(text)
    heads.read(folder / "changed", folder / "out")
    made = json.loads((folder / "out" / "config.json").read_text())["draftkit"]["spec"]["architecture"]["config"]
    if heads.name != LIBRARY and made != json.loads(text):
        raise Silent("another config was kept")


def puts(kind: str, corpus: Path, projection: str) -> Iterator[Case]:
    """Heads that a target does not take."""
    target, heads = corpus / kind / "target", corpus / kind / "heads"
    for other in KINDS:
        if other != kind and (corpus / other).exists():  # with those that came before
            yield f"{other} into {kind}", partial(not_put, corpus / other / "heads", target)
            yield f"{kind} into {other}", partial(not_put, heads, corpus / other / "target")
    for number in (torch.nan, torch.inf, -torch.inf):

        def spoiled(name: str, t: Tensor, number: float = number) -> Tensors:
            return {name: t.index_fill(0, torch.tensor([len(t) - 1]), number)}

        for name in load_file(heads / FILE):
            if ".experts." not in name:
                yield f"{kind}: {name} with {number}", partial(forged, heads, target, name, spoiled)
    for what, change in changes(load_file(heads / FILE)[projection]):
        yield f"{kind}: {projection} {what}, and the block says so", partial(forged, heads, target, projection, change)
    for key in ("hidden_size", "num_attention_heads", "model_type"):
        yield f"{kind} into a target of another {key}", partial(into_another, heads, target, key)


def forged(heads: Path, target: Path, name: str, change: Callable[[str, Tensor], Tensors], folder: Path) -> None:
    """Heads whose draftkit block says of each tensor what it is."""
    config, tensors = json.loads((heads / "config.json").read_text()), load_file(heads / FILE)
    tensors |= change(name, tensors.pop(name))
    saved(folder / "forged", {}, tensors)
    config["draftkit"]["spec"]["architecture"]["weights"] = [
        {"name": n, "dtype": DTYPES[t.dtype], "shape": list(t.shape)} for n, t in tensors.items()
    ]
    (folder / "forged" / "config.json").write_text(json.dumps(config))
    not_put(folder / "forged", target, folder)


def into_another(heads: Path, target: Path, key: str, folder: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    config[key] = "llama" if key == "model_type" else config[key] * 2
    not_put(heads, saved(folder / "other", config, load_file(target / FILE)), folder)


def not_put(heads: Path, target: Path, folder: Path) -> None:
    """Refused, with a new folder and in place, and the target is as it was."""
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for out in (folder / "out", None):
        try:
            put_heads_back(str(heads), str(target), out)
        except DraftkitError:
            continue
        raise Silent("put in")
    if {path.name: path.read_bytes() for path in target.iterdir()} != before or (folder / "out").exists():
        raise Lost("the target is not as it was, or something is left")
    put_heads_back(str(heads), str(target), folder / "out")  # whose message is looked at


if __name__ == "__main__":
    main(__doc__, cases)
