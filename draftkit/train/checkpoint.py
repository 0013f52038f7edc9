"""A draft in training as a unified folder, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftkit.convert.unified import write_draft
from draftkit.engines.serving import TOKENS_FACT
from draftkit.hub.local_paths import public_name
from draftkit.io.handles import memory_handle
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.provenance import FactOrigin, Provenance
from draftkit.layout.spec import HF_DTYPES, DraftSpec
from draftkit.version import __version__


def save_draft(
    out: Path,
    spec: DraftSpec,
    tensors: Mapping[str, Tensor],
    *,
    target: str,
    files: tuple[Path, ...] = (),
    dtype: torch.dtype | None = None,
    speculative_tokens: int | None = None,
    force: bool = False,
) -> None:
    """Write a unified draft folder. `dtype`: what floating-point weights are cast to, None to keep theirs.

    `speculative_tokens`: the draft tokens a round that it was trained for, None where more may be asked of it.
    `files`: the tokenizer of a causal language model. Raises `LayoutError` when the tensors do not fit the spec.
    """
    draft = draft_in_memory(
        spec, tensors, target=target, out=out, files=files, dtype=dtype, speculative_tokens=speculative_tokens
    )
    write_draft(out, draft, force=force)


def draft_in_memory(
    spec: DraftSpec,
    tensors: Mapping[str, Tensor],
    *,
    target: str,
    out: Path = Path("in-memory"),
    files: tuple[Path, ...] = (),
    dtype: torch.dtype | None = None,
    speculative_tokens: int | None = None,
) -> Draft:
    """What `save_draft` writes to `out`, as it is read from there."""
    handles = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        handles[name] = memory_handle(name, tensor.contiguous(), out)
    floats = [handle.dtype for name, handle in handles.items() if tensors[name].is_floating_point()]
    architecture = spec.architecture.stored_in(HF_DTYPES[floats[0]])
    spec = DraftSpec(architecture=architecture, dtype=floats[0])
    provenance = Provenance(
        source="draftkit train",
        source_revision=None,
        format="trained",
        files=(),
        target=public_name(target),
        target_revision=None,
        facts=_facts(spec, speculative_tokens),
        dropped_config={},
        losses=(),
        draftkit_version=__version__,
    )
    return Draft(out, spec, provenance, handles, files)


def _facts(spec: DraftSpec, speculative_tokens: int | None) -> tuple[FactOrigin, ...]:
    """What the draft was trained as; the config of a causal language model stands in its own file."""
    facts = {name: (value, "as it was trained") for name, value in spec.facts().items() if name != "config"}
    if speculative_tokens is not None:
        facts[TOKENS_FACT] = (speculative_tokens, "the steps of its training")
    return tuple(FactOrigin(name=n, value=str(v), origin="stated", note=note) for n, (v, note) in facts.items())


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """What `save_draft` wrote."""
    return {name: handle.load() for name, handle in read_draft(folder).tensors.items()}
