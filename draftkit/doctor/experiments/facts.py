"""Trials of facts: what a draft's config says, or leaves to be guessed."""

from __future__ import annotations

from collections.abc import Iterator

from draftkit.doctor.patient import Patient
from draftkit.doctor.trial import Trial, experiment, with_facts
from draftkit.layout.facts import fact_of
from draftkit.targets.rope import target_rope

BASES = (10_000.0, 500_000.0, 1_000_000.0)  # what trainers take without asking; of Llama 3; of Qwen
OTHER_NORM = "the checkpoint and the code that trained it disagree about this norm: ask its author which was trained"


@experiment("rope-base", "rotary positions")
def rope_base(patient: Patient) -> Iterator[Trial]:
    rope, own = patient.architecture.rope, fact_of(patient.architecture, "rope_theta")
    theirs, _ = target_rope(patient.model.config)
    for base in dict.fromkeys((rope and rope.declared_base, theirs, *BASES)):
        if own is not None and base not in (None, own):
            yield with_facts(patient, rope_theta=base)


@experiment("rope-scaling", "rotary positions that the draft or the target scales")
def rope_scaling(patient: Patient) -> Iterator[Trial]:
    rope, theirs = patient.architecture.rope, target_rope(patient.model.config)[1]
    for scaling in (None,) if theirs is None else (theirs, None):
        if rope is not None and scaling != rope.scaling:
            yield with_facts(patient, rope_scaling=scaling)


@experiment("layer-ids", "captured layers")
def layer_ids(patient: Patient) -> Iterator[Trial]:
    """The default ids; the ids as numbers of outputs (one more), as states misread as outputs (one less); and the
    embedding's output, which numbers of outputs have to call −1, in the place of the first."""
    ids, n = patient.architecture.aux_layer_ids, patient.num_layers
    if ids is None:
        return
    usual = patient.architecture.usual_layers(n)
    candidates = [*usual, tuple(i + 1 for i in ids), tuple(i - 1 for i in ids), (0, *ids[1:])]
    for other in dict.fromkeys(candidates):
        ascending = list(other) == sorted(set(other)) and other[0] >= 0 and other[-1] <= n
        if other != ids and len(other) == len(ids) and ascending:
            yield with_facts(patient, aux_layer_ids=other)


@experiment("last-state", "the target's last state among the captured ones")
def last_state(patient: Patient) -> Iterator[Trial]:
    """Take the last state before or after the target's final norm: vLLM captures the one, transformers the other."""
    own, ids = patient.facts.get("last_state"), patient.architecture.aux_layer_ids
    if own is not None and ids is not None and patient.num_layers in ids:
        yield with_facts(patient, last_state="after_norm" if own == "before_norm" else "before_norm")


@experiment("slots", "a block of rows")
def slots(patient: Patient) -> Iterator[Trial]:
    """Rows that predict the token after theirs instead of their own, and the reverse."""
    own = patient.facts.get("slots")
    if own is not None:
        yield with_facts(patient, slots="anchor-first" if own == "fill-in" else "fill-in")


@experiment("causal-layers", "a block of rows")
def causal_layers(patient: Patient) -> Iterator[Trial]:
    """All layers causal (JetSpec), none (z-lab's code, llama.cpp), those with a window (vLLM, SGLang), the others."""
    own, windows = patient.facts.get("causal_layers"), patient.architecture.windows
    sliding = [layer for layer, window in enumerate(windows) if window is not None]
    full = [layer for layer, window in enumerate(windows) if window is None]
    tried = [own]
    for layers in ([*range(len(windows))], [], sliding, full) if own is not None else ():
        if layers not in tried:
            tried.append(layers)
            yield with_facts(patient, causal_layers=layers)


@experiment("window-rule", "sliding windows, and a rule for where they begin")
def window_rule(patient: Patient) -> Iterator[Trial]:
    """Windows counted from each row, as engines do, or from the anchor, as speculators trains them."""
    own = patient.facts.get("window_rule")
    if own is not None and any(patient.architecture.windows):
        yield with_facts(patient, window_rule="anchor" if own == "row" else "row")


@experiment("markov-head", "a Markov head")
def markov_head(patient: Patient) -> Iterator[Trial]:
    """The head left out; and where it has a gate or a state, taken for a plain one."""
    facts = patient.facts
    if "markov_type" not in facts:
        return
    unread = {"confidence": "none"} if facts["confidence"] == "hidden_and_token" else {}
    yield with_facts(patient, markov=None, **unread)
    if facts["markov_type"] != "vanilla":
        yield with_facts(patient, markov_type="vanilla")


@experiment("mask-embedding", "an embedding of its own for the mask")
def mask_embedding(patient: Patient) -> Iterator[Trial]:
    """The mask token's row of the table instead."""
    if patient.facts.get("mask_embedding"):
        yield with_facts(patient, mask_embedding=False)


@experiment("norm-before-residual", "a norm before attention in layer 0")
def norm_before_residual(patient: Patient) -> Iterator[Trial]:
    facts = patient.facts
    if facts.get("input_norm" if facts.get("token_entry") == "fusion" else "hidden_norm"):
        yield with_facts(patient, norm_before_residual=not facts["norm_before_residual"])


@experiment("feedback", "a final norm, and feedback of its own states")
def feedback(patient: Patient) -> Iterator[Trial]:
    """`norm_output`: the next step gets the state before or after the final norm."""
    facts = patient.facts
    if "feedback" in facts and facts.get("final_norm", True) and patient.architecture.parallel is None:
        yield with_facts(patient, feedback="pre_norm" if facts["feedback"] == "post_norm" else "post_norm")


@experiment("concatenation", "embedding and hidden state side by side")
def concatenation(patient: Patient) -> Iterator[Trial]:
    order = patient.facts.get("concatenation")
    if order is not None:
        other = "hidden_embedding" if order == "embedding_hidden" else "embedding_hidden"
        yield with_facts(patient, concatenation=other)


@experiment("norms", "norms")
def norms(patient: Patient) -> Iterator[Trial]:
    """Each norm left out, or put in with weights of one."""
    facts = patient.facts
    for name in ("embedding_norm", "hidden_norm", "final_norm", "input_norm"):
        if name in facts and (name != "input_norm" or facts["token_entry"] == "fusion"):
            yield with_facts(patient, OTHER_NORM, **{name: not facts[name]})
    if facts.get("feature_norm", "none") != "none":
        yield with_facts(patient, OTHER_NORM, feature_norm="none")


@experiment("scale-input", "an MLP speculator's scaled input")
def scale_input(patient: Patient) -> Iterator[Trial]:
    if "scale_input" in patient.facts:
        yield with_facts(patient, scale_input=not patient.facts["scale_input"])
