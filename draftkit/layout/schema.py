"""The tensors of a unified draft: names and shapes computed from its spec.

Names are those that vLLM's EAGLE loaders take without a prefix. H draft width, Ht target width, I MLP width,
V target vocabulary, Vd draft vocabulary, A captured layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftkit.errors import FormatError, LayoutError
from draftkit.layout.decoder import DENSE_MODEL_TYPES, check_layers, decoder_of_config
from draftkit.layout.dtypes import FLOATS, QUANTIZED
from draftkit.layout.spec import CausalLMSpec, Decoder, DraftSpec, EagleSpec, MedusaSpec, MlpSpeculatorSpec

Shape = tuple[int, ...]
SCALES = ("weight_scale", "weight_scale_inv", "input_scale")  # of an fp8 weight, beside it


@dataclass(frozen=True)
class TensorSchema:
    """What one tensor must be. `dtypes`: the safetensors dtypes it may have."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


def tensor_schema(spec: DraftSpec) -> dict[str, TensorSchema]:
    """Name → schema of every tensor that a draft with this spec has."""
    match spec.architecture:
        case EagleSpec() as eagle:
            return _eagle(eagle)
        case CausalLMSpec() as lm:
            return _causal_lm(lm)
        case MlpSpeculatorSpec() as mlp:
            return _mlp_speculator(mlp)
        case MedusaSpec() as medusa:
            return _medusa(medusa)


def check_tensors(
    spec: DraftSpec, found: Mapping[str, tuple[str, Shape]], where: object, hint: str | None = None
) -> None:
    """Compare tensors (name → dtype, shape) with the spec. Raises one `LayoutError` that lists every mismatch."""
    schema = tensor_schema(spec)
    if spec.quantization is not None:
        schema |= _quantized(schema, found)
    problems = [f"missing: {name} {list(s.shape)}" for name, s in schema.items() if s.required and name not in found]
    problems += [f"unexpected: {name} {list(found[name][1])}" for name in found if name not in schema]
    for name in schema.keys() & found.keys():
        dtype, shape = found[name]
        if shape != schema[name].shape:
            problems.append(f"wrong shape: {name} is {list(shape)}, expected {list(schema[name].shape)}")
        if dtype not in schema[name].dtypes:
            problems.append(f"wrong dtype: {name} is {dtype}, expected one of {', '.join(schema[name].dtypes)}")
    if problems:
        listing = "\n    ".join(sorted(problems))
        raise LayoutError(f"the tensors do not fit the draft's spec:\n    {listing}", where=where, hint=hint)


def _quantized(schema: Mapping[str, TensorSchema], found: Mapping[str, tuple[str, Shape]]) -> dict[str, TensorSchema]:
    """Weights that lie in fp8, and the scales beside them, whose shapes (tensor, row, block) the quantiser chose."""
    tensors: dict[str, TensorSchema] = {}
    for name, tensor in schema.items():
        module = name.removesuffix(".weight")
        if found.get(name, ("", ()))[0] in QUANTIZED and module != name:
            tensors[name] = TensorSchema(tensor.shape, QUANTIZED)
            scales = [scale for suffix in SCALES if (scale := f"{module}.{suffix}") in found]
            tensors |= {scale: TensorSchema(found[scale][1]) for scale in scales}
            if not any("weight_scale" in scale for scale in scales):
                tensors[f"{module}.{SCALES[0]}"] = TensorSchema(())
    return tensors


def _eagle(eagle: EagleSpec) -> dict[str, TensorSchema]:
    if eagle.lm_head == "target" and eagle.reduced_vocabulary:
        raise LayoutError(
            f"lm_head is the target's, and the draft has {eagle.draft_vocab_size} of {eagle.vocab_size} tokens",
            expected="a head of the draft's own, with a row for each of them",
        )
    h = eagle.decoder.hidden_size
    tensors = _first_layer(eagle)
    if eagle.token_entry == "fusion":
        tensors["fc.weight"] = (h, h + eagle.target_hidden_size)
    elif eagle.aux_layer_ids is not None:
        tensors["fc.weight"] = (h, eagle.feature_size)
    for index in range(1, eagle.decoder.num_hidden_layers):
        tensors |= _layer(eagle.decoder, f"layers.{index}.")
    if eagle.fusion_bias:
        tensors["fc.bias"] = (h,)
    if eagle.feature_norm == "joint":
        tensors["input_norm.weight"] = (eagle.feature_size,)
    if eagle.feature_norm == "per_layer":
        captured = range(eagle.feature_size // eagle.target_hidden_size)
        tensors |= {f"fc_norm.{i}.weight": (eagle.target_hidden_size,) for i in captured}
    if eagle.final_norm:
        tensors["norm.weight"] = (h,)
    if eagle.embed_tokens == "draft":
        tensors["embed_tokens.weight"] = (eagle.vocab_size, h)
    if eagle.lm_head == "draft":
        tensors["lm_head.weight"] = (eagle.draft_vocab_size, h)
    if eagle.parallel is not None and eagle.parallel.mask_state:
        tensors["mask_hidden"] = (1, 1, eagle.feature_size)
    schema = {name: TensorSchema(shape) for name, shape in tensors.items()}
    if eagle.reduced_vocabulary:
        schema["d2t"] = TensorSchema((eagle.draft_vocab_size,), ("I64",))
    return schema


def _first_layer(eagle: EagleSpec) -> dict[str, Shape]:
    """Layer 0, whose attention may read twice the width, and whose norms are the ones the spec names."""
    h = eagle.decoder.hidden_size
    tensors = _layer(eagle.decoder, "layers.0.", attention_input=2 * h if eagle.token_entry == "attention" else h)
    fusion = eagle.token_entry == "fusion"
    del tensors["layers.0.input_layernorm.weight"]
    if eagle.input_norm if fusion else eagle.embedding_norm:
        tensors["layers.0.input_layernorm.weight"] = (h,)
    if eagle.hidden_norm and not fusion:
        tensors["layers.0.hidden_norm.weight"] = (h,)
    if eagle.hidden_norm and fusion:
        tensors["hnorm.weight"] = (eagle.target_hidden_size,)
    if eagle.embedding_norm and fusion:
        tensors["enorm.weight"] = (h,)
    return tensors


def _layer(decoder: Decoder, prefix: str, attention_input: int | None = None) -> dict[str, Shape]:
    """One Llama-style decoder layer; `attention_input` is the width that q, k and v read, H unless given."""
    h, i, d = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    queries, keys = decoder.num_attention_heads * d, decoder.num_key_value_heads * d
    wide = attention_input or h
    tensors: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, wide),
        "self_attn.k_proj.weight": (keys, wide),
        "self_attn.v_proj.weight": (keys, wide),
        "self_attn.o_proj.weight": (h, queries),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if decoder.qkv_bias:
        tensors |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if decoder.output_bias:
        tensors["self_attn.o_proj.bias"] = (h,)
    if decoder.mlp_bias:
        tensors |= {"mlp.gate_proj.bias": (i,), "mlp.up_proj.bias": (i,), "mlp.down_proj.bias": (h,)}
    if decoder.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return {prefix + name: shape for name, shape in tensors.items()}


def _causal_lm(lm: CausalLMSpec) -> dict[str, TensorSchema]:
    check_layers(lm.config)
    if str(lm.config.get("model_type")) in DENSE_MODEL_TYPES:
        tensors, tied = _dense_causal_lm(lm)
    else:
        tensors, tied = _transformers_shapes(lm.config)
    schema = {name: TensorSchema(shape, required=name not in tied) for name, shape in tensors.items()}
    if lm.target_features is not None:
        hidden = next(iter(tensors.values()))[-1]  # the embedding table's width
        schema["target_proj.weight"] = TensorSchema((hidden, lm.target_features.size))
        if lm.target_features.projection_bias:
            schema["target_proj.bias"] = TensorSchema((hidden,))
    return schema


def _dense_causal_lm(lm: CausalLMSpec) -> tuple[dict[str, Shape], set[str]]:
    """The tensors, and the names of those that may be left out because they repeat another."""
    decoder = decoder_of_config(lm.config)
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (lm.vocab_size, decoder.hidden_size)}
    for index in range(decoder.num_hidden_layers):
        tensors |= _layer(decoder, f"model.layers.{index}.")
    tensors["model.norm.weight"] = (decoder.hidden_size,)
    tensors["lm_head.weight"] = (lm.vocab_size, decoder.hidden_size)
    return tensors, {"lm_head.weight"} if lm.config.get("tie_word_embeddings") else set()


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


def _mlp_speculator(mlp: MlpSpeculatorSpec) -> dict[str, TensorSchema]:
    """One set of weights per step; tied copies are stored once, at the first index that owns them."""
    v, d = mlp.vocab_size, mlp.inner_size
    steps = range(1 if mlp.tied else mlp.num_heads)
    projections = range(min(2, mlp.num_heads) if mlp.tied else mlp.num_heads)
    tensors: dict[str, Shape] = {}
    for i in steps:
        tensors |= {f"speculator.emb.{i}.weight": (v, d), f"speculator.head.{i}.weight": (v, d)}
        tensors |= {f"speculator.ln.{i}.weight": (d,), f"speculator.ln.{i}.bias": (d,)}
    for i in projections:
        tensors[f"speculator.proj.{i}.weight"] = (d, mlp.target_hidden_size if i == 0 else d)
    return {name: TensorSchema(shape) for name, shape in tensors.items()}


def _medusa(medusa: MedusaSpec) -> dict[str, TensorSchema]:
    h = medusa.target_hidden_size
    tensors: dict[str, Shape] = {}
    for head in range(medusa.num_heads):
        for layer in range(medusa.num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = (h, h)
            if medusa.bias:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = (h,)
        if medusa.lm_head == "draft":
            tensors[f"lm_heads.{head}.weight"] = (medusa.draft_vocab_size, h)
    if medusa.lm_head == "shared":
        tensors["lm_head.weight"] = (medusa.draft_vocab_size, h)
    schema = {name: TensorSchema(shape) for name, shape in tensors.items()}
    if medusa.draft_vocab_size != medusa.vocab_size:
        schema["token_map"] = TensorSchema((medusa.draft_vocab_size,), ("I64",))
    return schema
