"""What may be wrong with a draft, as data. A new suspicion is one new entry."""

from __future__ import annotations

from draftkit.doctor import facts, inputs, weights
from draftkit.doctor.trial import ALL, Experiment
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec

EAGLE = (EagleSpec,)
EXPERIMENTS = (
    Experiment("rope-base", (EagleSpec, CausalLMSpec), "rotary positions", facts.rope_base),
    Experiment("rope-scaling", EAGLE, "rotary positions that the draft or the target scales", facts.rope_scaling),
    Experiment("layer-ids", EAGLE, "captured layers", facts.layer_ids),
    Experiment("norm-before-residual", EAGLE, "a norm before attention in layer 0", facts.norm_before_residual),
    Experiment("feedback", EAGLE, "a final norm, and feedback of its own states", facts.feedback),
    Experiment("concatenation", EAGLE, "embedding and hidden state side by side", facts.concatenation),
    Experiment("norms", EAGLE, "norms", facts.norms),
    Experiment("scale-input", (MlpSpeculatorSpec,), "an MLP speculator's scaled input", facts.scale_input),
    Experiment("fc-bias", EAGLE, "fc.bias, or the target's next state as what it learns", weights.fusion_bias),
    Experiment("biases", EAGLE, "biases in attention or MLP", weights.biases),
    Experiment("embedding", EAGLE, "an embedding table of its own, as wide as the target's", weights.embedding),
    Experiment("head", (EagleSpec, MedusaSpec), "a head of its own, as wide as the target's", weights.head),
    Experiment("d2t", EAGLE, "a draft vocabulary whose map can be read otherwise", weights.vocabulary_map),
    Experiment("d2t-matched", EAGLE, "a draft vocabulary and a head like the target's", weights.matched_map),
    Experiment("rotated-space", EAGLE, "a table of its own that is the target's, rotated", weights.rotated_space),
    Experiment(
        "normed-features", (EagleSpec, MlpSpeculatorSpec, MedusaSpec), "the target's states", inputs.normed_features
    ),
    Experiment("positions", EAGLE, "rotary positions", inputs.positions),
    Experiment("mask-token", (EagleSpec, CausalLMSpec), "a mask token", inputs.mask_token),
    Experiment("mask-state", EAGLE, "a mask state", inputs.mask_state),
    Experiment("target-features", (CausalLMSpec,), "the target's states added to embeddings", inputs.target_features),
    Experiment("template", ALL, "a chat template", inputs.template),
    Experiment("precision", ALL, "memory for the model in another dtype", inputs.precision),
)
