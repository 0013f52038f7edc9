"""From what a user names to what the engine runs: targets, and drafts of any known format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError, TargetError
from draftkit.hub import locate
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.spec import CausalLMSpec, EagleSpec
from draftkit.models.loading import load_eagle
from draftkit.models.target import Target, load_target
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Drafter


def load_model(source: str, *, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target (path, Hub id or `zoo:target`) and its tokenizer. Raises `DraftkitError`."""
    folder = locate(source).path
    model = load_target(folder, device=device, dtype=dtype, attention=ATTENTION)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise TargetError(
            "the target has no tokenizer that transformers can load",
            where=folder,
            expected="tokenizer.json, or what AutoTokenizer reads",
            hint="copy the tokenizer files of the original model into the folder",
        ) from error
    return model, tokenizer


@contextmanager
def open_draft(source: str, target: str) -> Iterator[Draft]:
    """The unified draft of a source; a foreign checkpoint is converted into a temporary folder on the way."""
    located = locate(source)
    if is_unified(located.path):
        yield read_draft(located.path)
        return
    with TemporaryDirectory(prefix="draftkit-") as scratch:
        yield read_draft(convert_checkpoint(source, Path(scratch) / "draft", target=target))


def load_drafter(draft: Draft, target: PreTrainedModel) -> Drafter:
    """The drafter that runs a draft, on the target's device and in its dtype.

    Raises `TargetError` when draft and target do not fit, `DraftkitError` for kinds without a drafter.
    """
    architecture = draft.spec.architecture
    if isinstance(architecture, EagleSpec) and architecture.parallel is None:
        return EagleDrafter(load_eagle(draft, target, attention=ATTENTION))
    if isinstance(architecture, CausalLMSpec) and draft.spec.method == "draft-model":
        vocab_size = target.config.get_text_config().vocab_size
        if architecture.vocab_size != vocab_size:
            raise TargetError(
                f"the draft has {architecture.vocab_size} tokens, the target {vocab_size}",
                where=draft.path,
                hint="pass a draft with the target's vocabulary",
            )
        model = load_target(draft.path, device=str(target.device), dtype=target.dtype, attention=ATTENTION)
        return CausalLMDrafter(Target(model))
    raise DraftkitError(f"the runtime has no drafter for {draft.spec.method} drafts yet", where=draft.path)
