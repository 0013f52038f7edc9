"""Finding the format of a checkpoint: every one in `draftkit.convert.formats` is asked.

Kinds of drafts that have a name and no format here are refused by it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from draftkit.convert import formats
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats import gguf
from draftkit.convert.formats.mtp.heads import find_heads
from draftkit.convert.plan import Plan
from draftkit.convert.quantization import refuse_unread_weights
from draftkit.engines.known import asked, known
from draftkit.engines.releases import Release, is_there
from draftkit.engines.speculators import ARCHITECTURES, KIND
from draftkit.errors import FormatError
from draftkit.io.records import did_you_mean
from draftkit.layout.families import family_names
from draftkit.layout.mtp import head_kind
from draftkit.layout.target import TargetFacts, language_model


class Format(Protocol):
    """What the module of a format provides, anywhere in `draftkit/convert/formats/`.

    One of weights that are kept as they lie, however they are quantized, has `VERBATIM = True` too.
    """

    NAME: str
    TITLE: str
    __name__: str

    def recognize(self, checkpoint: Checkpoint) -> int:
        """How specific a match the checkpoint is, from its tensor names first: 0 is none.

        1 goes to a layout that others build on; a trainer's own marks make it 2 or more. The highest wins.
        """

    def plan(self, checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
        """The conversion into the unified layout. Raises `DraftkitError` for what cannot be converted."""


def all_formats() -> list[Format]:
    """The known formats in alphabetical order."""
    modules = (importlib.import_module(module.name) for module in _modules() if not module.ispkg)
    found: list[Format] = [module for module in modules if hasattr(module, "NAME")]
    return sorted(found, key=lambda format: format.NAME)


def _modules() -> Iterator[pkgutil.ModuleInfo]:
    """Every module below `formats/`; those without a `NAME` are what formats share."""
    return pkgutil.walk_packages(formats.__path__, f"{formats.__name__}.")


def format_named(name: str) -> Format:
    """The format that the user names. Raises `FormatError` for an unknown name."""
    known = {format.NAME: format for format in all_formats()}
    if name not in known:
        raise FormatError(
            f"there is no format {name}{did_you_mean(name, known)}",
            expected="one of " + ", ".join(known),
            hint="draftkit inspect --formats",
        )
    return known[name]


def family_of(format: Format) -> str:
    """The family whose name its file begins with."""
    file = format.__name__.rpartition(".")[2]
    return max((name for name in family_names() if file == name or file.startswith(f"{name}_")), key=len, default="")


def detect(checkpoint: Checkpoint) -> Format:
    """The format that recognizes the checkpoint best. Raises `FormatError` when none or several do."""
    refuse_by_name(checkpoint)
    known = [format for format in all_formats() if _of_file(format) == checkpoint.source.path.is_file()]
    scores = {format.NAME: format.recognize(checkpoint) for format in known}
    matches = [format for format in known if scores[format.NAME] == max(scores.values()) > 0]
    if len(matches) == 1:
        return matches[0]
    refuse_unread_weights(checkpoint)  # whose names may be those of no format
    if matches:
        names = ", ".join(format.NAME for format in matches)
        raise FormatError(
            f"the checkpoint could be any of: {names}", where=checkpoint.source.path, hint="say which with --from"
        )
    sample = [*list(checkpoint.tensors)[:6], *(["…"] if len(checkpoint.tensors) > 6 else [])]
    called = ", ".join(checkpoint.kind_names)
    if loading := _loaded_as_it_is(checkpoint.architectures):
        raise FormatError(
            f"this is a draft of the class {called}; draftkit cannot convert it yet, with these "
            f"{len(checkpoint.tensors)} tensors: {', '.join(sample)}",
            where=checkpoint.source.path,
            hint=loading,
        )
    raise FormatError(
        (f"config.json calls this {called}, and " if called else "")
        + f"no known draft format has these {len(checkpoint.tensors)} tensors: {', '.join(sample)}",
        where=checkpoint.source.path,
        hint="draftkit inspect --formats lists what can be read",
    )


def _loaded_as_it_is(architectures: Sequence[str]) -> str | None:
    """The engines that have a draft's class, and the releases that do, in words; None where none has."""
    found = []
    for engine, releases in known().items():
        having = [one for one in releases if any(is_there(one.architectures.get(name)) for name in architectures)]
        if having:
            newest = having[0] is releases[0]
            numbers = ", ".join(release.number for release in having)
            found.append(f"{engine} ≥ {having[-1].number}" if newest else f"{engine} {numbers}")
    return f"loaded as they are by {' and '.join(found)}" if found else None


def _of_file(format: Format) -> bool:
    """Whether it is one of GGUF files, and not of folders."""
    return format.__name__.startswith(f"{gguf.__name__}.")


@dataclass(frozen=True)
class OtherKind:
    """A kind of drafts that draftkit does not convert.

    `tensors`: a pattern in a tensor's name that no other kind has, and that `named` may stand for.

    `why`: why it never will, where that is known.

    `named`: a pattern in the names that a config gives it: of its classes, of the speculators library's type, of its
    projector. `model_type`: the config's, where no other kind has it. `method`: vLLM's name for it, if vLLM runs it,
    and `architecture` its class there, where it has one of its own. `remedy`: who else serves it, or what to do.
    """

    name: str
    tensors: str
    named: str | None = None
    model_type: str | None = None
    why: str = ""
    method: str | None = None
    architecture: str | None = None
    remedy: str | None = None

    @property
    def hint(self) -> str | None:
        """The next step for a user who has a draft of this kind."""
        loading = [] if self.method is None else [release for release in known()["vLLM"] if self._loads(release)]
        if not loading:
            return self.remedy
        newest = known()["vLLM"][0] in loading
        since = f"vLLM ≥ {loading[-1].number}" if newest else f"vLLM {', '.join(one.number for one in loading)}"
        found = f"{since} loads such drafts as they are, with method {self.method}"
        without = [release for release in asked("vLLM") if release not in loading]
        return f"{without[0]} has no class for it; {found}" if len(without) == len(asked("vLLM")) == 1 else found

    def _loads(self, release: Release) -> bool:
        """Whether a release of vLLM has the method, and the class where it has one of its own."""
        rows = [release.methods.get(self.method or "")]
        rows += [] if self.architecture is None else [release.architectures.get(self.architecture)]
        return all(map(is_there, rows))

    def has_tensors(self, checkpoint: Checkpoint) -> bool:
        return any(re.search(self.tensors, name) for name in checkpoint.tensors)

    def is_named(self, checkpoint: Checkpoint) -> bool:
        if self.model_type is not None and checkpoint.config.get("model_type") == self.model_type:
            return True
        pattern = self.named or self.name
        return any(re.search(pattern, name, re.IGNORECASE) for name in checkpoint.kind_names)


# What their trainers and engines call their parts: z-lab/dflash, deepseek-ai/DeepSpec, SpecForge, speculators 0.9, NeMo
# Automodel, and the MTP and DSpark classes of vLLM 0.32. The later ones have parts that the earlier ones have too.
NEVER = r"(?!)"  # a pattern of kinds that no tensor's name tells
KINDS = (
    OtherKind(
        "DFlash with Laguna's layers", r"^aux_hidden_norms\.", "DFlashLaguna",
        method="dflash", architecture="DFlashLagunaForCausalLM",
    ),
    OtherKind(
        "DSpark within DeepSeek-V4", r"\bmtp\.\d+\.(main_proj|markov_head)\b", "DSparkV41|DeepseekV4DSpark",
        method="dspark", architecture="DSparkDraftModel",
    ),
    OtherKind(
        "DSpark with Gemma-4's layers", r"^layers\.\d+\.layer_scalar$", "Gemma4DSpark",
        method="dspark", architecture="Gemma4DSparkModel",
    ),
    OtherKind(
        "EAGLE-3 with latent attention", r"^(midlayer|layers\.\d+)\.self_attn\.kv_a_proj_with_mqa\.", "Eagle3Deepseek",
        method="eagle3", architecture="Eagle3DeepseekV2ForCausalLM",
    ),
    OtherKind(
        "EAGLE-3 with experts", r"^(midlayer|layers\.\d+)\.mlp\.(gate\.weight$|experts\.)", r"Moe\w*Eagle3",
    ),
    OtherKind("DFlash with latent attention", NEVER, "DeepseekDFlash"),
    OtherKind(
        "DFlash2 with a beam", NEVER, "DFlash2Beam", method="dflash", architecture="DFlash2BeamDraftModel",
    ),
    OtherKind(
        "MTP of Nemotron Parse", r"^decoder\.extra_(heads|proj)\.0\.", "ParseAuxMTP",
        method="mtp", architecture="ParseAuxMTPModel",
    ),
    OtherKind("Domino", r"^(logit_head\.)?prefix_gru\.", "domino", remedy="SGLang serves it, with DFLASH"),
    OtherKind(
        "DFlare", r"^layer_fusion_weights$|\.self_attn\.[kv]_proj_target\.", "dflare",
        remedy="AngelSlim runs it, which trains it",
    ),
    OtherKind("XPress", r"^xpress_head\.", "Qwen3XPress", method="dflash", architecture="Qwen3XPressModel"),
    OtherKind(
        "XPress of the speculators library", r"^refiner_head\.", "^xpress$|XPressDraft",
        remedy="the speculators library runs it, which trains it",
    ),
    OtherKind(
        "Medusa in vLLM's layout", r"^(medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight$", "Medusa",
        method="medusa", architecture="MedusaModel",
    ),
    OtherKind("Medusa", r"^(medusa_heads?\.)?\d+\.\d+\.linear\.weight$", remedy="text-generation-inference serves it"),
    OtherKind(
        "EAGLE of vLLM's first engine", NEVER, "^EAGLEModel$", model_type="eagle",
        remedy="vLLM served it with its V0 engine; convert the draft that it was made from",
    ),
    OtherKind("Gemma-4's assistant in GGUF", r"^nextn\.pre_projection\.", NEVER, remedy="llama.cpp serves it"),
    OtherKind("DSpine", NEVER, "DSpine", why="no layout of it is published"),
    OtherKind("EAGLE-4", NEVER, "Eagle-?4(?!\\d)", why="its license is not open, so that its layout is not read"),
)  # fmt: skip
# Heads of targets that draftkit does not know: by the target's class, and of any whose config counts them so.
STEP5_HEADS = OtherKind("MTP of Step 5", NEVER, "Step5", method="mtp", architecture="Step5MTP")
COUNTED, ANY_HEADS = "num_mtp_layers", "TransformersForMTP"
HEADS = OtherKind("MTP", r"\b(mtp\.(fc|layers)\.|mtp_layers\.\d|eh_proj\.|mtp_linear_proj\.)", method="mtp")
NO_TARGET = (
    "neither architectures nor model_type of the config name a target whose heads draftkit or "
    "vLLM knows: correct them if they are wrong"
)
LIBRARY_HEADS = "mtp"  # the speculators library's kind of them, which has a format too
PROJECTORS = ("dflash", "dflash2", "dspark", "lilicorr")  # the heads of a block drafter that formats know
OTHER_LAYERS = re.compile(r"(?!Qwen3DSpark|DSpark)(\w+)DSpark\w*?(Draft)?Model")


# An adapter with which a target drafts for itself; its files are those of any other, so its name or its card tells.
UNO = OtherKind("UNO", NEVER, remedy="SGLang serves it, with --uno-lora-path; --from lora merges it all the same")
UNO_NAMED, UNO_CARD = re.compile(r"(?i)(?<![a-z])uno(?![a-z])"), re.compile(r"\bUNO\b")


def refuse_by_name(checkpoint: Checkpoint) -> None:
    """Raise `FormatError` for a draft of a kind that draftkit does not convert, with its name."""
    kind = next((kind for kind in KINDS if kind.has_tensors(checkpoint)), None)
    kind = kind or next((kind for kind in KINDS if kind.is_named(checkpoint)), None)
    kind = kind or _of_other_layers(checkpoint) or _of_other_target(checkpoint)
    kind = kind or _of_other_library(checkpoint) or _of_other_head(checkpoint) or _uno(checkpoint)
    if kind is not None:
        raise FormatError(
            f"this is a draft of the kind {kind.name}; draftkit cannot convert it"
            + (f": {kind.why}" if kind.why else ""),
            where=checkpoint.source.path,
            hint=kind.hint or _loaded_as_it_is(checkpoint.architectures),
        )


def _of_other_layers(checkpoint: Checkpoint) -> OtherKind | None:
    """DSpark whose class is named after other layers than Qwen3's: latent attention, norms of other kinds."""
    found = next((match for name in checkpoint.architectures if (match := OTHER_LAYERS.fullmatch(name))), None)
    if found is None:
        return None
    return OtherKind(f"DSpark with {found[1]}'s layers", "", method="dspark", architecture=f"{found[1]}DSparkModel")


def _of_other_target(checkpoint: Checkpoint) -> OtherKind | None:
    """Heads of a target that draftkit does not know, or without the sizes of one; those of others have a format."""
    own_format = checkpoint.gguf_architecture is not None or checkpoint.config.get(KIND) == LIBRARY_HEADS
    known = own_format or find_heads(checkpoint) is not None
    if known or not HEADS.has_tensors(checkpoint):
        return None
    if head_kind(checkpoint.config) is not None:
        return HEADS
    if STEP5_HEADS.is_named(checkpoint):
        return STEP5_HEADS
    if language_model(checkpoint.config).get(COUNTED):
        return replace(HEADS, architecture=ANY_HEADS)  # where vLLM runs the target by transformers' classes
    return replace(HEADS, method=None, remedy=NO_TARGET)


def _of_other_library(checkpoint: Checkpoint) -> OtherKind | None:
    """A type of the speculators library that is younger than what draftkit knows of it."""
    kind = checkpoint.config.get(KIND)
    if kind is None or kind in ("eagle", LIBRARY_HEADS, *ARCHITECTURES):
        return None
    return OtherKind(f"{kind} of the speculators library", "")


def _of_other_head(checkpoint: Checkpoint) -> OtherKind | None:
    """A block drafter whose config names a head that no format has: as plain DFlash it would run without it."""
    named = checkpoint.projector
    return (
        None
        if named is None or named in PROJECTORS
        else OtherKind(f"{named}, a block drafter with a head of that name", "")
    )


def _uno(checkpoint: Checkpoint) -> OtherKind | None:
    source, card = checkpoint.source, checkpoint.source.path / "README.md"
    if checkpoint.adapter is None:
        return None
    named = UNO_NAMED.search((source.repo or source.path.name).rpartition("/")[2])
    said = card.is_file() and UNO_CARD.search(card.read_text(encoding="utf-8", errors="replace"))
    return UNO if named or said else None
