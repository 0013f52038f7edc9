"""An export as a GGUF file: the metadata and tensors that a format module plans, the target's tokenizer, provenance."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from draftkit.convert.export import Export, Outgoing, results
from draftkit.convert.formats.gguf.tokenizer import SPLITS_KEY, UNNAMED_SPLITS, tokenizer_in, tokenizer_of
from draftkit.convert.unified import OnBytes
from draftkit.errors import DraftkitError, LayoutError
from draftkit.hub.local_paths import named, public_name
from draftkit.io.atomic import atomic_file
from draftkit.io.gguf_file import FILE_TYPE, TYPES, GgufTensor, read_gguf, type_of, write_gguf
from draftkit.io.records import to_dict
from draftkit.version import __version__

_log = logging.getLogger(__name__)
PROVENANCE, DTYPE = "draftkit.provenance", "draftkit.dtype"


def file_tensors(outgoing: Outgoing, export: Export, stored: str | None) -> list[GgufTensor]:
    """The tensors of the file, the draft's matrices `stored` as one of `TYPES`; None for the draft's own dtype."""
    kind = _kind(outgoing, stored)
    return [
        *export.beside,
        *(GgufTensor(handle, type_of(handle, kind)) for handle in results(outgoing, export).values()),
    ]


def write_file(
    out: Path,
    outgoing: Outgoing,
    export: Export,
    stored: str | None,
    *,
    force: bool,
    on_bytes: OnBytes | None,
) -> None:
    """Write the file atomically; `force` lets it replace one that draftkit has written. Raises `DraftkitError`."""
    if out.suffix != ".gguf":
        raise DraftkitError("the output is a GGUF file", where=out, expected=f"{out.name}.gguf")
    draft = outgoing.draft
    if any(os.path.realpath(out) == os.path.realpath(handle.origin) for handle in draft.tensors.values()):
        raise DraftkitError("the output is the source itself", where=out, hint="choose another file")
    if force and out.is_file() and PROVENANCE not in read_gguf(out).metadata:
        raise DraftkitError("the output is a file that draftkit has not written", where=out, hint="choose another")
    kind = _kind(outgoing, stored)
    metadata = {
        "general.name": public_name(draft.provenance.source),
        FILE_TYPE: TYPES[kind][1],
        "general.quantization_version": 2,
    }
    metadata |= export.config | _tokenizer(outgoing, export) | _provenance(outgoing, export)
    tensors = file_tensors(outgoing, export, stored)
    with atomic_file(out, force) as file:
        write_gguf(Path(file.name), metadata, tensors, on_bytes)


def _kind(outgoing: Outgoing, stored: str | None) -> str:
    own = {"F64": "f32"}.get(outgoing.draft.spec.dtype, outgoing.draft.spec.dtype.lower())
    if stored is not None and stored not in TYPES:
        raise LayoutError(f"there is no type {stored}", expected=f"--type {' or '.join(TYPES)}")
    return stored or own


def _tokenizer(outgoing: Outgoing, export: Export) -> dict[str, object]:
    """The target's, or a language model's own unless the target is a GGUF file, whose texts it then shares exactly.

    The keys that the export states stand.
    """
    target, draft = outgoing.need_target("its tokenizer"), outgoing.draft
    size = draft.spec.architecture.vocab_size
    own = next((path for path in draft.files if path.name == "tokenizer.json"), None)
    if own is not None and not (target.name.endswith(".gguf") and target.vocab_size == size):
        found = tokenizer_in(own.parent, size)
        if found.get(SPLITS_KEY) == UNNAMED_SPLITS:
            _log.warning(
                "%s: what llama.cpp calls this tokenizer's way to split a text is not known to draftkit: served as a "
                "target, texts may become other tokens; token ids do not",
                draft.provenance.source,
            )
    else:
        found = tokenizer_of(target, size)
    return {key: value for key, value in found.items() if key not in export.config}


def _provenance(outgoing: Outgoing, export: Export) -> dict[str, object]:
    provenance = to_dict(outgoing.draft.provenance) | {"export_losses": list(export.losses)}
    found: dict[str, object] = {PROVENANCE: json.dumps(named(provenance)), "draftkit.version": __version__}
    dtypes = {handle.dtype for handle in outgoing.draft.tensors.values()} - {"I64"}
    return found | ({DTYPE: dtypes.pop()} if len(dtypes) == 1 else {})
