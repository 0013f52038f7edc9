"""A draft as vLLM is told about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.engines.vllm.serve import speculative_config
from draftkit.errors import DraftkitError
from draftkit.io.atomic import temporary_folder
from draftkit.layout.folder import read_draft
from draftkit.loading import open_draft
from draftkit.results.settings import Settings


@dataclass(frozen=True)
class ServedDraft:
    """The method of a draft, and vLLM's `speculative_config`."""

    method: str
    speculative: dict[str, object]


@contextmanager
def served_draft(source: str, target: str, settings: Settings) -> Iterator[ServedDraft]:
    """A draft (path, Hub id, `zoo:NAME`, `ngram[:MIN-MAX]`) in a folder that vLLM loads.

    Foreign checkpoints are converted into a temporary folder, and so are drafts of which vLLM runs another form only.
    Raises `DraftkitError` with the reason when vLLM cannot run the draft, or cannot draft as `settings` say.
    """
    k, drawing = settings.num_speculative_tokens, _drawing(settings)
    with open_draft(source, target) as draft, temporary_folder() as scratch:
        if refusal_by_vllm(draft.spec) is not None:
            draft = read_draft(convert_checkpoint(source, scratch / "draft", to="vllm", target=target))
        yield ServedDraft(draft.spec.method, speculative_config(draft.spec, draft.path, k) | drawing)


def _drawing(settings: Settings) -> dict[str, object]:
    """How drafts are drawn and verified, where that is not vLLM's default."""
    beyond = {
        f"{settings.verification} verification": settings.verification not in ("rejection", "block"),
        "a draft length for each batch size": settings.k_by_batch is not None,
        "a temperature of the draft's own": settings.draft_sampling.temperature is not None,
    }
    for what, wanted in beyond.items():
        if wanted:
            raise DraftkitError(f"{what} is not measured with vLLM", hint="leave it out, or take draftkit's engine")
    fields: dict[str, object] = {}
    if settings.draft_mode == "probabilistic":
        fields["draft_sample_method"] = "probabilistic"
    if settings.verification == "block":
        fields["rejection_sample_method"] = "block"
    return fields
