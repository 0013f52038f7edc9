"""The embedded drafts: each is trained by draftkit's recipe for it and saved as its authors publish theirs.

What a draft has that its recipe does not make by itself (base of the rotary embedding, sizes) comes with an untrained
draft to start from. Block drafts are trained by the speculators library: `scripts.zoo.speculators_blocks`.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from draftkit.convert.api import convert_checkpoint
from draftkit.convert.unified import PROVENANCE_FILE
from draftkit.data.sample_files import read_training_samples
from draftkit.data.states.online import load_training_target
from draftkit.data.tokenizer import load_tokenizer
from draftkit.data.vocabulary import choose_vocabulary, token_counts
from draftkit.layout.folder import read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.train.checkpoint import load_tensors, save_draft
from draftkit.train.config import TrainConfig
from draftkit.train.recipes.bases.eagle import fresh_eagle
from draftkit.train.recipes.eagle_eagle3 import Eagle3Options, eagle3_spec
from draftkit.train.recipes.recipe import Origin
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization, Validation
from scripts.zoo._samples import TARGET, write_training_samples

TOKENS = 2048  # of a step
ROPE_BASE = 10000.0  # of the drafts that have another than the target
DRAFT_VOCABULARY = 2048  # of EAGLE-3
MASK_TOKEN = "<|reserved_0|>"


class Making(NamedTuple):
    """How a draft is made: a recipe and its options; what `convert --to` gets; the dtype of the published weights.

    `parts`: how many rows a step's tokens are computed in; attention over more, shorter rows is cheaper.
    """

    recipe: str
    options: dict[str, object]
    layout: str
    dtype: torch.dtype = torch.float16
    parts: int = 4


MAKINGS = {
    "eagle": Making("eagle", {"forwards": 2, "loss": "soft_ce", "noise_scale": "fixed"}, "eagle"),
    "eagle3": Making("eagle3", {"steps": 4}, "eagle", parts=1),
    "draft-model": Making("draft-model", {}, "hf", torch.bfloat16, parts=1),
    # Starts from eagle3.
    "p-eagle": Making("p-eagle", {"steps": 8, "num_layers": 2, "train_embeddings": False}, "speculators"),
    "pard": Making("pard", {"steps": 8, "loss": "kl"}, "pard", torch.bfloat16),  # starts from draft-model
}
# SafeAILab's files do not say all that draftkit writes …
UNSAID = {"eagle": {"head_dim", "qkv_bias"}, "eagle3": {"head_dim", "rope_theta"}}
# … and say more.
SAID = {"initializer_range": 0.02, "pad_token_id": 0, "transformers_version": "4.28.1", "use_cache": True}


def train_drafts(models: Path, *, steps: int, answers: int, lr: float, seed: int, device: str) -> None:
    """Train all drafts on the embedded target and save them under `models`."""
    with TemporaryDirectory() as scratch:
        data = Path(scratch) / "samples.jsonl"
        began = time.monotonic()
        count = write_training_samples(data, answers=answers, seed=seed, device=device)
        print(f"  {count} samples in {time.monotonic() - began:.0f} s", flush=True)
        for name in MAKINGS:
            train_one(name, models, data, steps=steps, lr=lr, seed=seed, device=device)


def train_one(name: str, models: Path, data: Path, *, steps: int, lr: float, seed: int, device: str) -> None:
    """Train one draft on prepared samples and save it as `models/name`."""
    began = time.monotonic()
    torch.manual_seed(seed)
    with TemporaryDirectory() as scratch:
        config = TrainConfig(
            recipe=MAKINGS[name].recipe,
            target=TARGET,
            data=str(data),
            out=f"{scratch}/run",
            draft=untrained(name, models, data, Path(scratch) / "untrained"),
            device=device,
            target_dtype="float32",
            seed=seed,
            log_every=50,
            tokens_per_row=TOKENS // MAKINGS[name].parts,
            options=MAKINGS[name].options | ({"mask_token_id": mask_token()} if name == "p-eagle" else {}),
            optimization=Optimization(
                optimizer="adamw",
                lr=lr,
                warmup=0.05,
                weight_decay=0.1,
                clip=1.0,
                max_steps=steps,
                accumulation=MAKINGS[name].parts,
                precision="float32",
            ),
            validation=Validation(share=0.0),  # the embedded prompts judge
        )
        trained = train_draft(config).draft
        if trained is None:
            raise SystemExit(f"{name}: stopped")
        publish(name, trained, models / name)
    print(f"  {name}: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)


def untrained(name: str, models: Path, data: Path, out: Path) -> str:
    """The draft that a recipe is to go on with, written to `out`; empty where the recipe makes its own."""
    tokenizer = load_tokenizer(TARGET).tokenizer
    match name:
        case "draft-model":
            save_lm(LlamaForCausalLM(small_lm_config(tokenizer)), tokenizer, out)
        case "pard":  # a fine-tune of the standalone draft, as its authors make theirs
            lm = LlamaForCausalLM.from_pretrained(models / "draft-model")
            lm.config.update({"pard_token": mask_token(), "spd_type": "pard"})
            save_lm(lm, tokenizer, out)
        case "p-eagle":
            return str(models / "eagle3")
        case "eagle3":
            target = load_training_target(TARGET, device="cpu", dtype=torch.float32)
            samples = read_training_samples(data)
            counts = token_counts(samples, range(len(samples)), target.config.vocab_size)
            save_eagle3(Origin(target, None, choose_vocabulary(counts, DRAFT_VOCABULARY)), out)
        case _:
            return ""
    return str(out)


def mask_token() -> int:
    """The id of the token that parallel drafts take for the unseen."""
    token: int = load_tokenizer(TARGET).tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    return token


def small_lm_config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=ROPE_BASE,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def save_lm(lm: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    lm.to(torch.bfloat16).save_pretrained(out)  # the config keeps this dtype
    tokenizer.save_pretrained(out)


def save_eagle3(origin: Origin, out: Path) -> None:
    """The recipe's new draft, with the rope base of the published ones."""
    usual = eagle3_spec(origin, Eagle3Options())
    eagle = replace(usual, decoder=replace(usual.decoder, rope=replace(usual.decoder.rope, base=ROPE_BASE)))
    spec = DraftSpec(architecture=eagle, dtype="F32")
    state = fresh_eagle(eagle, origin).state_dict()
    save_draft(out, spec, {name: state[name] for name in spec.tensors()}, target=TARGET)


def publish(name: str, trained: Path, out: Path) -> None:
    """Write a trained draft as its authors publish theirs."""
    making, draft = MAKINGS[name], read_draft(trained)
    rounded = trained.with_name("rounded")
    save_draft(rounded, draft.spec, load_tensors(trained), target=TARGET, files=draft.files, dtype=making.dtype)
    shutil.rmtree(out, ignore_errors=True)
    convert_checkpoint(str(rounded), out, to=making.layout, target=TARGET)
    (out / PROVENANCE_FILE).unlink()
    if making.layout == "eagle":
        as_safeailab(name, out)
    elif name == "p-eagle":  # loaders fill in the target's table
        weights = load_file(out / "model.safetensors")
        del weights["embed_tokens.weight"]
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        name_target(out)


def as_safeailab(name: str, folder: Path) -> None:
    """Make of an export what SafeAILab's files are: a `pytorch_model.bin`, all fp16, and a config with their keys."""
    weights = {n: t.half() if t.is_floating_point() else t for n, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    tokenizer = load_tokenizer(TARGET).tokenizer
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in UNSAID[name]} | SAID
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def publish_block_drafts(trained: Path, models: Path) -> None:
    """Save those of `speculators_blocks`: DFlash in z-lab's layout, DSpark as the library does, its target named."""
    for name in ("dflash", "dspark"):
        shutil.rmtree(models / name, ignore_errors=True)
    convert_checkpoint(str(trained / "dflash"), models / "dflash", to="dflash", target=TARGET)
    (models / "dflash" / PROVENANCE_FILE).unlink()
    shutil.copytree(trained / "dspark", models / "dspark")
    name_target(models / "dspark")


def name_target(folder: Path) -> None:
    """Call the target of a draft in the speculators layout by its name in the zoo, not by its folder on this
    machine."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = TARGET
    path.write_text(json.dumps(config, indent=2) + "\n")
