"""What the speculators library itself does with drafts; run by `speculators.py` with the Python of its environment.

Reads a JSON object from standard input: `jobs`, a list, and `result`, the file that gets one object for each job:
`error`, or what the job found. Jobs:

- `make`: a draft of random weights, saved by `save_pretrained`, and its logits.
- `convert`: a foreign checkpoint through `Eagle3Converter`.
- `load`: a folder by the library's own class, strictly, and its logits.

Logits are those of two training steps of EAGLE-3 (the second is fed by the first), or of one P-EAGLE pass.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # the setting above must be in the environment first
from loguru import logger
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle import Eagle3Converter
from speculators.losses import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig
from transformers.utils import logging

CONFIGS = {"eagle3": Eagle3SpeculatorConfig, "peagle": PEagleSpeculatorConfig}
FROM_TARGET = {"verifier_lm_head.weight", "verifier_norm.weight"}  # needed for training, never saved


def make(job: dict) -> dict:
    config = CONFIGS[job["kind"]](
        transformer_layer_config=AutoConfig.for_model(**job["layer"]),
        speculators_config=SpeculatorsConfig(
            algorithm=job["kind"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(job["target"]),
        ),
        **job["options"],
    )
    model = build(config)
    randomize(model)
    model.save_pretrained(job["folder"])
    save_logits(model, job)
    return {}


def convert(job: dict) -> dict:
    Eagle3Converter().convert(job["source"], job["folder"], job["target"], validate=False)
    return {}


def load(job: dict) -> dict:
    """Twice: by `load_state_dict`, which says what is missing, and by `from_pretrained`, as its users do."""
    strict = build(SpeculatorModelConfig.from_pretrained(job["folder"]))
    found = strict.load_state_dict(load_file(Path(job["folder"], "model.safetensors")), strict=False)
    config = SpeculatorModelConfig.from_pretrained(job["folder"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(job["folder"], config=config).float().eval()
    save_logits(model, job)
    return {"missing": sorted(set(found.missing_keys) - FROM_TARGET), "unexpected": sorted(found.unexpected_keys)}


def build(config: SpeculatorModelConfig) -> SpeculatorModel:
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.registered_model_class_from_config(config)(config).float().eval()


def randomize(model: SpeculatorModel) -> None:
    """Norms around 1, other weights small; a vocabulary map that is not the identity."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 and name.endswith("norm.weight") else 0.1 * noise
    if model.use_draft_vocab:
        size, draft = model.verifier_vocab_size, model.draft_vocab_size
        kept = torch.randperm(size, generator=generator)[:draft].sort().values
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(draft))


@torch.no_grad()
def save_logits(model: SpeculatorModel, job: dict) -> None:
    inputs = load_file(job["inputs"])
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output))
    common = {
        "hidden_states": inputs["features"],
        "input_ids": inputs["tokens"],
        "document_ids": torch.zeros_like(inputs["tokens"]),
    }
    if "anchors" in inputs:
        chosen = inputs["anchors"], inputs["depths"]
        peagle.generate_cod_sample_indices = lambda **_: chosen  # training draws them at random
        last = torch.zeros(*inputs["tokens"].shape, model.hidden_size)
        model(**common, verifier_last_hidden_states=last, loss_config=resolve_loss_config("kl_div", "eager"))
    else:
        model(**common, ttt_steps=2)
    hook.remove()
    save_file({"logits": torch.cat(seen, dim=1)}, job["logits"])


def run(job: dict) -> dict:
    try:
        return {"make": make, "convert": convert, "load": load}[job["do"]](job)
    except Exception as error:  # whatever the library raises is the finding
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    logger.remove()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    order = json.load(sys.stdin)
    Path(order["result"]).write_text(json.dumps([run(job) for job in order["jobs"]]))


if __name__ == "__main__":
    main()
