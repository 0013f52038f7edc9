"""Checkpoints: their configs, tensors, headers, indexes, adapters, targets, and facts that are set."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pico
import safetensors
import torch
from peft import LoraConfig, get_peft_model
from published import all_published
from published.checkpoint import Published, write_weights
from transformers import CONFIG_MAPPING

import draftkit
from draftkit import convert_checkpoint, inspect_checkpoint
from draftkit.errors import DraftkitError
from draftkit.io.safetensors_file import write_safetensors
from draftkit.io.tensors import TensorToWrite, open_checkpoint
from fuzzing.judge import Kind, check_clean, refusal
from fuzzing.mutate import any_value, changed, damaged, possible_keys, value_at, written

CODE = Path(draftkit.__file__).parent
CONFIG_KEYS = sorted(possible_keys(CODE / "convert", CODE / "layout"))


def convert(source: Path, folder: Path, target: Path | None = None, **options: Any) -> dict[str, Any] | None:
    """The config of the draft that a source is converted to, which was read as a whole; None where it was refused."""
    made = folder / "made"
    made.mkdir()
    out = made / "out"
    refused = refusal(convert_checkpoint, str(source), out, target=target and str(target), **options)
    check_clean(made, *[] if refused else ["out"])
    if refused is not None:
        return None
    inspect_checkpoint(str(out))
    for handle in open_checkpoint(out).values():
        handle.load()
    return json.loads((out / "config.json").read_text())


def without_source(config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's config without the names and sizes of what it was made of."""
    return {**config, "draftkit": block(config) | {"provenance": traces(config)}}


def block(config: Mapping[str, Any]) -> dict[str, Any]:
    return config["draftkit"]


def traces(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in block(config)["provenance"].items() if name not in ("source", "files", "target")
    }


class Configs(Kind):
    """config.json of every published layout. A key with another value that is accepted leaves a trace."""

    share = 2.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.samples: list[tuple[Published, Path, Path | None, dict[str, Any]]] = []
        for name, published in all_published().items():
            source = published.write(corpus / name / "source")
            target = None
            if published.target is not None:
                target = pico.save_target_config(corpus / name / "target", **published.target)
            made = convert(source, corpus / name, target, overrides=published.overrides, allow_lossy=True)
            assert made is not None, name
            self.samples.append((published, source, target, without_source(made)))

    def run(self, rng: random.Random, folder: Path) -> bool:
        published, source, target, before = rng.choice(self.samples)
        config = changed(rng, published.config, CONFIG_KEYS, rng.choice([1, 1, 1, 2, 3]))
        data = written(rng, config)
        changed_source = folder / "source"
        changed_source.mkdir()
        for file in source.iterdir():
            if file.name != "config.json":
                (changed_source / file.name).symlink_to(file)
        (changed_source / "config.json").write_bytes(data)
        made = convert(changed_source, folder, target, overrides=published.overrides, allow_lossy=True)
        if made is not None and data == json.dumps(config).encode() and differing(config, published.config):
            assert text_of(without_source(made)) != text_of(before), "accepted, and nothing says so: " + differing(
                config, published.config
            )
        return made is not None


def text_of(value: Any) -> str:
    """JSON, in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def differing(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """The keys of `new` with other values than in `old`; what is empty, false or null stands for a default."""
    return ", ".join(sorted(key for key in new if new[key] and not _same(new[key], old.get(key))))


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, dict) and isinstance(old, dict):
        return not differing(new, old)
    return new == old and isinstance(new, bool) == isinstance(old, bool)


class Tensors(Kind):
    """Weights of every published layout: of other shapes and dtypes, other values where they map tokens, or missing."""

    share = 1.5

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.published = list(all_published().values())

    def run(self, rng: random.Random, folder: Path) -> bool:
        published = rng.choice(self.published)
        source, target = published.write(folder / "source"), None
        if published.target is not None:
            target = pico.save_target_config(folder / "target", **published.target)
        tensors = published.tensors(torch.float16)
        maps = [name for name in tensors if name in ("d2t", "t2d", "token_map")]
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(maps if maps and rng.random() < 0.3 else sorted(tensors))
            if rng.random() < 0.2 and len(tensors) > 1:
                del tensors[name]
                maps = [one for one in maps if one != name]
            else:
                tensors[name] = odd_tensor(rng, tensors[name])
        write_weights(source / published.weights, tensors)
        return convert(source, folder, target, overrides=published.overrides, allow_lossy=True) is not None


def odd_tensor(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in place of one: of another shape, another dtype, other values."""
    if rng.random() < 0.3 and tensor.dtype != torch.float8_e4m3fn:  # torch computes nothing in it
        return tensor.flip(0).clone() if tensor.dim() and len(tensor) > 1 else tensor + 1
    bigger = tuple(size + 1 for size in tensor.shape)
    shapes = [(), (0,) * tensor.dim(), (1, *tensor.shape), bigger, tuple(tensor.shape)]
    dtypes = [tensor.dtype, torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]
    value = rng.choice([0, 1, -1, 1 << 62, -(1 << 63)])
    return torch.full(rng.choice(shapes), value, dtype=torch.int64).to(rng.choice(dtypes))


class Blocks(Kind):
    """The draftkit block of unified drafts. What is accepted goes through JSON and back."""

    share = 4.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.drafts = []
        for name, published in list(all_published().items())[::4]:
            target = published.target if published.target is None else pico.save_target_config(corpus / name / "target")
            out = corpus / name / "draft"
            options = {"overrides": published.overrides, "allow_lossy": True, "target": target and str(target)}
            try:
                convert_checkpoint(str(published.write(corpus / name / "source")), out, **options)
            except DraftkitError:
                continue  # another target than its own
            self.drafts.append(out)
        assert len(self.drafts) > 5

    def run(self, rng: random.Random, folder: Path) -> bool:
        draft = rng.choice(self.drafts)
        config = json.loads((draft / "config.json").read_text())
        config["draftkit"] = changed(rng, config["draftkit"], CONFIG_KEYS, rng.choice([1, 1, 2]))
        for file in draft.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        (folder / "config.json").write_bytes(written(rng, config))
        if refusal(inspect_checkpoint, str(folder)) is not None:
            return False
        read = inspect_checkpoint(str(folder))
        stored = json.loads((folder / "config.json").read_text())["draftkit"]
        said = read.spec.to_dict() | {"provenance": None}
        for name in said.keys() & stored.keys() - {"provenance"}:
            assert _covers(said[name], stored[name]), f"{name}: {stored[name]!r} is read as {said[name]!r}"
        return True


def _covers(said: Any, stored: Any) -> bool:
    """Whether all that is stored was read as it stands."""
    if isinstance(stored, dict):
        return isinstance(said, dict) and all(key in said and _covers(said[key], stored[key]) for key in stored)
    return json.loads(json.dumps(said)) == stored


class Targets(Kind):
    """config.json of targets, for a draft that takes facts from one."""

    share = 5.0
    families = (
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "gpt2",
        "mistral",
        "phi3",
        "opt",
        "gpt_neox",
        "llama4",
        "mixtral",
    )

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        pico.write_checkpoint(corpus / "draft", pico.eagle3_config(), pico.eagle3_tensors(), safetensors=True)
        self.sound = json.loads((pico.save_target_config(corpus / "target") / "config.json").read_text())
        self.configs = [self.sound] * 4 + [{"model_type": "llava", "text_config": self.sound}]
        for family in self.families:
            self.configs.append(CONFIG_MAPPING[family]().to_dict())
        self.keys = sorted(possible_keys(CODE / "layout", CODE / "models"))

    def run(self, rng: random.Random, folder: Path) -> bool:
        config = changed(rng, rng.choice(self.configs), self.keys, rng.choice([1, 1, 2, 3]))
        target = folder / "target"
        target.mkdir()
        (target / "config.json").write_bytes(written(rng, config))
        if rng.random() < 0.5:
            return refusal(inspect_checkpoint, str(self.corpus / "draft"), target=str(target)) is None
        return convert(self.corpus / "draft", folder, target) is not None


class Headers(Kind):
    """Headers of safetensors files. What draftkit accepts, the safetensors library accepts."""

    share = 5.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        pico.write_checkpoint(corpus / "draft", pico.eagle_config(), pico.eagle_tensors(), safetensors=True)
        data = (corpus / "draft" / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        self.header, self.body = json.loads(data[8 : 8 + length]), data[8 + length :]

    def run(self, rng: random.Random, folder: Path) -> bool:
        header = json.dumps(self.header).encode()
        choice = rng.random()
        if choice < 0.6:
            header = written(rng, self.changed_header(rng))
        elif choice < 0.9:
            header = damaged(rng, header)
        length = (
            len(header)
            if rng.random() < 0.9
            else rng.choice([0, 1, len(header) - 1, len(header) + 1, 1 << 40, (1 << 64) - 1])
        )
        data = struct.pack("<Q", length) + header + self.body
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))] + b"\0" * rng.choice([0, 0, 1, 8])
        source = folder / "source"
        source.mkdir()
        (source / "config.json").write_bytes((self.corpus / "draft" / "config.json").read_bytes())
        (source / "model.safetensors").write_bytes(data)
        accepted = convert(source, folder) is not None
        if accepted:
            with safetensors.safe_open(source / "model.safetensors", "pt") as file:
                assert list(file.keys())
        return accepted

    def changed_header(self, rng: random.Random) -> Any:
        name = rng.choice(list(self.header))
        entry = dict(self.header[name])
        begin, end = entry.get("data_offsets", (0, 0))
        new = rng.choice(
            [
                lambda: (
                    entry
                    | {
                        "data_offsets": rng.choice(
                            [[begin, end + 2], [end, begin], [0, end], [-2, end], [begin], [begin, 1 << 62]]
                        )
                    }
                ),
                lambda: (
                    entry
                    | {"dtype": rng.choice(["F32", "F16", "BF16", "F8_E4M3", "I64", "BOOL", "F4", "f32", "", 1, None])}
                ),
                lambda: entry | {"shape": changed(rng, entry.get("shape", [1]))},
                lambda: entry | {"shape": [1, *entry.get("shape", [])]},
                lambda: changed(rng, entry, ("dtype", "shape", "data_offsets", "more")),
            ]
        )()
        return changed(rng, self.header | {name: new}) if rng.random() < 0.3 else self.header | {name: new}


class Indexes(Kind):
    """model.safetensors.index.json; a shard outside the folder is never read."""

    share = 4.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        folder = corpus / "draft"
        pico.write_checkpoint(folder, pico.eagle_config(), pico.eagle_tensors(), safetensors=True)
        tensors = list(open_checkpoint(folder).values())
        halves = {"1.safetensors": tensors[:5], "2.safetensors": tensors[5:]}
        for name, half in halves.items():
            write_safetensors(folder / name, [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in half])
        (folder / "model.safetensors").unlink()
        (folder / "subfolder").mkdir()
        os.mkfifo(folder / "pipe")
        (corpus / "outside.safetensors").write_bytes((folder / "1.safetensors").read_bytes())
        self.index = {
            "metadata": {"total_size": 1},
            "weight_map": {t.name: n for n, half in halves.items() for t in half},
        }

    def run(self, rng: random.Random, folder: Path) -> bool:
        source = folder / "source"
        source.mkdir()
        for file in (self.corpus / "draft").iterdir():
            (source / file.name).symlink_to(file)
        index = json.loads(json.dumps(self.index))
        for _ in range(rng.choice([0, 1, 1, 2])):
            index["weight_map"][rng.choice([*index["weight_map"], "more"])] = rng.choice(BAD_SHARDS)
        if rng.random() < 0.5:
            index = changed(rng, index, ("weight_map", "metadata", "fc.weight"))
        (source / "model.safetensors.index.json").write_bytes(written(rng, index))
        return convert(source, folder) is not None


BAD_SHARDS = (
    "../outside.safetensors", "subfolder/../../outside.safetensors", "/etc/passwd", "..\\outside.safetensors",
    "C:outside.safetensors", ".", "..", "", "1.safetensors\0", "subfolder", "pipe", "model.safetensors.index.json",
    "config.json", "a" * 300, "\ud800", ["1.safetensors"], None, "1.safetensors", "2.safetensors", "3.safetensors",
)  # fmt: skip


class Adapters(Kind):
    """LoRA adapters: a changed setting is refused, or changes the merged weights, or is written down."""

    share = 1.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        base = pico.llama(3, num_hidden_layers=1)
        base.save_pretrained(corpus / "base")
        peft = get_peft_model(
            base, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        )
        torch.manual_seed(8)
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2)
        peft.save_pretrained(str(corpus / "adapter"))
        self.config = json.loads((corpus / "adapter" / "adapter_config.json").read_text())
        self.config["base_model_name_or_path"] = str(corpus / "base")
        self.before = self.merged(corpus / "sound", self.config)
        assert self.before is not None

    def merged(self, folder: Path, config: Any, data: bytes | None = None) -> object:
        """What comes out, None where it was refused."""
        source = folder / "source"
        source.mkdir(parents=True)
        for file in (self.corpus / "adapter").iterdir():
            if file.name != "adapter_config.json":
                (source / file.name).symlink_to(file)
        (source / "adapter_config.json").write_bytes(data or json.dumps(config).encode())
        made = convert(source, folder, allow_lossy=True)
        if made is None:
            return None
        weights = {h.name: h.load().float().sum().item() for h in open_checkpoint(folder / "made" / "out").values()}
        return without_source(made), weights

    def run(self, rng: random.Random, folder: Path) -> bool:
        config = changed(rng, self.config, ADAPTER_KEYS, rng.choice([1, 1, 2]))
        data = written(rng, config)
        made = self.merged(folder, config, data)
        if made is not None and data == json.dumps(config).encode():
            stated = {key: value for key, value in config.items() if value and key not in WITHOUT_EFFECT}
            sound = {key: value for key, value in self.config.items() if value and key not in WITHOUT_EFFECT}
            names = differing(stated, sound)
            assert not names or made != self.before, f"accepted, and nothing says so: {names}"
        return made is not None


ADAPTER_KEYS = (
    "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias", "lora_bias", "modules_to_save",
    "layers_to_transform", "trainable_token_indices", "init_lora_weights", "peft_type", "r", "lora_alpha", "other",
)  # fmt: skip


# What the merged weights do not depend on: the stored tensors say which modules are adapted. No pattern here names one.
WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_config",
    "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip


class Overrides(Kind):
    """`convert --set`: a fact that was set is in the spec, as it was set."""

    share = 3.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.target = pico.save_target_config(corpus / "target")
        pico.write_checkpoint(corpus / "eagle3", pico.eagle3_config(), pico.eagle3_tensors(), safetensors=True)
        pico.write_checkpoint(corpus / "eagle", pico.eagle_config(), pico.eagle_tensors(), safetensors=True)
        made = convert(corpus / "eagle3", corpus, self.target)
        assert made is not None
        self.facts = sorted(
            {
                str(path[-1])
                for path in _paths(made["draftkit"]["spec"] if "spec" in made["draftkit"] else made["draftkit"])
            }
        )

    def run(self, rng: random.Random, folder: Path) -> bool:
        overrides = {}
        for _ in range(rng.choice([1, 1, 2])):
            value = any_value(rng)
            try:
                text = rng.choice([json.dumps(value), str(value)])[:5000]
            except (RecursionError, ValueError):
                text = "[" * 5000
            overrides[
                rng.choice([*self.facts, "rope_theta", "rope_scaling", "aux_layer_ids", "d2t", "embed_tokens"])
            ] = text
        made = convert(self.corpus / rng.choice(["eagle", "eagle3"]), folder, self.target, overrides=overrides)
        if made is not None:
            names = [fact["name"] for fact in block(made)["provenance"]["facts"] if fact["origin"] == "overridden"]
            said = json.dumps(names)
            assert names, f"accepted, and nothing says so: {overrides} {said}"
        return made is not None


def _paths(value: Any) -> list[tuple[Any, ...]]:
    from fuzzing.mutate import places

    return [
        path
        for path in places(value)
        if path and isinstance(path[-1], str) and not isinstance(value_at(value, path), dict)
    ]


class Pickles(Kind):
    """pytorch_model.bin: damaged archives and pickles, of which no code runs."""

    share = 3.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        pico.write_checkpoint(corpus / "draft", pico.eagle_config(), pico.eagle_tensors(), safetensors=False)
        (self.weights,) = [f for f in (corpus / "draft").iterdir() if f.suffix == ".bin"]
        self.data = self.weights.read_bytes()
        self.pickle = self.data.index(b"data.pkl")

    def run(self, rng: random.Random, folder: Path) -> bool:
        source = folder / "source"
        source.mkdir()
        (source / "config.json").write_bytes((self.corpus / "draft" / "config.json").read_bytes())
        near = rng.choice([0, self.pickle, self.pickle, max(0, len(self.data) - 2000)])
        data = self.data[:near] + damaged(rng, self.data[near : near + 2000]) + self.data[near + 2000 :]
        (source / self.weights.name).write_bytes(data)
        return convert(source, folder) is not None


KINDS: dict[str, Callable[[Path], Kind]] = {
    "config": Configs,
    "tensors": Tensors,
    "block": Blocks,
    "target": Targets,
    "header": Headers,
    "index": Indexes,
    "adapter": Adapters,
    "override": Overrides,
    "pickle": Pickles,
}
