"""The multi-token prediction heads of a target, taken out of its checkpoint or stored alone; every name is kept."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.detect import refuse_by_name
from draftkit.convert.facts import Facts
from draftkit.convert.formats.mtp.heads import TargetHeads, find_heads
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import FormatError
from draftkit.io.records import excerpt
from draftkit.layout.families.mtp import MtpSpec, StoredTensor
from draftkit.layout.mtp import COUNTS
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

NAME = "mtp"
SHOWN = 6  # names in a message
TITLE = "multi-token prediction heads of a target (--part mtp)"
VERBATIM = True


def recognize(checkpoint: Checkpoint) -> int:
    heads = find_heads(checkpoint)
    return int(heads is not None and bool(heads.tensors) and not heads.like)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    heads = find_heads(checkpoint)
    if heads is None:
        refuse_by_name(checkpoint)
    if heads is None or not heads.tensors:
        promised = "" if heads is None else f": its config promises {heads.promised}, and the weights hold none"
        raise FormatError(
            f"there are no multi-token prediction heads in {checkpoint.source.name}{promised}",
            where=checkpoint.source.path,
            expected=f"a target whose config has {', '.join(COUNTS)}, and their tensors",
            hint="draftkit inspect says what there is; heads can be put back with draftkit convert HEADS --into TARGET",
        )
    facts.keep_config()
    moves = [
        copy(handle) if name in heads.tensors else drop(handle, "the target's own")
        for name, handle in checkpoint.tensors.items()
    ]
    return plan_heads(NAME, checkpoint, facts, heads, checkpoint.config, moves)


def plan_heads(
    name: str,
    checkpoint: Checkpoint,
    facts: Facts,
    heads: TargetHeads,
    config: dict[str, object],
    moves: list[Move],
) -> Plan:
    """Plan the conversion of heads as their target has them, and with its `config`.

    Raises `FormatError` for heads that are not whole.
    """
    for wrong, what in ((heads.missing, "lack {}"), (heads.misshapen, "have {} of other shapes than the target's")):
        if wrong:
            raise FormatError(
                f"the heads {what.format(f'{len(wrong)} tensors')}: {', '.join(wrong[:SHOWN])}",
                where=checkpoint.source.path,
                hint="take them from the original checkpoint of the target; draftkit inspect says what else is damaged",
            )
    vocab_size, hidden_size = (_size(checkpoint, config, key) for key in ("vocab_size", "hidden_size"))
    facts.record("config", str(config.get("model_type")), "stated", "the target's, kept verbatim")
    facts.record("weights", f"{len(heads.tensors)} tensors", "from tensors", "kept verbatim")
    facts.record("num_modules", max(heads.promised, 1), "stated")
    architecture = MtpSpec(
        config=config,
        weights=tuple(StoredTensor(stored, t.dtype, t.shape) for stored, t in heads.tensors.items()),
        vocab_size=vocab_size,
        target_hidden_size=hidden_size,
        num_modules=max(heads.promised, 1),
        prefixes=heads.prefixes,
        parts=heads.kind.runnable_parts,
        concatenation=heads.kind.concatenation,
        hidden_state=heads.kind.hidden_state,
        feedback=heads.kind.feedback,
        zero_first_embedding=heads.kind.zero_first_embedding,
        modules=heads.kind.modules,
    )
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(name, checkpoint, facts, spec, moves)


def _size(checkpoint: Checkpoint, config: dict[str, object], key: str) -> int:
    """A size of the target's. Raises `FormatError` for what is none."""
    value = language_model(config).get(key)
    if type(value) is not int or value <= 0:
        raise FormatError(
            f"the target's {key} is {excerpt(value)}", where=checkpoint.config_path, expected="a positive integer"
        )
    return value
