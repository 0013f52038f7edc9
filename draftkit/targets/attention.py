"""What a model of transformers must give draftkit's attention functions, and what it is given for a cache.

B sequences, T rows, C entries of a slot cache, R and P widths of latents, W of what indexers compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import UnsupportedTarget
from draftkit.targets.recurrent import KeptStates, attends

SUPPORTED = "layers that look back by softmax attention over keys and values, or by states in transformers' cache"
SLIDING = {"sliding_attention", "hybrid_sliding"}
HANDED_DOWN = {"position_ids", "logits_to_keep"}  # arguments of the model call that say nothing about scores


class KeyValues(Protocol):
    """Where one forward keeps its keys and values; the attention function gets it as the argument `kv`.

    `windows`: the layers that have attended, each with its sliding window, None for full attention. `latents` takes
    those of layers that cache latents, `states` those of recurrent modules. `mask` [B, 1, T, C] is what is added to the
    scores of the rows' entries, for models that choose among them. `whole`: the rows are all those of one prompt with
    images, and a mask may say what they see of each other.
    """

    @property
    def windows(self) -> Mapping[int, int | None]: ...

    @property
    def latents(self) -> Latents: ...

    @property
    def states(self) -> KeptStates: ...

    @property
    def mask(self) -> Tensor: ...

    whole: bool


class Masked(Protocol):
    """The part of `KeyValues` that `required` looks at."""

    @property
    def mask(self) -> Tensor: ...

    whole: bool


Kept = TypeVar("Kept", bound=Masked)


class Sight(NamedTuple):
    """How far the rows of a layer look back: over `window` tokens, their own among them, None for all; and to the first
    `sink_tokens` of their sequence besides."""

    window: int | None = None
    sink_tokens: int = 0


def narrow(model: nn.Module, sight: Sight) -> None:
    """Have the layers of a draft look back no further than `sight`; one that has a narrower window of its own keeps
    that. For models whose layers know no such thing: attention functions ask `sight_of`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.draft_sight = sight  # type: ignore[assignment]


def sight_of(module: nn.Module, stated: Sight) -> Sight:
    """How far the rows of an attention module look back that has `stated` as much to its attention function."""
    sight: Sight | None = getattr(module, "draft_sight", None)
    if sight is None or sight.window is None or (stated.window is not None and stated.window < sight.window):
        return stated
    return sight


class Latents:
    """What layers with multi-head latent attention would cache: content [B, 1, T, R] and rotary part [B, 1, T, P].

    It is given to the model in the place of a cache, to which such a layer hands its latents before it makes keys and
    values of them, by its method `expand_kv`, for the attention function. Until that is called they wait here.
    `store_index` keeps what the indexer of a layer with sparse attention compares its queries with: keys [B, T, W] of
    the new rows; it returns those of all positions.
    """

    def __init__(self, store_index: Callable[[int, Tensor], Tensor]) -> None:
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self._store_index = store_index

    def update(self, content: Tensor, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The method of that name of transformers' `Cache`; there is nothing cached to be joined with."""
        self.waiting[layer] = content, rotary
        return content, rotary

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        """The method of that name of transformers' `Cache`."""
        return self._store_index(layer, key)


def leave_temperatures(model: nn.Module) -> None:
    """Have Llama 4's layers without rope leave it to draftkit's attention function to scale their queries, which they
    would do by positions that they count in transformers' cache."""
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False  # type: ignore[assignment]


def compresses(model: nn.Module) -> bool:
    """Whether layers of a model cache latents."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def chooses(config: PretrainedConfig) -> bool:
    """Whether layers have an indexer that chooses the positions which they see (DeepSeek Sparse Attention)."""
    return "indexed_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


def check_attention(model: PreTrainedModel, num_layers: int, windows: Mapping[int, int | None]) -> None:
    """Raise `UnsupportedTarget` unless every layer has attended, and within a window where its configuration has one.

    `windows`: as of `KeyValues`.
    """
    config = model.config.get_text_config()
    # Only a window that the architecture knows: some checkpoints carry a sliding_window that nothing reads.
    slides = hasattr(type(config), "sliding_window") and config.sliding_window
    everywhere = "sliding_attention" if slides else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * num_layers
    for layer, kind in enumerate(kinds):
        if not attends(kind):
            continue
        if layer not in windows:
            problem = "does not attend through transformers' AttentionInterface"
        elif windows[layer] is None and kind in SLIDING:
            problem = "does not tell the attention function its sliding window"
        else:
            continue
        raise UnsupportedTarget(f"layer {layer} of {type(model).__name__} {problem}", expected=SUPPORTED)


def required(kv: Kept | None, module: nn.Module, mask: Tensor | None, rest: Mapping[str, object]) -> Kept:
    """The keyword argument `kv` of an attention function that got `mask` and the arguments `rest` besides.

    Raises `UnsupportedTarget` for a model that does not hand it down, or whose scores depend on further tensors.
    """
    unknown = [name for name, value in rest.items() if isinstance(value, Tensor) and name not in HANDED_DOWN]
    if kv is not None and mask is not None and not kv.whole and mask is not kv.mask:
        unknown.append("attention_mask")
    if kv is not None and not unknown:
        return kv
    problem = f"passes {', '.join(unknown)}" if unknown else "drops the model call's keyword arguments"
    raise UnsupportedTarget(
        f"{type(module).__name__} {problem}, which draftkit's attention function cannot follow",
        expected="keys, values and keyword arguments as in transformers' Llama",
    )
