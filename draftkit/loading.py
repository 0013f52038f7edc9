"""From what a user names to what the engine runs: targets, and drafts of any known format."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.convert.api import UNKNOWN, convert_checkpoint, describe_checkpoint
from draftkit.errors import DraftkitError, SourceError, TargetError, UnsupportedTarget
from draftkit.hub.locate import Located, locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.architecture import Architecture
from draftkit.layout.families import families, named
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.provenance import Provenance
from draftkit.layout.spec import DraftSpec
from draftkit.runtime.architecture_check import require_equal_decoding
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters import family_of
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.spreading import spreads_targets
from draftkit.targets.target import load_target, read_target_config
from draftkit.version import __version__

OWN_HEAD = "mtp"  # what users call the multi-token prediction head of the target


def load_model(source: str, *, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target (path, Hub id or `zoo:target`) and its tokenizer. Raises `DraftkitError`."""
    tokenizer = load_target_tokenizer(source)
    folder = locate(source).path
    require_equal_decoding(read_target_config(folder))
    model = load_target(folder, device=device, dtype=dtype, attention=ATTENTION, spread=spreads_targets())
    return model, tokenizer


def load_target_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target. Raises `DraftkitError`, and says so where the target is a draft itself."""
    folder = locate(source, weights=False).path
    try:
        return load_tokenizer(folder, "target")
    except DraftkitError:
        what = _draft_format(source)
        if what is None:
            raise
        raise TargetError(
            f"{source} is a draft ({what}), not a target",
            where=folder,
            hint="did you swap --target and --draft? --target is the model that the draft was made for",
        ) from None


def _draft_format(source: str) -> str | None:
    """The format of a checkpoint that is a draft and no model of its own; None of anything else."""
    try:
        found = describe_checkpoint(source)
    except DraftkitError:
        return None
    if isinstance(found, Draft):
        return None if found.spec.architecture.own_model else found.spec.method
    spec = found.plan.spec
    return None if found.plan.format == UNKNOWN or (spec and spec.architecture.own_model) else found.plan.format


def runtime_refusal(target: str) -> UnsupportedTarget | None:
    """Why draftkit's own runtime does not run a target, from its configuration alone; None where it does.

    Raises `DraftkitError` for what is no target of any engine.
    """
    try:
        require_equal_decoding(read_target_config(locate(target, weights=False).path))
    except UnsupportedTarget as refusal:
        return refusal
    return None


def require_runtime(target: str, otherwise: str) -> None:
    """Raise `UnsupportedTarget` where draftkit's own runtime does not run a target, saying what to do `otherwise`."""
    if (refusal := runtime_refusal(target)) is not None:
        raise refusal.otherwise(otherwise)


@contextmanager
def open_draft(source: str, target: str) -> Iterator[Draft]:
    """The unified draft of a source; a foreign checkpoint is converted into a temporary folder on the way.

    Drafts without a checkpoint are named, as `ngram:2-4`; `mtp` is the target's own head. Raises `DraftkitError`.
    """
    if source == OWN_HEAD:
        with temporary_folder() as scratch:
            yield read_draft(convert_checkpoint(target, scratch / "draft", format=OWN_HEAD))
        return
    if (architecture := named(source)) is not None:
        yield _without_checkpoint(architecture, source)
        return
    located = _located(source)
    if is_unified(located.path):
        yield read_draft(located.path)
        return
    with temporary_folder() as scratch, _named(scratch / "draft", source):
        yield read_draft(convert_checkpoint(source, scratch / "draft", target=target))


def _located(source: str) -> Located:
    """Where a draft with a checkpoint lies. Raises `SourceError`, which asks whether one without was meant."""
    try:
        return locate(source, as_file=True)
    except SourceError as error:
        names = [OWN_HEAD, *(name for name, family in families().items() if not family.has_checkpoint)]
        close = [] if "/" in source else difflib.get_close_matches(source.partition(":")[0], names, n=1)
        if close:
            raise SourceError(f"no draft is called {source}, did you mean {close[0]}?") from error
        raise


@contextmanager
def _named(folder: Path, source: str) -> Iterator[None]:
    """Errors say of the source what they say of the folder that it was converted into."""
    try:
        yield
    except DraftkitError as error:
        error.args = (str(error).replace(str(folder), source),)
        raise


def _without_checkpoint(architecture: Architecture, source: str) -> Draft:
    provenance = Provenance(
        source=source, source_revision=None, format=architecture.method, files=(), target=None, target_revision=None,
        facts=(), dropped_config={}, losses=(), draftkit_version=__version__,
    )  # fmt: skip
    return Draft(Path(source), DraftSpec(architecture=architecture, dtype="F32"), provenance, tensors={})


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Drafter:
    """The drafter that runs a draft, on the target's device and in its dtype.

    With the target's `tokenizer`, a causal language model may have another one: it drafts the tokens that both share.
    Raises `TargetError` when draft and target do not fit, and for a causal language model that draftkit does not run.
    """
    if draft.spec.architecture.own_model:
        require_equal_decoding(read_target_config(draft.path))
    family = family_of(draft)
    drafter: Drafter = family.load_drafter(draft, target, tokenizer)
    drafter.slot_bytes = family.slot_bytes(draft, target.dtype)
    return drafter
