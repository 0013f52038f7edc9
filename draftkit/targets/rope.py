"""The rotary positions of models: what a configuration says, and frequencies that depend on a sequence's length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftkit.errors import DraftkitError, UnsupportedTarget
from draftkit.layout.positions import ropes_of

VARYING = {"dynamic", "longrope"}  # kinds whose frequencies follow from the length of the sequence
TURN = "original_max_position_embeddings"  # of longrope: the length beyond which it has other frequencies


# Of a target's rope alone: drafts turn whole heads, on one axis.
TARGETS_ALONE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def left_out_of_drafts(config: PretrainedConfig) -> list[str]:
    """The settings of a target's rope that drafts do not take over."""
    stated = _rope_of(config)
    return [key for key in TARGETS_ALONE if (found := stated.get(key)) and (found is True or found != 1.0)]


def said_of_plain_rope(left_out: Sequence[str]) -> str:
    """What a draft of a target with such settings has instead."""
    return (
        f"drafts have plain rope, without the target's {', '.join(left_out)}: trainers and vLLM's second runner give a "
        "token of theirs its place in the text as its one position"
    )


def _rope_of(config: PretrainedConfig) -> dict[str, object]:
    """What a target says of its rope; of several kinds of layers, of those with full attention."""
    parameters: dict[str, object] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return cast("dict[str, object]", parameters.get("full_attention", nested[0])) if nested else parameters


def target_rope(config: PretrainedConfig) -> tuple[float | None, dict[str, object] | None]:
    """Base and scaling (None: plain) of a target, as drafts take them over."""
    parameters = _rope_of(config)
    rest = {key: value for key, value in parameters.items() if key not in ("rope_theta", *TARGETS_ALONE)}
    plain = rest.keys() <= {"rope_type"} and rest.get("rope_type", "default") == "default"
    return cast("float | None", parameters.get("rope_theta")), None if plain else rest


class RowRope:
    """The forward of a rotary embedding of transformers, each sequence with the frequencies of its own length.

    transformers takes those of the longest sequence in a batch. `longrope` has one set of frequencies up to its
    original length and another beyond; `dynamic` is plain rope up to the model's positions, beyond which no sequence
    goes (`Positions`).

    `lengths` int64, [B, 1] or [B, T]: of the sequence as of each row; None: up to its last position in the forward.
    """

    def __init__(self, rotary: Any):
        if "rope_init_fn" in unwrap(type(rotary).forward).__code__.co_names:
            raise UnsupportedTarget(
                f"{type(rotary).__name__} derives its {kinds_of(rotary)} frequencies from a batch's longest sequence",
                expected="a rotary embedding whose frequencies are buffers, as in transformers' Llama",
            )
        self.rotary = rotary
        self.lengths: Tensor | None = None
        self._long: dict[str | None, Tensor] = {}  # by kind of layer; a captured CUDA graph cannot make them

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
        """Cosines and sines for `position_ids` int64 [B, T], as the rotary embedding returns them."""
        rotary, config = self.rotary, self.rotary.config
        kind, parameters, prefix, options = rotary.rope_type, config.rope_parameters, "", {}
        if layer_type is not None:
            kind, parameters = kind[layer_type], parameters[layer_type]
            prefix, options = f"{layer_type}_", {"layer_type": layer_type}

        def cos_sin(frequencies: Tensor) -> tuple[Tensor, ...]:
            setattr(rotary, f"{prefix}inv_freq", frequencies.to(x.device))
            return unwrap(type(rotary).forward)(rotary, x, position_ids, **options)

        short = cos_sin(getattr(rotary, f"{prefix}original_inv_freq"))
        if kind != "longrope":
            return short
        turn = parameters[TURN]
        if layer_type not in self._long:
            self._long[layer_type], _ = ROPE_INIT_FUNCTIONS[kind](config, x.device, turn + 1, **options)
        long = cos_sin(self._long[layer_type])
        lengths = position_ids.amax(-1, keepdim=True) + 1 if self.lengths is None else self.lengths
        beyond = (lengths > turn)[..., None]
        return tuple(torch.where(beyond, b, a) for a, b in zip(short, long, strict=True))


def kinds_of(rotary: Any) -> str:
    """The kinds of rope of a rotary embedding whose frequencies follow from the length of a sequence, as text."""
    kinds = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    return ", ".join(sorted(VARYING.intersection(kinds)))


def give_rows_their_rope(module: nn.Module) -> list[RowRope]:
    """Replace the forward of every rotary embedding inside `module` that depends on the length of a sequence.

    Returns those forwards. Raises `UnsupportedTarget` for one that cannot be replaced.
    """
    ropes = []
    for rotary in module.modules():
        rope = rotary.__dict__.get("forward")
        if not isinstance(rope, RowRope) and hasattr(rotary, "rope_type") and kinds_of(rotary):
            rope = rotary.forward = RowRope(rotary)
        if isinstance(rope, RowRope):
            ropes.append(rope)
    return ropes


@contextmanager
def sequences_of(ropes: Sequence[RowRope], lengths: Tensor | None) -> Iterator[None]:
    """Give the rotary embeddings these lengths of the sequences while a forward runs."""
    for rope in ropes:
        rope.lengths = lengths
    try:
        yield
    finally:
        for rope in ropes:
            rope.lengths = None


UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Positions:
    """`most`: tokens of a sequence, prompt and output. `turn`: the length beyond which rope has other frequencies.

    No sequence may grow from one side of `turn` to the other: some models then compute all their keys anew, others keep
    those that they have, and engines choose by the longest sequence that they serve.
    """

    most: int
    turn: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Positions:
        """Linear rope stretches a model's positions, as engines count them; other kinds state the stretched number."""
        text = config.get_text_config()
        ropes = ropes_of({"rope_parameters": getattr(text, "rope_parameters", None)})
        stated = getattr(text, "max_position_embeddings", None)
        stretch = max((rope["factor"] for rope in ropes if rope.get("rope_type") == "linear"), default=1.0)
        most = int(stated * stretch) if isinstance(stated, int) and stated > 0 else UNLIMITED
        turn = min((rope[TURN] for rope in ropes if rope.get("rope_type") == "longrope"), default=UNLIMITED)
        return cls(most, turn)

    @property
    def longest(self) -> int:
        """The length up to which texts of any lengths may share a forward."""
        return min(self.most, self.turn)

    def room(self, prompt: int) -> int:
        """How many tokens may follow a prompt of so many; none or less where it is too long itself."""
        most = self.most - prompt
        return min(most, self.turn + 1 - prompt) if prompt <= self.turn else most  # the last token is not run

    def check(self, name: str, prompt: int, new: int) -> None:
        """Raise `DraftkitError` where `new` tokens after a prompt of so many are more than there is room for."""
        room = self.room(prompt)
        if new <= room:
            return
        shorter = f"ask for at most {room} new tokens, or leave it out" if room > 0 else "leave it out"
        if prompt + new > self.most:
            problem = f"the target has {self.most} positions"
        else:
            problem = f"the target's rope changes beyond {self.turn} tokens (longrope), and no text may cross that"
        raise DraftkitError(f"prompt {name}: {prompt} tokens and up to {new} new ones; {problem}", hint=shorter)
