"""The verbs of conversion, as the command line and other code call them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint, open_source
from draftkit.convert.destinations import UNIFIED, Destination, GgufLayout, destination_named
from draftkit.convert.detect import Format, detect, family_of, format_named
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf import mtp_gguf
from draftkit.convert.formats.gguf.heads import gguf_target_facts
from draftkit.convert.formats.mtp import mtp
from draftkit.convert.formats.mtp.heads import TargetHeads, find_heads
from draftkit.convert.formats.mtp.put_back import put_back
from draftkit.convert.plan import Plan, planned_so_far
from draftkit.convert.quantization import (
    quantized_plan,
    read_quantization,
    refuse_unread_weights,
    with_plain_weights,
)
from draftkit.convert.quantize import formats_by_part, quantized, read_formats
from draftkit.convert.unified import OnBytes, config_of, unify
from draftkit.engines.known import plain_parts
from draftkit.errors import DraftkitError, FormatError, LayoutError, command
from draftkit.hub.local_paths import copy_named, reachable
from draftkit.hub.locate import Located, locate
from draftkit.io.atomic import atomic_folder
from draftkit.io.finite import check_finite
from draftkit.io.jsonfile import dump, object_in
from draftkit.io.records import read_record
from draftkit.io.shown import Rows, Shown
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.provenance import Provenance, facts_shown
from draftkit.layout.target import ADAPTER_CONFIG, TargetFacts, language_model, read_target_facts, require_whole_model

ADAPTER_FOLDER = "adapter"  # in a checkpoint of `train --lora`, beside the weights that it is merged into
UNKNOWN = "unknown"  # the format of a checkpoint that none recognizes


@dataclass(frozen=True)
class Reading(Shown):
    """A foreign checkpoint, recognized, and the plan to bring it into the layout."""

    checkpoint: Checkpoint
    target: TargetFacts | None
    plan: Plan

    def shown(self) -> Iterator[str | Rows]:
        """What it is, what is missing, and its facts."""
        lacks = "".join(f"; not stated: {name}" for name, _ in self.plan.missing)
        yield f"{self.checkpoint.source.name}: {self.plan.format}{lacks}"
        yield facts_shown(self.plan.facts)


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; nothing has been written.

    `reading` is None for a unified source. `draft` is the source in the layout, its tensors not read yet; None while
    facts are missing, which `reading.plan.missing` lists. `export` is None for the unified layout itself.
    """

    source: Located
    destination: Destination
    target: TargetFacts | None
    reading: Reading | None
    draft: Draft | None
    export: Export | None

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses of the conversion: what the source has and the result will not have."""
        return self.unagreed_losses + (self.reading.plan.agreed_losses if self.reading else ())

    @property
    def unagreed_losses(self) -> tuple[str, ...]:
        """The losses to which the user has not agreed by naming them."""
        read = self.reading.plan.losses if self.reading else ()
        return read + (self.export.losses if self.export else ())

    def require_draft(self) -> Draft:
        """The draft. Raises `LayoutError` that lists the missing facts."""
        if self.draft is None:
            assert self.reading is not None
            self.reading.plan.require_spec(self.source.path)
        assert self.draft is not None
        return self.draft

    @property
    def config(self) -> dict[str, object]:
        """What the `config.json` of the unified folder says that is written. Raises as `require_draft`."""
        draft = self.require_draft()
        return object_in(dump(config_of(draft.spec, draft.provenance)).encode(), self.source.path)

    def check_finite(self) -> None:
        """Read every tensor. Raises `FormatError` that names those with NaN or inf."""
        check_finite(self.require_draft().tensors, self.require_draft().path)

    def write(
        self,
        out: Path,
        *,
        force: bool = False,
        allow_lossy: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> Path:
        """Carry the plan out. Raises `DraftkitError`; then `out` is as it was."""
        draft = self.require_draft()
        if self.unagreed_losses and not allow_lossy:
            raise self._lossy(draft)
        self.destination.write(out, self._outgoing, self.export, force=force, on_bytes=on_bytes)
        return out

    def _lossy(self, draft: Draft) -> LayoutError:
        listing = "\n    ".join(self.unagreed_losses)
        others = self.destination.without_loss(draft, self.target)
        instead = f"without loss: {', '.join(f'--to {name}' for name in others)}; " if others else ""
        return LayoutError(
            f"converting {self.source.name} to {self.destination.name} loses:\n    {listing}",
            where=self.source.path,
            hint=f"{instead}or pass --allow-lossy, and the losses are recorded with the result",
        )

    @property
    def output_bytes(self) -> int:
        """Size of all tensors that will be written."""
        return self.destination.nbytes(self._outgoing, self.export)

    @property
    def _outgoing(self) -> Outgoing:
        return Outgoing(self.require_draft(), self.target, self.destination.name)


def plan_conversion(
    source: str | Located,
    *,
    to: str = UNIFIED,
    target: str | TargetFacts | None = None,
    revision: str | None = None,
    format: str | None = None,
    overrides: Mapping[str, str] | None = None,
    ignored_keys: Sequence[str] = (),
    digest: bool = False,
    stored: str | None = None,
    quantize: str | None = None,
) -> Conversion:
    """Find a checkpoint, recognize its format and plan its conversion.

    `source` and `target` are paths, Hub ids (`org/name[@revision]`) or `zoo:NAME`; of the target only `config.json` is
    read, unless the destination stores a copy of its tensors. Either may be opened already. `format` is a name that
    `draftkit inspect --formats` lists, recognized when None. `overrides`: fact → value as text. `ignored_keys`: keys of
    the source's config whose effect is unknown, and which are dropped all the same; that is recorded as a loss.
    `digest`: take the SHA-256 of large local files too. `stored`: the type of the matrices in a GGUF file, as `q8_0`.
    `quantize`: the formats of weights by part, as `read_formats` reads them. Raises `DraftkitError`.
    """
    destination = destination_named(to, stored)
    located = _opened(source, revision)
    if not located.is_unified:
        reading = read_foreign(located, target, format, overrides, ignored_keys)
        draft = None
        if reading.plan.spec is not None or reading.plan.problems:
            draft = unify(reading.checkpoint, reading.plan, reading.target, digest=digest)
            draft = _quantized(draft, quantize, to)
        return _plan_destination(located, destination, reading.target, reading, draft)
    draft = read_draft(located.path, located.config)
    if to == UNIFIED and not overrides and quantize is None:
        raise LayoutError(
            f"{located.name} is a unified draft already",
            where=located.path,
            hint=command("draftkit", "inspect", source if isinstance(source, str) else located.name),
        )
    if ignored_keys:
        raise LayoutError(f"{located.name} is a unified draft: it has no config keys to ignore", where=located.path)
    if overrides:
        draft = _overridden(draft, overrides)
    target_facts = named_target_facts(target or reachable(draft.provenance.target))
    return _plan_destination(located, destination, target_facts, None, _quantized(draft, quantize, to))


def _quantized(draft: Draft, formats: str | None, to: str) -> Draft:
    """The draft with the weights quantized that a user asks for, but for those that the destination's engine has
    plain. Raises `LayoutError` where the user names one of these."""
    if formats is None:
        return draft
    chosen, plain = formats_by_part(draft, read_formats(formats)), plain_parts(to)
    for part in chosen.keys() & plain.keys():
        if f"{part}:" in formats:
            raise LayoutError(
                f"{plain[part]} reads no quantized {part}",
                where=draft.path,
                hint=f"leave out {part}, or name another --to",
            )
    return quantized(draft, {part: format for part, format in chosen.items() if part not in plain})


def read_foreign(
    located: Located,
    target: str | TargetFacts | None = None,
    format: str | None = None,
    overrides: Mapping[str, str] | None = None,
    ignored_keys: Sequence[str] = (),
) -> Reading:
    """Recognize a foreign checkpoint that is on this machine, and plan how it becomes a unified draft."""
    reading = describe_foreign(located, target, format, overrides, ignored_keys)
    if reading.plan.refusal is not None:
        raise reading.plan.refusal
    return reading


def describe_foreign(
    located: Located,
    target: str | TargetFacts | None = None,
    format: str | None = None,
    overrides: Mapping[str, str] | None = None,
    ignored_keys: Sequence[str] = (),
) -> Reading:
    """The same as `read_foreign`, but of a checkpoint that contradicts itself: what could be read of it, and why the
    rest could not.

    The format of one that none recognizes is `UNKNOWN`.
    """
    checkpoint = open_source(located)
    target_facts = named_target_facts(target or located.default_target)
    recognized = format_named(format) if format else None
    facts = Facts(checkpoint.config, checkpoint.config_path, overrides, ignored_keys)
    try:
        plain = with_plain_weights(checkpoint)
        recognized = recognized or detect(plain)
        if getattr(recognized, "VERBATIM", False):
            plan = recognized.plan(checkpoint, facts, target_facts)
        else:
            refuse_unread_weights(checkpoint)
            quantization = read_quantization(plain, facts)
            plan = quantized_plan(recognized.plan(plain, facts, target_facts), quantization, checkpoint, plain)
    except DraftkitError as error:
        misnamed = recognized and format and _misnamed(recognized, checkpoint)
        plan = planned_so_far(recognized.NAME if recognized else UNKNOWN, facts, misnamed or error)
    else:
        misnamed = _misnamed(recognized, checkpoint, of_other_family=True) if format and plan.spec is None else None
        plan = planned_so_far(recognized.NAME, facts, misnamed) if misnamed else plan
    return Reading(checkpoint, target_facts, plan)


def _misnamed(named: Format, checkpoint: Checkpoint, *, of_other_family: bool = False) -> DraftkitError | None:
    """What to say of a checkpoint that cannot be read as the format that the user names: what it looks like, where
    another format (`of_other_family`: one of another family) recognizes it and that one does not. The heads of a target
    are none of its own format."""
    if named is mtp or named.recognize(checkpoint):
        return None
    try:
        found = detect(checkpoint)
    except DraftkitError:
        return None
    if of_other_family and family_of(found) == family_of(named):
        return None
    return FormatError(
        f"this looks like {found.TITLE}, the format {found.NAME}, and cannot be read as {named.NAME}",
        where=checkpoint.source.path,
        hint=f"leave out --from {named.NAME}",
    )


def convert_checkpoint(
    source: str | Located,
    out: Path | None = None,
    *,
    to: str = UNIFIED,
    target: str | TargetFacts | None = None,
    revision: str | None = None,
    format: str | None = None,
    overrides: Mapping[str, str] | None = None,
    ignored_keys: Sequence[str] = (),
    stored: str | None = None,
    quantize: str | None = None,
    force: bool = False,
    allow_lossy: bool = False,
    on_bytes: OnBytes | None = None,
) -> Path:
    """Convert a draft checkpoint of any known format into the unified layout, or to another (`to`), under `out`.

    Without `out`, a folder named after the source is made in the current one. The folder written is returned.
    Raises `DraftkitError`: with `LayoutError` for facts that are missing and for losses without `allow_lossy`. The
    other arguments are those of `plan_conversion`.
    """
    conversion = plan_conversion(
        source,
        to=to,
        target=target,
        revision=revision,
        format=format,
        overrides=overrides,
        ignored_keys=ignored_keys,
        stored=stored,
        quantize=quantize,
    )
    out = out or default_output(conversion)
    return conversion.write(out, force=force, allow_lossy=allow_lossy, on_bytes=on_bytes)


def target_with_heads(source: str | Located, *, revision: str | None = None) -> tuple[Checkpoint, TargetHeads] | None:
    """A target and the multi-token prediction heads that its config promises or its weights hold; None for anything
    else. Reads headers alone. Raises `DraftkitError`."""
    located = _opened(source, revision)
    if located.is_unified or located.path.is_file():
        return None
    checkpoint = open_source(located)
    heads = None if checkpoint.adapter is not None else find_heads(checkpoint)
    if heads is None or not heads.like or not (heads.promised or heads.tensors):
        return None
    return checkpoint, heads


def put_heads_back(source: str, target: str, out: Path | None = None) -> tuple[Path, list[str]]:
    """Put the unified heads `source` back into a target: into its own folder, or into a new one, `out`, which shares
    the other weights with it; of a GGUF file, into the new file `out`. Returns it, and the names of the files that were
    written anew.

    Raises `DraftkitError`; then nothing has changed.
    """
    heads, located = read_draft(locate(source).path), locate(target, as_file=True)
    if located.path.is_file():
        return _put_into_file(heads, located, out)
    if out is None and located.repo is not None:
        raise DraftkitError(
            f"{target} lies in the cache of the Hub, which is not changed",
            hint=f"{command('draftkit', 'convert', source, 'OUT', '--into', target)} writes a folder of its own",
        )
    out = out or located.path
    return out, put_back(heads, open_source(located), out)


def take_adapter(source: str, out: Path) -> Path:
    """Copy the adapter that a training run has written beside a draft's merged weights, into the new folder `out`.

    Raises `DraftkitError` for a draft without one.
    """
    folder = locate(source).path / ADAPTER_FOLDER
    if not (folder / ADAPTER_CONFIG).is_file():
        raise DraftkitError(
            f"{source} has no adapter beside its weights: one is merged into them, or they were trained whole",
            where=folder,
            hint="train --lora writes one into each checkpoint: draftkit convert RUN/checkpoint-N OUT --part adapter",
        )
    with atomic_folder(out) as new:
        for path in sorted(folder.iterdir()):
            copy_named(path, new / path.name)
    return out


def _put_into_file(heads: Draft, target: Located, out: Path | None) -> tuple[Path, list[str]]:
    if out is None:
        expected = command("OUT.gguf", "--into", target.name)
        raise DraftkitError("heads are put into a GGUF file of its own", expected=expected)
    check_finite(heads.tensors, heads.path)
    file = GgufLayout()
    outgoing = Outgoing(heads, gguf_target_facts(target), file.name)
    file.write(out, outgoing, mtp_gguf.export_into(outgoing), force=False, on_bytes=None)
    return out, [out.name]


def default_output(conversion: Conversion) -> Path:
    """The output in the current folder where none is named: the source's name with a suffix."""
    source = conversion.source
    name = source.repo.split("/")[1] if source.repo else Path(os.path.abspath(source.path)).name
    return Path(conversion.destination.default_name(name, conversion.require_draft().spec.method))


def inspect_checkpoint(
    source: str | Located,
    *,
    target: str | TargetFacts | None = None,
    revision: str | None = None,
    format: str | None = None,
) -> Draft | Reading:
    """What a folder or repository holds: a validated `Draft`, or the `Reading` that would make it one.

    A foreign checkpoint that lacks facts is not an error here; its plan lists them. Raises `DraftkitError` for what
    cannot be read or recognized.
    """
    found = describe_checkpoint(source, target=target, revision=revision, format=format)
    if isinstance(found, Reading) and found.plan.refusal is not None:
        raise found.plan.refusal
    return found


def describe_checkpoint(
    source: str | Located,
    *,
    target: str | TargetFacts | None = None,
    revision: str | None = None,
    format: str | None = None,
) -> Draft | Reading:
    """`inspect_checkpoint`, where a checkpoint that contradicts itself has what could be read, and a `plan.refusal`."""
    located = _opened(source, revision)
    if not located.is_unified:
        return describe_foreign(located, target, format)
    try:
        return read_draft(located.path, located.config)
    except LayoutError as error:
        return _describe_refused(located, error)


def _describe_refused(located: Located, refusal: LayoutError) -> Reading:
    """A unified draft that is not valid: its tensors, and the facts that its provenance has."""
    checkpoint = open_source(located)
    block = checkpoint.config["draftkit"]
    provenance, _ = read_record(Provenance, block.get("provenance") if isinstance(block, dict) else None)
    facts = Facts({}, checkpoint.config_path)
    facts.found = list(provenance.facts) if provenance else []
    return Reading(checkpoint, None, planned_so_far(UNIFIED, facts, refusal))


def _plan_destination(
    source: Located, destination: Destination, target: TargetFacts | None, reading: Reading | None, draft: Draft | None
) -> Conversion:
    if draft is None:
        return Conversion(source, destination, target, reading, None, None)
    if target is not None:
        _check_captured_layers(draft, target)
        _check_size(source.name, draft, target, adapter=reading is not None and reading.checkpoint.adapter is not None)
    return Conversion(source, destination, target, reading, *destination.plan(draft, target))


def _check_captured_layers(draft: Draft, target: TargetFacts) -> None:
    """Raise `LayoutError` where the draft reads states that the target does not have: 0 (embeddings) to its last."""
    architecture, layers = draft.spec.architecture, target.num_hidden_layers
    beyond = [i for i in architecture.aux_layer_ids or () if not 0 <= i <= layers]
    if beyond:
        usual = [list(ids) for ids in architecture.usual_layers(layers)]
        meant = f"did you mean --set aux_layer_ids={','.join(map(str, usual[0]))}? or " if usual else ""
        raise LayoutError(
            f"the draft reads the states after layers {', '.join(map(str, beyond))}, and {target.name} has {layers}",
            where=draft.path,
            expected=f"aux_layer_ids from 0 to {layers}",
            hint=f"{meant}pass the target that the draft was trained for with --target",
        )


def _check_size(name: str, draft: Draft, target: TargetFacts, *, adapter: bool) -> None:
    """Raise `LayoutError` for a model of its own with more layers than its target, none narrower: it can only be
    slower. An `adapter` of a model with as many is one of the target's, unless it drafts in parallel."""
    config = language_model(getattr(draft.spec.architecture, "config", {}))
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(width, int)):
        return
    parallel = getattr(draft.spec.architecture, "parallel", None) is not None
    if adapter and not parallel and (layers, width) == (target.num_hidden_layers, target.hidden_size):
        merge = command("draftkit", "convert", name, "MERGED")
        raise LayoutError(
            f"{name} is an adapter of a model of {target.name}'s size: merged, it is a target and no draft",
            where=draft.path,
            hint=f"{merge}, without --target, merges it: pass MERGED as a draft's target",
        )
    if layers > target.num_hidden_layers and width >= target.hidden_size:
        sizes = f"{layers} layers of {width} and {target.num_hidden_layers} of {target.hidden_size}"
        raise LayoutError(
            f"{name} is larger than its target {target.name}: {sizes}",
            where=draft.path,
            hint=f"did you swap them? {target.name} may be the draft, and {name} its target",
        )


def _overridden(draft: Draft, overrides: Mapping[str, str]) -> Draft:
    """A unified draft with other facts."""
    facts = Facts({}, draft.path / "config.json", overrides)
    facts.found = list(draft.provenance.facts)
    spec = facts.overridden(draft.spec)
    return replace(draft, spec=spec, provenance=replace(draft.provenance, facts=tuple(facts.found)))


def _opened(source: str | Located, revision: str | None = None) -> Located:
    return locate(source, revision=revision, as_file=True) if isinstance(source, str) else source


def named_target_facts(target: str | TargetFacts | None) -> TargetFacts | None:
    """The facts of a target by its name, where one is given. Raises `DraftkitError`."""
    if not isinstance(target, str):
        return target
    return target_facts(locate(target, weights=False, tokenizer=False, as_file=True))


def target_facts(located: Located) -> TargetFacts:
    """The facts of a target that is on this machine. Raises `DraftkitError`."""
    require_whole_model(located.path)
    if located.path.is_file():
        return gguf_target_facts(located)
    return read_target_facts(located.path, located.name, located.revision, located.config)
