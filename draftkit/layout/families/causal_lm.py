"""A causal language model as draft: standalone, PARD, PARD-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from draftkit.errors import FormatError, LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import (
    SINK_TOKENS,
    Architecture,
    Capability,
    ParallelDrafting,
    check_window,
    narrowing_sinks,
    narrowing_window,
)
from draftkit.layout.decoder import DENSE_MODEL_TYPES, check_layers, decoder_of_config, layer_tensors
from draftkit.layout.positions import PositionLimit, limit_of
from draftkit.layout.schema import Shape, TensorSchema

TITLES = {
    "draft-model": "A standalone draft model: a small causal language model",
    "pard": "A PARD draft: a small causal language model that proposes all its tokens in one pass",
    "pard-2": "A PARD-2 draft: a parallel causal language model that reads the target's hidden states",
}


WINDOWED = "llama"  # the model_type of which vLLM, and transformers not, reads which layers have a window (`llama.py`)


@dataclass(frozen=True, kw_only=True)
class TargetFeatures:
    """PARD-2: target hidden states added to the embeddings of a causal LM."""

    layer_ids: tuple[int, ...] = setting(
        "The states that are read, as indexes of transformers' hidden_states in this order, negative from the"
        " end (-1 is after the norm)."
    )
    size: int = setting("The width of the states together.", unit="features")
    scale: float = setting("The factor on what is added to the embeddings.")
    projection_bias: bool = setting("Whether the projection of the states has a bias.")


@dataclass(frozen=True, kw_only=True)
class CausalLMSpec(Architecture):
    """A causal language model as draft: standalone, PARD (`parallel`), PARD-2 (`target_features`).

    With `head_ids` the tensors are those of the whole vocabulary all the same, so that engines load the folder and
    ignore this; draftkit's runtime computes the logits of these tokens only.
    """

    SERVED_AS: ClassVar = {
        "vllm": {"draft-model": "draft_model", "pard": "draft_model", "pard-2": "draft_model"},
        "sglang": {"draft-model": "STANDALONE"},
        "llama.cpp": {"draft-model": "draft-simple"},
    }
    NEEDS: ClassVar = (
        Capability(
            "added-target-features", "target features added to embeddings",
            "would ignore the target features of PARD-2",
            lambda draft: draft.target_features is not None,
        ),
        Capability(
            "model-window", "a draft model with a window of its own",
            "writes the keys of a draft model with a window over the target's (V1)",
            lambda draft: draft.sliding_window is not None,
        ),
        SINK_TOKENS,
    )  # fmt: skip
    own_model: ClassVar = True

    config: dict[str, object] = setting("The draft's transformers configuration, verbatim.")
    vocab_size: int = setting("The tokens of the vocabulary, which is the target's.", unit="tokens")
    parallel: ParallelDrafting | None = field()
    target_features: TargetFeatures | None
    head_ids: tuple[int, ...] | None = setting("The tokens that it proposes, ascending; none for all.", None)
    sliding_window: int | None = narrowing_window()
    sink_tokens: int = narrowing_sinks()

    def __post_init__(self) -> None:
        check_window(self.sliding_window, self.sink_tokens)
        ids = self.head_ids
        if ids is not None and (
            not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < self.vocab_size
        ):
            raise LayoutError(
                f"the {len(ids)} head_ids are no tokens in order", expected=f"ascending ids below {self.vocab_size}"
            )

    @property
    def method(self) -> str:
        if self.target_features is not None:
            return "pard-2"
        return "draft-model" if self.parallel is None else "pard"

    @property
    def title(self) -> str:
        return TITLES[self.method]

    @property
    def states_read(self) -> int:
        return 0 if self.target_features is None else len(self.target_features.layer_ids)

    @property
    def windows(self) -> tuple[int | None, ...]:
        layers = self.config.get("num_hidden_layers")
        return (self.sliding_window,) * layers if self.sliding_window is not None and isinstance(layers, int) else ()

    @property
    def max_positions(self) -> PositionLimit | None:
        return limit_of(self.config)

    def tensors(self) -> dict[str, TensorSchema]:
        check_layers(self.config)
        if str(self.config.get("model_type")) in DENSE_MODEL_TYPES:
            tensors, tied = self._dense_shapes()
        else:
            tensors, tied = _transformers_shapes(self.config)
        schema = {name: TensorSchema(shape, required=name not in tied) for name, shape in tensors.items()}
        if self.target_features is not None:
            hidden = next(iter(tensors.values()))[-1]  # the embedding table's width
            schema["target_proj.weight"] = TensorSchema((hidden, self.target_features.size))
            if self.target_features.projection_bias:
                schema["target_proj.bias"] = TensorSchema((hidden,))
        return schema

    def _dense_shapes(self) -> tuple[dict[str, Shape], set[str]]:
        """The tensors, and the names of those that may be left out because they repeat another."""
        decoder = decoder_of_config(self.config)
        tensors: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, decoder.hidden_size)}
        for index in range(decoder.num_hidden_layers):
            tensors |= layer_tensors(decoder, f"model.layers.{index}.")
        tensors["model.norm.weight"] = (decoder.hidden_size,)
        tensors["lm_head.weight"] = (self.vocab_size, decoder.hidden_size)
        return tensors, {"lm_head.weight"} if self.config.get("tie_word_embeddings") else set()

    def engine_config(self) -> dict[str, object]:
        parallel = self.parallel
        config = self.config | ({} if parallel is None else {"pard_token": parallel.mask_token_id})
        if self.windows and self.config.get("model_type") == WINDOWED:  # for vLLM's second runner: see `NEEDS`
            config |= {
                "layer_types": ["sliding_attention" for _ in self.windows],
                "sliding_window": self.sliding_window,
                "use_sliding_window": True,
            }
        return config

    @property
    def engine_settings(self) -> Mapping[str, Mapping[str, object]]:
        return {} if self.parallel is None else {"vllm": {"parallel_drafting": True}}

    def without_paths(self) -> Self:
        return replace(self, config={key: value for key, value in self.config.items() if key != "_name_or_path"})

    def stored_in(self, dtype: str) -> Self:
        said = {key: dtype for key in ("dtype", "torch_dtype") if key in self.config}
        return replace(self, config=self.config | said)


def _transformers_shapes(config: dict[str, object]) -> tuple[dict[str, Shape], set[str]]:
    """The same of any other causal LM, as transformers saves it, from its own class built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    values = dict(config)
    kind = values.pop("model_type", None)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), trust_remote_code=False)
        tensors = revert_weight_conversion(model, model.state_dict())
    except Exception as error:  # whatever its config class or model stumbles over
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FormatError(f"transformers has no causal LM for model_type {kind!r} and this config: {reason}") from error
    own = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tied
