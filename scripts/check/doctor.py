"""Does the doctor name the defect? Every defect of published drafts, injected into the sound drafts of the zoo.

`python -m scripts.check.doctor [--only NAME …] [--drafts FOLDER] [--limit 48] [--max-new-tokens 48]`

The details are numbered as in the notes on formats, the 15 most error-prone ones; those of block drafters have none.
Not injected: 2 and 12 (what engines read of a config or skip of a file, which draftkit writes and checks itself), 14 (a
wrong head_dim does not fit the tensors, and is refused), 15's paths and architecture names (only engines look at them),
and a Markov head that the config names and the file lacks (refused).

`--drafts`: the folder of `scripts/zoo/memorize.py` or of `scripts.zoo.speculators_blocks.py`, with block drafters;
without it, and without those that it lacks, their cases are left out.

Prints for each defect what the doctor named first, with acceptance lengths of the sound draft, with the defect and with
the remedy. Exits with 1 when a defect that costs `MARGIN` or more is missed, or when something is recommended for a
sound draft.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftkit import zoo
from draftkit.convert.unified import write_draft
from draftkit.doctor.diagnose import Diagnosis, diagnose_draft
from draftkit.doctor.measure import MARGIN
from draftkit.doctor.patient import changed, target_ids, with_target_ids
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.loading import open_draft

SOUND = ("eagle", "eagle3", "p-eagle", "dflash", "dspark", "pard", "mlp-speculator", "draft-model")


@dataclass(frozen=True)
class Injection:
    """A defect: the number of its detail in the list of formats, the sound draft, how it is spoiled, and the names by
    which the doctor may call it. `rotated`: the target is spoiled instead. `target`: another one, in the folder of
    `--drafts`. `k`: the draft tokens a round, where they are the defect."""

    detail: int | None
    draft: str
    spoil: Callable[[Draft], Draft]
    named: tuple[str, ...]
    rotated: bool = False
    target: str | None = None
    k: int | None = None


def facts(**values: Any) -> Callable[[Draft], Draft]:
    """Other facts of the architecture; weights that these lack are gone, new norms are ones and new biases zero."""

    def spoil(draft: Draft) -> Draft:
        architecture: Any = draft.spec.architecture
        return changed(draft, replace(architecture, **values))

    return spoil


def rope(**values: Any) -> Callable[[Draft], Draft]:
    def spoil(draft: Draft) -> Draft:
        spec: Any = draft.spec.architecture
        decoder = replace(spec.decoder, rope=replace(spec.decoder.rope, **values))
        return changed(draft, replace(spec, decoder=decoder))

    return spoil


def lm_rope(base: float) -> Callable[[Draft], Draft]:
    """Another rope base of a causal LM."""

    def spoil(draft: Draft) -> Draft:
        lm: Any = draft.spec.architecture
        parameters = lm.config["rope_parameters"] | {"rope_theta": base}
        return changed(draft, replace(lm, config=lm.config | {"rope_parameters": parameters}))

    return spoil


def moved_layers(by: int) -> Callable[[Draft], Draft]:
    def spoil(draft: Draft) -> Draft:
        ids = draft.spec.architecture.aux_layer_ids
        assert ids is not None
        return facts(aux_layer_ids=tuple(i + by for i in ids))(draft)

    return spoil


def map_of(values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Draft], Draft]:
    """d2t of other contents, from the target's ids."""
    return lambda draft: changed(draft, tensors={"d2t": values(target_ids(draft))})


def noise(*names: str, scale: float = 0.02) -> Callable[[Draft], Draft]:
    """Tensors as they are initialized."""

    def spoil(draft: Draft) -> Draft:
        generator = torch.Generator().manual_seed(0)
        shapes = {name: draft.tensors[name].shape for name in names}
        return changed(draft, tensors={n: torch.randn(s, generator=generator) * scale for n, s in shapes.items()})

    return spoil


def zeros(name: str) -> Callable[[Draft], Draft]:
    return lambda draft: changed(draft, tensors={name: torch.zeros_like(draft.tensors[name].load())})


def permuted(name: str) -> Callable[[Draft], Draft]:
    """The rows of a table in another order."""

    def spoil(draft: Draft) -> Draft:
        table = draft.tensors[name].load()
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
        return changed(draft, tensors={name: table[order]})

    return spoil


def lost_bias(draft: Draft) -> Draft:
    """A config that leaves `bias` out means an fc.bias, which this draft has none of."""
    said = {key: value for key, value in draft.provenance.dropped_config.items() if key != "bias"}
    return replace(draft, provenance=replace(draft.provenance, dropped_config=said))


def attention_biases(draft: Draft) -> Draft:
    """Biases of q, k and v that were never loaded, as in engines that take `bias` for attention's."""
    eagle = _eagle(draft)
    spoiled = changed(draft, replace(eagle, decoder=replace(eagle.decoder, qkv_bias=True)))
    return noise(*(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"), scale=2.0)(spoiled)


def own_random_head(draft: Draft) -> Draft:
    return noise("lm_head.weight")(changed(draft, replace(_eagle(draft), lm_head="draft")))


def other_mask_token(token: int) -> Callable[[Draft], Draft]:
    def spoil(draft: Draft) -> Draft:
        spec: Any = draft.spec.architecture
        return changed(draft, replace(spec, parallel=replace(spec.parallel, mask_token_id=token)))

    return spoil


def own_embedding(draft: Draft) -> Draft:
    """The draft with a copy of the target's embedding, by which the rotation of another target can be found."""
    table = AutoModelForCausalLM.from_pretrained(zoo.path("target")).get_input_embeddings().weight
    return changed(draft, replace(_eagle(draft), embed_tokens="draft"), {"embed_tokens.weight": table})


def own_table(name: str, spoil: Callable[[str], Callable[[Draft], Draft]]) -> Callable[[Draft], Draft]:
    """A table that the draft borrows as one of its own, the target's spoiled."""

    def spoiled(draft: Draft) -> Draft:
        spec: Any = draft.spec.architecture
        model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
        table = model.get_input_embeddings() if name == "embed_tokens" else model.get_output_embeddings()
        own = replace(spec, **{name: "draft"})
        return spoil(f"{name}.weight")(changed(draft, own, {f"{name}.weight": table.weight.detach().clone()}))

    return spoiled


def gated(draft: Draft) -> Draft:
    """A plain Markov head taken for a gated one, whose gate was never trained."""
    spec: Any = draft.spec.architecture
    spoiled = changed(draft, replace(spec, markov=replace(spec.markov, markov_type="gated")))
    return noise(*(f"markov_head.gate_proj.{name}" for name in ("weight", "bias")), scale=1.0)(spoiled)


def as_it_is(draft: Draft) -> Draft:
    return draft


def _eagle(draft: Draft) -> EagleSpec:
    eagle = draft.spec.architecture
    assert isinstance(eagle, EagleSpec)
    return eagle


HEAD = ("head", "random-head", "zero-lm-head")
EMBEDDING = ("embedding", "random-embedding")
FULL, SLIDING = ("dflash", "dspark", "dspark-fill-in"), ("dflash-sliding",)
EVERY = (*FULL, *SLIDING)
OTHER_SLOTS = {"dflash": "anchor-first", "dspark-fill-in": "anchor-first", "dspark": "fill-in"}
INJECTIONS = {
    "layer ids one early": Injection(1, "eagle3", moved_layers(-1), ("layer-ids",)),
    "layer ids one late": Injection(1, "eagle3", moved_layers(1), ("layer-ids",)),
    "d2t zero": Injection(3, "eagle3", zeros("d2t"), ("zero-d2t",)),
    "d2t holds ids": Injection(3, "eagle3", map_of(lambda ids: ids), ("broken-d2t", "d2t")),
    "offsets taken for ids": Injection(
        3, "eagle3", lambda draft: with_target_ids(draft, draft.tensors["d2t"].load()), ("broken-d2t", "d2t")
    ),
    "fc.bias dropped": Injection(4, "eagle", lost_bias, ("fc-bias", "lost-fc-bias")),
    "attention biases made up": Injection(4, "eagle", attention_biases, ("biases",)),
    "input norm added": Injection(5, "eagle", facts(input_norm=True), ("norms",)),
    "final norm added": Injection(5, "eagle", facts(final_norm=True), ("norms",)),
    "hidden norm missing": Injection(5, "eagle3", facts(hidden_norm=False), ("norms",)),
    "embedding norm missing": Injection(5, "eagle3", facts(embedding_norm=False), ("norms",)),
    "final norm missing": Injection(5, "eagle3", facts(final_norm=False), ("norms",)),
    "feedback after the norm": Injection(6, "eagle3", facts(feedback="post_norm"), ("feedback",)),
    "norm_before_residual": Injection(7, "eagle3", facts(norm_before_residual=True), ("norm-before-residual",)),
    "features before the norm": Injection(8, "eagle", facts(aux_layer_ids=(10,)), ("normed-features",)),
    "rope base 10000": Injection(9, "eagle", rope(base=10_000.0), ("rope-base",)),
    "rope base 1e6, eagle3": Injection(9, "eagle3", rope(base=1_000_000.0), ("rope-base",)),
    "rope base 500000, draft-model": Injection(9, "draft-model", lm_rope(500_000.0), ("rope-base",)),
    "short rope": Injection(10, "eagle3", rope(max_position_embeddings=64), ("short-rope",)),
    "hidden state first": Injection(11, "eagle3", facts(concatenation="hidden_embedding"), ("concatenation",)),
    "hidden state first, eagle": Injection(11, "eagle", facts(concatenation="hidden_embedding"), ("concatenation",)),
    "a layer of fc unset": Injection(12, "eagle3", zeros("fc.weight"), ("zero-fc",)),
    "random embedding": Injection(13, "eagle", noise("embed_tokens.weight"), ("random-embedding", "embedding")),
    "permuted embedding": Injection(13, "eagle", permuted("embed_tokens.weight"), ("embedding",)),
    "random head": Injection(13, "eagle", own_random_head, HEAD),
    "random head, eagle3": Injection(13, "eagle3", noise("lm_head.weight"), HEAD),
    "mask token": Injection(15, "p-eagle", other_mask_token(4088), ("mask-token",)),
    "mask token, pard": Injection(15, "pard", other_mask_token(4092), ("mask-token",)),
    "mask state zeroed": Injection(15, "p-eagle", zeros("mask_hidden"), ("zero-mask-hidden", "mask-state")),
    "rotated target": Injection(8, "p-eagle", own_embedding, ("rotated-space",), rotated=True),
}


def of_each(drafts: Iterable[str], what: str, spoil: Callable[[Draft], Draft], *named: str) -> dict[str, Injection]:
    """The same defect in several block drafters."""
    return {f"{what}, {draft}": Injection(None, draft, spoil, named) for draft in drafts}


INJECTIONS |= {
    **{
        f"taken for {slots}, {draft}": Injection(None, draft, facts(slots=slots), ("slots",))
        for draft, slots in OTHER_SLOTS.items()
    },
    **of_each(EVERY, "layer ids one early", moved_layers(-1), "layer-ids"),
    **of_each(EVERY, "layer ids one late", moved_layers(1), "layer-ids"),
    **of_each(("dflash", "dspark"), "the embedding's output first", facts(aux_layer_ids=(0, 5, 7)), "layer-ids"),
    **of_each(("dflash-ends",), "the embedding's output missed", facts(aux_layer_ids=(1, 5, 10)), "layer-ids"),
    **of_each(("dflash-ends",), "last state after the norm", facts(last_state="after_norm"), "last-state"),
    "3 drafts of a block, dflash": Injection(None, "dflash", as_it_is, ("block-size",), k=3),
    **of_each(("dflash",), "a block of 16", facts(block_size=16), "block-size"),
    **of_each(("dflash", "dspark"), "causal in full layers", facts(causal_layers=(0, 1)), "causal-layers"),
    **of_each(("dflash-causal",), "bidirectional in full layers", facts(causal_layers=()), "causal-layers"),
    **of_each(SLIDING, "bidirectional in the sliding layer", facts(causal_layers=()), "causal-layers"),
    **of_each(SLIDING, "causal in the full layer only", facts(causal_layers=(1,)), "causal-layers"),
    **of_each(SLIDING, "windows from the anchor", facts(window_rule="anchor"), "window-rule"),
    **of_each(EVERY, "rope base 10000", rope(base=10_000.0), "rope-base"),
    **of_each(EVERY, "mask token", other_mask_token(4088), "mask-token"),
    **of_each(("dspark", "dspark-fill-in"), "a Markov head of another type", gated, "markov-head"),
    **of_each(
        ("dspark", "dspark-fill-in"), "an untrained Markov head",
        noise("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", scale=1.0), "markov-head",
    ),
    **of_each(("dflash",), "a random embedding", own_table("embed_tokens", noise), *EMBEDDING),
    **of_each(("dflash",), "a permuted embedding", own_table("embed_tokens", permuted), *EMBEDDING),
    **of_each(("dflash",), "a random head", own_table("lm_head", noise), *HEAD),
    "asked to think": Injection(None, "dflash-without-thinking", as_it_is, ("thinking",), target="thinking-target"),
}  # fmt: skip
UNEMBEDDED = ("dflash-sliding", "dspark-fill-in", "dflash-causal", "dflash-ends")  # sound block drafters


def rotate_target(out: Path) -> Path:
    """The zoo's target times a random rotation: the same model to look at, with other states (QuaRot)."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
    _untie(model)
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(2 * (model.config.hidden_size,), generator=generator))
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            _absorb(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], q)
            _absorb(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], q)
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight.copy_(q.T @ writer.weight)
        _absorb(model.model.norm, [model.lm_head], q)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ q)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(zoo.path("target")).save_pretrained(out)
    return out


def _untie(model: PreTrainedModel) -> None:
    model.config.tie_word_embeddings = False
    head: Any = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _absorb(norm: Any, readers: list[Any], q: torch.Tensor) -> None:
    """The norm's weights into the matrices behind it, which then read rotated states."""
    for reader in readers:
        reader.weight.copy_((reader.weight * norm.weight) @ q)
    norm.weight.fill_(1)


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
    """The table of what was diagnosed, and the lengths of sound drafts."""

    def __init__(self, drafts: Path | None, settings: dict[str, Any]):
        self.drafts, self.settings = drafts, settings
        self.table = Table("detail", "defect", "draft", "sound", "as it is", "named first", "with the remedy", "")
        self.missed = 0
        self.sound: dict[str, float] = {}

    def of_sound(self, draft: str) -> None:
        source = source_of(draft, self.drafts)
        assert source is not None
        diagnosis = diagnose_draft("zoo:target", source, **self.settings)
        named = ", ".join(cause.name for cause in diagnosis.causes) or "nothing"
        self.sound[draft] = _length(diagnosis)
        self._add("", "none", draft, diagnosis, named, "" if not diagnosis.recommended else "false alarm")

    def of_defect(self, name: str) -> None:
        injection = INJECTIONS[name]
        source = source_of(injection.draft, self.drafts)
        assert source is not None
        with TemporaryDirectory() as scratch:
            target, spoiled = inject(injection, source, self.drafts, Path(scratch))
            diagnosis = diagnose_draft(target, spoiled, num_speculative_tokens=injection.k, **self.settings)
        first = diagnosis.causes[0].name if diagnosis.causes else "nothing"
        cost = self.sound.get(injection.draft, float("inf")) - _length(diagnosis)
        verdict = "" if first in injection.named else "missed" if cost >= MARGIN else "costs nothing"
        self._add(str(injection.detail or ""), name, injection.draft, diagnosis, first, verdict)

    def _add(self, detail: str, name: str, draft: str, diagnosis: Diagnosis, first: str, verdict: str) -> None:
        self.missed += verdict in ("missed", "false alarm")
        sound = self.sound.get(draft)
        lengths = ("–" if sound is None else f"{sound:.2f}", f"{_length(diagnosis):.2f}")
        row = (detail, name, draft, *lengths, first, _remedied(diagnosis), verdict)
        print(*row, sep="\t", file=sys.stderr, flush=True)
        self.table.add_row(*row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*SOUND, *UNEMBEDDED, *INJECTIONS], help="defects, sound drafts")
    parser.add_argument("--drafts", type=Path, help="block drafters that are not embedded")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    settings = {"limit": arguments.limit, "max_new_tokens": arguments.max_new_tokens}
    examination = Examination(arguments.drafts, settings)
    for name in arguments.only:
        draft = INJECTIONS[name].draft if name in INJECTIONS else name
        if source_of(draft, arguments.drafts) is None:
            continue
        if name in INJECTIONS:
            examination.of_defect(name)
        else:
            examination.of_sound(name)
    Console(width=160).print(examination.table)
    sys.exit(1 if examination.missed else 0)


def _length(diagnosis: Diagnosis) -> float:
    assert diagnosis.length is not None
    return diagnosis.length.mean


def _remedied(diagnosis: Diagnosis) -> str:
    """What the first recommended change makes of the length."""
    if not diagnosis.recommended:
        return "–"
    best = diagnosis.recommended[0]
    return f"{best.before:.2f} → {best.after:.2f} ({best.change})"


if __name__ == "__main__":
    main()
