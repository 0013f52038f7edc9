"""From what a user names to what the engine runs: targets, and drafts of any known format."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.convert.api import UNKNOWN, Conversion, describe_checkpoint, plan_conversion, target_facts
from draftkit.convert.destinations import UNIFIED
from draftkit.convert.formats.causal_lm.causal_lm import NAME as CAUSAL_LM
from draftkit.convert.quantization import plain_draft
from draftkit.convert.unified import write_draft
from draftkit.errors import DraftkitError, SourceError, TargetError, UnsupportedTarget
from draftkit.hub.locate import Located, locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.families import families, named
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.provenance import Provenance
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import ADAPTED, TargetFacts, language_model
from draftkit.models.rounded_inputs import round_inputs
from draftkit.runtime.architecture_check import require_equal_decoding
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters import family_of
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.targets.adapter import TargetAdapter
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.device_map import spreads_targets
from draftkit.targets.pretrained import read_config, read_model_config, reading_images
from draftkit.targets.target import Supported, end_token_ids, load_target, own_model, read_supported
from draftkit.targets.tokens import TargetEmbeddings, load_embeddings
from draftkit.targets.vision import Vision, load_vision, reads_images
from draftkit.version import __version__

OWN_HEAD = "mtp"  # what users call the multi-token prediction head of the target


@dataclass(eq=False)
class OpenedTarget:
    """A target that a user has named: located once, with its commit fixed; each part is read when it is first asked
    for, and kept. The parts raise `DraftkitError` where they cannot be had.

    `name` is what the user calls it. `adapter`: one that is merged into its weights when they are loaded. `images`: it
    is to read images, as `with_images` has it.
    """

    name: str
    located: Located
    adapter: TargetAdapter | None = None
    images: bool = False

    def with_images(self) -> OpenedTarget:
        """The same target, to be loaded with what reads images."""
        return self if self.images else replace(self, images=True)

    @property
    def config_folder(self) -> Path:
        """The target's folder, of which only the small files need be there."""
        return self.located.folder

    @cached_property
    def folder(self) -> Path:
        """The target's folder with its weights, which are fetched if need be."""
        return self.located.fetch()

    @cached_property
    def facts(self) -> TargetFacts:
        """The facts of the target that conversions need."""
        return target_facts(self.located)

    @cached_property
    def _read(self) -> PretrainedConfig | UnsupportedTarget:
        try:
            config = read_config(self.config_folder)
            return reading_images(config) if self.images else config
        except UnsupportedTarget as refusal:
            return refusal

    @cached_property
    def language_model(self) -> PretrainedConfig:
        """The configuration of the target's language model: as transformers reads it, or, for an architecture that
        transformers does not know and other engines may, as the file states it."""
        if isinstance(self._read, UnsupportedTarget):
            return PretrainedConfig.from_dict(language_model(self.located.config))
        return self._read.get_text_config()

    @cached_property
    def supported(self) -> Supported:
        """How draftkit's runtime loads it, and what that takes. Raises `TargetError` where it does not run it."""
        if isinstance(self._read, UnsupportedTarget):
            raise self._read
        supported = read_supported(self.config_folder, self._read)
        require_equal_decoding(supported.config)
        return supported

    @property
    def config(self) -> PretrainedConfig:
        """The configuration with which draftkit's runtime loads it. Raises as `supported`."""
        return self.supported.config

    def own_config(self, *, whole: bool = True) -> PretrainedConfig:
        """The configuration with which transformers builds it in its own way; `whole` as of `read_model_config`.

        Raises `TargetError`.
        """
        known = None if isinstance(self._read, UnsupportedTarget) else self._read
        return read_model_config(self.config_folder, known, whole=whole)

    @cached_property
    def refusal(self) -> UnsupportedTarget | None:
        """Why draftkit's own runtime does not run the target, by its configuration alone; None where it does.

        Raises `DraftkitError` for what is no target of any engine.
        """
        try:
            _ = self.config
        except UnsupportedTarget as refusal:
            return refusal
        return None

    def require_runtime(self, otherwise: str) -> None:
        """Raise `UnsupportedTarget` where draftkit's own runtime does not run it, saying what to do `otherwise`."""
        if self.refusal is not None:
            raise self.refusal.otherwise(otherwise)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer. Raises `DraftkitError`, and says so where the target is a draft itself."""
        try:
            return load_tokenizer(self.config_folder, "target")
        except DraftkitError:
            what = _draft_format(self.located)
            if what is None:
                raise
            raise TargetError(
                f"{self.name} is a draft ({what}), not a target",
                where=self.config_folder,
                hint="did you swap --target and --draft? --target is the model that the draft was made for",
            ) from None

    @cached_property
    def reads_images(self) -> bool:
        """Whether the target comes with a processor of images."""
        return reads_images(self.config_folder)

    @cached_property
    def vision(self) -> Vision:
        """What reads images for the target. Raises `DraftkitError` as `load_vision`."""
        return load_vision(self.config_folder, self.tokenizer)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a generation."""
        return end_token_ids(self.config_folder, self.language_model)

    def load(self, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model, for draftkit's runtime. Raises `DraftkitError`."""
        return self.adapted(
            load_target(
                self.folder, device=device, dtype=dtype, attention=ATTENTION, spread=spreads_targets(),
                known=self.supported,
            )
        )  # fmt: skip

    def adapted(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model with the adapter in its weights. Raises `DraftkitError` where it does not fit."""
        return model if self.adapter is None else self.adapter.merge_into(model)

    def mark(self, digest: str) -> str:
        """A digest of the target's folder, together with that of its adapter."""
        return digest if self.adapter is None else self.adapter.mark(digest)

    def require_no_adapter(self, by: str) -> None:
        """Raise `TargetError` where there is an adapter, which an engine is given by its own means."""
        if self.adapter is not None:
            raise TargetError(
                f"{by} is not given the adapter {self.adapter.name} by draftkit",
                hint="leave out --target-adapter, or measure with draftkit's own engine",
            )

    def load_embeddings(self, *, device: str, dtype: torch.dtype) -> TargetEmbeddings:
        """The target's embedding and its output layer alone; `device` becomes the current one. Raises
        `DraftkitError`."""
        return load_embeddings(self.folder, self.own_config(whole=False), device=device, dtype=dtype)


def open_target(target: str | OpenedTarget) -> OpenedTarget:
    """The target of a name: a path, Hub id or `zoo:NAME`, and after ` + ` an adapter on it. One that is opened already
    is returned as it is.

    Raises `SourceError` where there is none.
    """
    if isinstance(target, OpenedTarget):
        return target
    name, joined, adapter = target.partition(ADAPTED)
    base = locate(name, weights=False, as_file=True)
    return OpenedTarget(target, base, TargetAdapter.of(adapter, base) if joined else None)


def load_model(
    target: str | OpenedTarget, *, device: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target (path, Hub id or `zoo:target`) and its tokenizer. Raises `DraftkitError`."""
    target = open_target(target)
    tokenizer = target.tokenizer  # without one, nothing large is read
    return target.load(device=device, dtype=dtype), tokenizer


def _draft_format(source: Located) -> str | None:
    """The format of a checkpoint that is a draft and no model of its own; None of anything else."""
    try:
        source.fetch()
        found = describe_checkpoint(source)
    except DraftkitError:
        return None
    if isinstance(found, Draft):
        return None if found.spec.architecture.own_model else found.spec.method
    spec = found.plan.spec
    own_model = found.plan.format == CAUSAL_LM if spec is None else spec.architecture.own_model
    return None if found.plan.format == UNKNOWN or own_model else found.plan.format


@dataclass(eq=False)
class OpenedDraft:
    """A draft that a user has named, for a target: located once, with its commit fixed, and read or converted when the
    draft is first asked for. Drafts without a checkpoint are named, as `ngram:2-4`; `mtp` is the target's own head.

    `name` is what the user calls it. What is made on the way lasts until `stack` is closed.
    """

    name: str
    target: OpenedTarget
    stack: ExitStack

    @cached_property
    def located(self) -> Located | None:
        """Where the draft's checkpoint lies; None for a draft without one. Raises `SourceError`, which asks whether one
        without was meant."""
        if self.name == OWN_HEAD:
            self.target.located.fetch()
            return self.target.located
        return None if named(self.name) is not None else _located(self.name)

    @property
    def is_foreign(self) -> bool:
        """Whether the draft's checkpoint has to be converted first."""
        return self.located is not None and (self.name == OWN_HEAD or not self.located.is_unified)

    @cached_property
    def draft(self) -> Draft:
        """The unified draft; a foreign checkpoint is converted into a temporary folder. Raises `DraftkitError`."""
        if self.located is None:
            return _without_checkpoint(self.name)
        if not self.is_foreign:
            return read_draft(self.located.path, self.located.config)
        return self.converted()

    def plan(self, to: str = UNIFIED) -> Conversion:
        """The conversion of the draft's checkpoint to the layout `to`. Raises `DraftkitError`."""
        assert self.located is not None
        if self.name == OWN_HEAD:
            return plan_conversion(self.located, to=to, format=OWN_HEAD)
        return plan_conversion(self.located, to=to, target=self.target.facts)

    def converted(self, to: str = UNIFIED) -> Draft:
        """The draft in a temporary folder of a layout. Raises `DraftkitError`."""
        folder = self.stack.enter_context(temporary_folder()) / "draft"
        self.stack.enter_context(_named(folder, self.name))
        conversion = self.plan(to)
        return read_draft(conversion.write(folder), conversion.config)


@contextmanager
def open_draft(source: str, target: str | OpenedTarget) -> Iterator[Draft]:
    """The unified draft of a source; a foreign checkpoint is converted into a temporary folder on the way.

    Drafts without a checkpoint are named, as `ngram:2-4`; `mtp` is the target's own head. Raises `DraftkitError`.
    """
    with ExitStack() as stack:
        yield OpenedDraft(source, open_target(target), stack).draft


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


def _without_checkpoint(source: str) -> Draft:
    architecture = named(source)
    assert architecture is not None
    provenance = Provenance(
        source=source, source_revision=None, format=architecture.method, files=(), target=None, target_revision=None,
        facts=(), dropped_config={}, losses=(), draftkit_version=__version__,
    )  # fmt: skip
    return Draft(Path(source), DraftSpec(architecture=architecture, dtype="F32"), provenance, tensors={})


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Drafter:
    """The drafter that runs a draft, on the target's device and in its dtype.

    With the target's `tokenizer`, a causal language model may have another one: it drafts the tokens that both share.
    Raises `TargetError` when draft and target do not fit, and for a causal language model that draftkit does not run.
    One whose weights are quantized is loaded as a plain copy of it, and rounds its inputs as it says.
    """
    if draft.spec.architecture.own_model:
        require_equal_decoding(draft.kept(own_model).config)
    family = family_of(draft)
    drafter: Drafter
    if draft.spec.architecture.own_model and draft.spec.quantization is not None:
        with temporary_folder() as scratch:
            write_draft(scratch / "plain", plain_draft(draft))
            drafter = family.load_drafter(read_draft(scratch / "plain"), target, tokenizer)
        if drafter.module is not None:
            round_inputs(drafter.module, draft)
    else:
        drafter = family.load_drafter(draft, target, tokenizer)
    drafter.slot_bytes = family.slot_bytes(draft, target.dtype)
    return drafter
