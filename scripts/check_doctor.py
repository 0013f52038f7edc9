"""Does the doctor name the defect? Every defect of published drafts, injected into the sound drafts of the zoo.

`python scripts/check_doctor.py [--only NAME …] [--limit 48] [--max-new-tokens 48]`

The details are numbered as in the notes on formats, the 15 most error-prone ones. Not injected: 2 and 12 (what
engines read of a config or skip of a file, which draftkit writes and checks itself), 14 (a wrong head_dim does not fit
the tensors, and is refused) and 15's paths and architecture names (only engines look at them).

Prints for each defect what the doctor named first, with acceptance lengths before and after its remedy. Exits with 1
when a defect is missed, or when something is recommended for a sound draft.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
from draftkit.doctor.patient import changed, target_ids, with_target_ids
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.loading import open_draft

SOUND = ("eagle", "eagle3", "p-eagle", "dflash", "dspark", "pard", "mlp-speculator", "draft-model")


@dataclass(frozen=True)
class Injection:
    """A defect: the number of its detail in the list of formats, the sound draft, how it is spoiled, and the names by
    which the doctor may call it. `rotated`: the target is spoiled instead."""

    detail: int
    draft: str
    spoil: Callable[[Draft], Draft]
    named: tuple[str, ...]
    rotated: bool = False


def facts(**values: Any) -> Callable[[Draft], Draft]:
    """Other facts of the architecture; weights that these lack are gone, new norms are ones and new biases zero."""

    def spoil(draft: Draft) -> Draft:
        architecture: Any = draft.spec.architecture
        return changed(draft, replace(architecture, **values))

    return spoil


def rope(**values: Any) -> Callable[[Draft], Draft]:
    def spoil(draft: Draft) -> Draft:
        eagle = _eagle(draft)
        decoder = replace(eagle.decoder, rope=replace(eagle.decoder.rope, **values))
        return changed(draft, replace(eagle, decoder=decoder))

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
        ids = _eagle(draft).aux_layer_ids
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
    """With a copy of the target's table, by which the rotation of another can be found."""
    table = AutoModelForCausalLM.from_pretrained(zoo.path("target")).get_input_embeddings().weight
    return changed(draft, replace(_eagle(draft), embed_tokens="draft"), {"embed_tokens.weight": table})


def _eagle(draft: Draft) -> EagleSpec:
    eagle = draft.spec.architecture
    assert isinstance(eagle, EagleSpec)
    return eagle


HEAD = ("head", "random-head", "zero-lm-head")
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


def inject(name: str, scratch: Path) -> tuple[str, str]:
    """Target and spoiled draft, as `doctor` takes them."""
    injection = INJECTIONS[name]
    source = f"zoo:{injection.draft}"
    out = scratch / "draft"
    with open_draft(source, "zoo:target") as draft:
        write_draft(out, injection.spoil(draft), force=True)
    return str(rotate_target(scratch / "target")) if injection.rotated else "zoo:target", str(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*INJECTIONS, *SOUND])
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    settings = {"limit": arguments.limit, "max_new_tokens": arguments.max_new_tokens}
    table = Table("detail", "defect", "draft", "as it is", "named first", "with the remedy", "")
    missed = 0
    for name in arguments.only:
        with TemporaryDirectory() as scratch:
            if name in INJECTIONS:
                injection = INJECTIONS[name]
                diagnosis = diagnose_draft(*inject(name, Path(scratch)), **settings)
                first = diagnosis.causes[0].name if diagnosis.causes else "nothing"
                fine, labels = first in injection.named, (str(injection.detail), name, injection.draft)
            else:
                diagnosis = diagnose_draft("zoo:target", f"zoo:{name}", **settings)
                first = ", ".join(cause.name for cause in diagnosis.causes) or "nothing"
                fine, labels = not diagnosis.recommended, ("", "none", name)
        missed += not fine
        assert diagnosis.length is not None
        row = (*labels, f"{diagnosis.length.mean:.2f}", first, _remedied(diagnosis), "" if fine else "missed")
        print(*row, sep="\t", file=sys.stderr, flush=True)
        table.add_row(*row)
    Console(width=160).print(table)
    sys.exit(1 if missed else 0)


def _remedied(diagnosis: Diagnosis) -> str:
    """What the first recommended change makes of the length."""
    if not diagnosis.recommended:
        return "–"
    best = diagnosis.recommended[0]
    return f"{best.before:.2f} → {best.after:.2f} ({best.change})"


if __name__ == "__main__":
    main()
