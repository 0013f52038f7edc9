"""Does the doctor name the defect? Every defect of published drafts, injected into the sound drafts of the zoo.

`python -m scripts.check.doctor [--only NAME …] [--drafts FOLDER] [--limit 48] [--max-new-tokens 48]`

Not injected: what engines read of a config or skip of a file, which draftkit writes and checks itself; a wrong head_dim
and a missing Markov head, which are refused; paths and architecture names, which only engines look at.

`--drafts`: the folder of `scripts.zoo.memorize` or of `scripts.zoo.speculators_blocks`, with block drafters. Cases of
drafts that are neither there nor in the zoo are left out.

Prints for each defect what the doctor named first, with acceptance lengths of the sound draft, with the defect and with
the remedy. Exits with 1 if a defect that costs `MARGIN` or more is missed, or if it recommends something for a sound
draft.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftkit import zoo
from draftkit.convert.unified import write_draft
from draftkit.doctor.diagnose import Diagnosis, diagnose_draft
from draftkit.doctor.measure import MARGIN
from draftkit.doctor.patient import changed, target_ids, with_target_ids
from draftkit.layout.folder import Draft
from draftkit.loading import open_draft
from scripts._bench import arguments, show

SOUND = ("eagle", "eagle3", "p-eagle", "dflash", "dspark", "pard", "mlp-speculator", "draft-model")
COLUMNS = ("defect", "draft", "sound", "as it is", "named first", "with the remedy", "")

Spoil = Callable[[Draft], Draft]


@dataclass(frozen=True)
class Injection:
    """A defect: the sound draft, how it is spoiled, and the names by which the doctor may call it.

    `rotated`: the target is spoiled instead. `target`: another one, in the folder of `--drafts`. `k`: the draft tokens
    a round, if they are the defect.
    """

    draft: str
    spoil: Spoil
    named: tuple[str, ...]
    rotated: bool = False
    target: str | None = None
    k: int | None = None


def facts(**values: Any) -> Spoil:
    """Other facts of the architecture; weights that these lack are gone, new norms are ones and new biases zero."""

    def spoil(draft: Draft) -> Draft:
        architecture: Any = draft.spec.architecture
        return changed(draft, replace(architecture, **values))

    return spoil


def part(name: str, **values: Any) -> Spoil:
    """Other facts of a part of the architecture."""
    return lambda draft: facts(**{name: replace(getattr(draft.spec.architecture, name), **values)})(draft)


def rope(**values: Any) -> Spoil:
    def spoil(draft: Draft) -> Draft:
        spec: Any = draft.spec.architecture
        return part("decoder", rope=replace(spec.decoder.rope, **values))(draft)

    return spoil


def lm_rope(base: float) -> Spoil:
    """Another rope base of a causal LM."""

    def spoil(draft: Draft) -> Draft:
        lm: Any = draft.spec.architecture
        parameters = lm.config["rope_parameters"] | {"rope_theta": base}
        return facts(config=lm.config | {"rope_parameters": parameters})(draft)

    return spoil


def moved_layers(by: int) -> Spoil:
    def spoil(draft: Draft) -> Draft:
        ids = draft.spec.architecture.aux_layer_ids
        assert ids is not None
        return facts(aux_layer_ids=tuple(i + by for i in ids))(draft)

    return spoil


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    return lambda draft: changed(draft, tensors={name: change(draft.tensors[name].load())})


def zeros(name: str) -> Spoil:
    return tensor(name, torch.zeros_like)


def permuted(name: str) -> Spoil:
    """The rows of a table in another order."""
    return tensor(name, lambda table: table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))])


def noise(*names: str, scale: float = 0.02) -> Spoil:
    """Tensors as they are initialized."""

    def spoil(draft: Draft) -> Draft:
        generator = torch.Generator().manual_seed(0)
        shapes = {name: draft.tensors[name].shape for name in names}
        return changed(draft, tensors={n: torch.randn(s, generator=generator) * scale for n, s in shapes.items()})

    return spoil


def both(first: Spoil, second: Spoil) -> Spoil:
    return lambda draft: second(first(draft))


def lost_bias(draft: Draft) -> Draft:
    """A config that leaves `bias` out means an fc.bias, which this draft has none of."""
    said = {key: value for key, value in draft.provenance.dropped_config.items() if key != "bias"}
    return replace(draft, provenance=replace(draft.provenance, dropped_config=said))


def own_table(name: str, spoil: Callable[[str], Spoil] = lambda name: as_it_is) -> Spoil:
    """A table that the draft borrows as one of its own, the target's spoiled."""

    def spoiled(draft: Draft) -> Draft:
        model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
        table = model.get_input_embeddings() if name == "embed_tokens" else model.get_output_embeddings()
        spec: Any = draft.spec.architecture
        own, weight = replace(spec, **{name: "draft"}), f"{name}.weight"
        return spoil(weight)(changed(draft, own, {weight: table.weight.detach().clone()}))

    return spoiled


def as_it_is(draft: Draft) -> Draft:
    return draft


def holds_ids(draft: Draft) -> Draft:
    return changed(draft, tensors={"d2t": target_ids(draft)})


# Biases of q, k and v that were never loaded, as in engines that take `bias` for attention's.
BIASES = both(
    part("decoder", qkv_bias=True), noise(*(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"), scale=2.0)
)
# A plain Markov head taken for a gated one, whose gate was never trained.
GATED = both(
    part("markov", markov_type="gated"), noise("markov_head.gate_proj.weight", "markov_head.gate_proj.bias", scale=1.0)
)
UNTRAINED = noise("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", scale=1.0)
HEAD = ("head", "random-head", "zero-lm-head")
EMBEDDING = ("embedding", "random-embedding")
FULL, SLIDING = ("dflash", "dspark", "dspark-fill-in"), ("dflash-sliding",)
EVERY = (*FULL, *SLIDING)
OTHER_SLOTS = {"dflash": "anchor-first", "dspark-fill-in": "anchor-first", "dspark": "fill-in"}
INJECTIONS = {
    "layer ids one early": Injection("eagle3", moved_layers(-1), ("layer-ids",)),
    "layer ids one late": Injection("eagle3", moved_layers(1), ("layer-ids",)),
    "d2t zero": Injection("eagle3", zeros("d2t"), ("zero-d2t",)),
    "d2t holds ids": Injection("eagle3", holds_ids, ("broken-d2t", "d2t")),
    "offsets taken for ids": Injection(
        "eagle3", lambda draft: with_target_ids(draft, draft.tensors["d2t"].load()), ("broken-d2t", "d2t")
    ),
    "fc.bias dropped": Injection("eagle", lost_bias, ("fc-bias", "lost-fc-bias")),
    "attention biases made up": Injection("eagle", BIASES, ("biases",)),
    "input norm added": Injection("eagle", facts(input_norm=True), ("norms",)),
    "final norm added": Injection("eagle", facts(final_norm=True), ("norms",)),
    "hidden norm missing": Injection("eagle3", facts(hidden_norm=False), ("norms",)),
    "embedding norm missing": Injection("eagle3", facts(embedding_norm=False), ("norms",)),
    "final norm missing": Injection("eagle3", facts(final_norm=False), ("norms",)),
    "feedback after the norm": Injection("eagle3", facts(feedback="post_norm"), ("feedback",)),
    "norm_before_residual": Injection("eagle3", facts(norm_before_residual=True), ("norm-before-residual",)),
    "features before the norm": Injection("eagle", facts(aux_layer_ids=(10,)), ("normed-features",)),
    "rope base 10000": Injection("eagle", rope(base=10_000.0), ("rope-base",)),
    "rope base 1e6, eagle3": Injection("eagle3", rope(base=1_000_000.0), ("rope-base",)),
    "rope base 500000, draft-model": Injection("draft-model", lm_rope(500_000.0), ("rope-base",)),
    "short rope": Injection("eagle3", rope(max_position_embeddings=64), ("short-rope",)),
    "hidden state first": Injection("eagle3", facts(concatenation="hidden_embedding"), ("concatenation",)),
    "hidden state first, eagle": Injection("eagle", facts(concatenation="hidden_embedding"), ("concatenation",)),
    "a layer of fc unset": Injection("eagle3", zeros("fc.weight"), ("zero-fc",)),
    "random embedding": Injection("eagle", noise("embed_tokens.weight"), ("random-embedding", "embedding")),
    "permuted embedding": Injection("eagle", permuted("embed_tokens.weight"), ("embedding",)),
    "random head": Injection("eagle", both(facts(lm_head="draft"), noise("lm_head.weight")), HEAD),
    "random head, eagle3": Injection("eagle3", noise("lm_head.weight"), HEAD),
    "mask token": Injection("p-eagle", part("parallel", mask_token_id=4088), ("mask-token",)),
    "mask token, pard": Injection("pard", part("parallel", mask_token_id=4092), ("mask-token",)),
    "mask state zeroed": Injection("p-eagle", zeros("mask_hidden"), ("zero-mask-hidden", "mask-state")),
    "rotated target": Injection("p-eagle", own_table("embed_tokens"), ("rotated-space",), rotated=True),
}


def of_each(drafts: Iterable[str], what: str, spoil: Callable[[Draft], Draft], *named: str) -> dict[str, Injection]:
    """The same defect in several block drafters."""
    return {f"{what}, {draft}": Injection(draft, spoil, named) for draft in drafts}


INJECTIONS |= {
    **{
        f"taken for {slots}, {draft}": Injection(draft, facts(slots=slots), ("slots",))
        for draft, slots in OTHER_SLOTS.items()
    },
    **of_each(EVERY, "layer ids one early", moved_layers(-1), "layer-ids"),
    **of_each(EVERY, "layer ids one late", moved_layers(1), "layer-ids"),
    **of_each(("dflash", "dspark"), "the embedding's output first", facts(aux_layer_ids=(0, 5, 7)), "layer-ids"),
    **of_each(("dflash-ends",), "the embedding's output missed", facts(aux_layer_ids=(1, 5, 10)), "layer-ids"),
    **of_each(("dflash-ends",), "last state after the norm", facts(last_state="after_norm"), "last-state"),
    "3 drafts of a block, dflash": Injection("dflash", as_it_is, ("block-size",), k=3),
    **of_each(("dflash",), "a block of 16", facts(block_size=16), "block-size"),
    **of_each(("dflash", "dspark"), "causal in full layers", facts(causal_layers=(0, 1)), "causal-layers"),
    **of_each(("dflash-causal",), "bidirectional in full layers", facts(causal_layers=()), "causal-layers"),
    **of_each(SLIDING, "bidirectional in the sliding layer", facts(causal_layers=()), "causal-layers"),
    **of_each(SLIDING, "causal in the full layer only", facts(causal_layers=(1,)), "causal-layers"),
    **of_each(SLIDING, "windows from the anchor", facts(window_rule="anchor"), "window-rule"),
    **of_each(EVERY, "rope base 10000", rope(base=10_000.0), "rope-base"),
    **of_each(EVERY, "mask token", part("parallel", mask_token_id=4088), "mask-token"),
    **of_each(("dspark", "dspark-fill-in"), "a Markov head of another type", GATED, "markov-head"),
    **of_each(("dspark", "dspark-fill-in"), "an untrained Markov head", UNTRAINED, "markov-head"),
    **of_each(("dflash",), "a random embedding", own_table("embed_tokens", noise), *EMBEDDING),
    **of_each(("dflash",), "a permuted embedding", own_table("embed_tokens", permuted), *EMBEDDING),
    **of_each(("dflash",), "a random head", own_table("lm_head", noise), *HEAD),
    "asked to think": Injection("dflash-without-thinking", as_it_is, ("thinking",), target="thinking-target"),
}  # fmt: skip
UNEMBEDDED = ("dflash-sliding", "dspark-fill-in", "dflash-causal", "dflash-ends")  # sound block drafters


def rotate_target(out: Path) -> Path:
    """The zoo's target times a random rotation: the same model to look at, with other states (QuaRot)."""
    model: Any = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(2 * (model.config.hidden_size,), generator=generator))
    norms = [(model.model.norm, [model.lm_head])]
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            norms.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
            norms.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight.copy_(q.T @ writer.weight)
        for norm, readers in norms:  # into the matrices behind it, which then read rotated states
            for reader in readers:
                reader.weight.copy_((reader.weight * norm.weight) @ q)
            norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ q)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(zoo.path("target")).save_pretrained(out)
    return out


def source_of(name: str, drafts: Path | None) -> str | None:
    """A draft of `drafts` or else of the zoo; None where it is in neither."""
    if drafts is not None and (drafts / name).is_dir():
        return str(drafts / name)
    return f"zoo:{name}" if name in zoo.names() else None


def inject(injection: Injection, source: str, drafts: Path | None, scratch: Path) -> tuple[str, str]:
    """Target and spoiled draft, as `doctor` takes them."""
    out = scratch / "draft"
    with open_draft(source, "zoo:target") as draft:
        write_draft(out, injection.spoil(draft), force=True)
    if injection.rotated:
        return str(rotate_target(scratch / "target")), str(out)
    return "zoo:target" if injection.target is None else str(drafts / injection.target), str(out)  # type: ignore[operator]


class Examination:
    """The rows of what was diagnosed, and the lengths of sound drafts."""

    def __init__(self, drafts: Path | None, settings: dict[str, Any]):
        self.drafts, self.settings = drafts, settings
        self.rows: list[tuple[str, ...]] = []
        self.missed = 0
        self.sound: dict[str, float] = {}

    def of_sound(self, draft: str, source: str) -> None:
        diagnosis = diagnose_draft("zoo:target", source, **self.settings)
        named = ", ".join(cause.name for cause in diagnosis.causes) or "nothing"
        self.sound[draft] = _length(diagnosis)
        self._add("none", draft, diagnosis, named, "" if not diagnosis.recommended else "false alarm")

    def of_defect(self, name: str, source: str) -> None:
        injection = INJECTIONS[name]
        with TemporaryDirectory() as scratch:
            target, spoiled = inject(injection, source, self.drafts, Path(scratch))
            diagnosis = diagnose_draft(target, spoiled, num_speculative_tokens=injection.k, **self.settings)
        first = diagnosis.causes[0].name if diagnosis.causes else "nothing"
        cost = self.sound.get(injection.draft, float("inf")) - _length(diagnosis)
        verdict = "" if first in injection.named else "missed" if cost >= MARGIN else "costs nothing"
        self._add(name, injection.draft, diagnosis, first, verdict)

    def _add(self, name: str, draft: str, diagnosis: Diagnosis, first: str, verdict: str) -> None:
        self.missed += verdict in ("missed", "false alarm")
        sound, remedied = self.sound.get(draft), "–"
        if diagnosis.recommended:
            best = diagnosis.recommended[0]
            remedied = f"{best.before:.2f} → {best.after:.2f} ({best.change})"
        lengths = ("–" if sound is None else f"{sound:.2f}", f"{_length(diagnosis):.2f}")
        self.rows.append((name, draft, *lengths, first, remedied, verdict))
        print(*self.rows[-1], sep="\t", file=sys.stderr, flush=True)


def _length(diagnosis: Diagnosis) -> float:
    assert diagnosis.length is not None
    return diagnosis.length.mean


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[*SOUND, *UNEMBEDDED, *INJECTIONS], help="defects, sound drafts")
    parser.add_argument("--drafts", type=Path, help="block drafters that are not embedded")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    settings = {"limit": options.limit, "max_new_tokens": options.max_new_tokens}
    examination = Examination(options.drafts, settings)
    for name in options.only:
        source = source_of(INJECTIONS[name].draft if name in INJECTIONS else name, options.drafts)
        if source is not None:
            (examination.of_defect if name in INJECTIONS else examination.of_sound)(name, source)
    show("", COLUMNS, examination.rows)
    sys.exit(1 if examination.missed else 0)


if __name__ == "__main__":
    main()
