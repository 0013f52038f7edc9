"""What is asked of a measurement, opened once for all engines that take part."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draftkit.data.rows import LeftOutRows
from draftkit.evaluate.contexts import Filler
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import PromptSet, load_prompt_set
from draftkit.layout.digest import TargetDigest, draft_sha256
from draftkit.layout.folder import Draft
from draftkit.media import Modality
from draftkit.results.cell import Heading
from draftkit.results.settings import SCHEDULED, Settings, Sweep
from draftkit.version import __version__

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from draftkit.loading import OpenedDraft, OpenedTarget

T = TypeVar("T", bound=Heading)


@dataclass
class Job:
    """A target, the names of drafts, and settings. Each part is opened when it is first asked for, and closed with
    `stack`. `target` None: a server has its own, and renders messages itself. `resumes`: whether earlier cells
    may be kept, for which all weights are digested. `records`: whether each round is kept, with what the draft says
    of its tokens. `takes`: what else than text its engines
    are sent. Raises `DraftkitError` where a part cannot be opened.
    """

    target: str | OpenedTarget | None
    sources: Sequence[str]
    sweep: Sweep
    stack: ExitStack
    resumes: bool = False
    records: bool = False
    takes: frozenset[Modality] = frozenset()
    _digests: dict[str, str | None] = field(default_factory=dict)

    @cached_property
    def opened_target(self) -> OpenedTarget:
        """The target of an engine that runs it itself, opened after all that is wrong with the settings has shown."""
        from draftkit.loading import open_target  # needs torch, which measuring a server does without

        assert self.target is not None
        return open_target(self.target)

    @cached_property
    def prompts(self) -> PromptSet:
        first, takes = self.sweep.first, self.takes
        if self.target is not None and not self.opened_target.reads_images:
            takes -= {"image"}
        *kinds, last = ["text", *sorted(takes)]
        why = f"{', '.join(kinds)} and {last} parts are sent" if takes else "text alone is sent"
        return load_prompt_set(
            first.prompts, first.limit, strict=first.strict, recorded=first.turns == "recorded",
            left_out=LeftOutRows(takes=takes, why=f"{why} to what is measured"),
            media_root=None if first.media_root is None else Path(first.media_root),
        )  # fmt: skip

    @cached_property
    def filler(self) -> Filler | None:
        """What fills the contexts of all cells; None without a tokenizer."""
        return None if self.tokenizer is None else Filler(self.prompts.conversations, self.tokenizer)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return None if self.target is None else self.opened_target.tokenizer

    @cached_property
    def opened(self) -> Mapping[str, OpenedDraft]:
        """The drafts by their names."""
        from draftkit.loading import OpenedDraft

        return {source: OpenedDraft(source, self.opened_target, self.stack) for source in self.sources}

    @cached_property
    def drafts(self) -> Mapping[str, Draft]:
        """The unified drafts by their names, foreign ones converted."""
        return {source: opened.draft for source, opened in self.opened.items()}

    def conversations(self, settings: Settings) -> Conversations:
        reads = self.target is not None and self.opened_target.reads_images
        return Conversations(
            self.prompts.prompts, self.tokenizer, settings, filler=self.filler,
            vision=(lambda: self.opened_target.vision) if reads else None,
        )  # fmt: skip

    @cached_property
    def loaded_target(self) -> OpenedTarget:
        """The target as draftkit's own engine loads it: where some prompt has an image, with what reads images."""
        shown = any(prompt.media for prompt in self.prompts.prompts)
        return self.opened_target.with_images() if shown else self.opened_target

    def seen(self, record: T) -> T:
        """A heading or a cell with the content of prompts and template, which every engine is sent."""
        template = None
        if self.tokenizer is not None and self.sweep.first.template is not False:
            from draftkit.targets.chat import template_sha256

            template = template_sha256(self.tokenizer)
        return replace(record, prompts_sha256=self.prompts.sha256, template_sha256=template)

    def weighed(self, record: T) -> T:
        """The same with the content of the weights that are measured; of the target's, which takes longest, where there
        is a use for it. A draft without a checkpoint has None."""
        draft = self.drafts[record.draft]
        if record.draft not in self._digests:
            self._digests[record.draft] = draft_sha256(draft) if draft.tensors else None
        return replace(self.seen(record), target_sha256=self.target_sha256, draft_sha256=self._digests[record.draft])

    @cached_property
    def target_sha256(self) -> str | None:
        """The content of the target; None where nobody compares it."""
        return None if self.digest is None else self.opened_target.mark(self.digest.result())

    @cached_property
    def digest(self) -> TargetDigest | None:
        """What digests the target's weights, from when it is first asked for."""
        if not self.resumes or self.target is None:
            return None
        begun = TargetDigest(self.opened_target.folder)
        self.stack.callback(begun.stop)
        return begun


SHOWN_IDS = 16  # of the first prompt
VARIED = (
    "num_speculative_tokens", "tree", "concurrency", "context", "slices", "prompts", "device", "dtype", "strict",
    "media_root",
)  # fmt: skip


def seen_by(tokenizer: PreTrainedTokenizerBase, first_ids: Sequence[int]) -> dict[str, object]:
    """How a target sees the prompts."""
    from draftkit.targets.chat import template_sha256

    return {
        "first_prompt_ids": list(first_ids[:SHOWN_IDS]),
        "chat_template_sha256": template_sha256(tokenizer),
    }


def asked(prompts: PromptSet, settings: Settings) -> dict[str, object]:
    """The part of a result's provenance that states prompts and settings."""
    left_out = {*VARIED, *(name for name in SCHEDULED if getattr(settings, name) is None)}
    shared = {name: value for name, value in asdict(settings).items() if name not in left_out}
    del shared["sampling"]["temperature"]
    return {
        "convention": "acceptance_length = 1 + accepted draft tokens / all rounds",
        "prompts": settings.prompts,
        "dataset": {
            "name": prompts.name,
            "source": prompts.source,
            "revision": prompts.revision,
            "split": prompts.split,
            "sha256": prompts.sha256,
            "turns": settings.turns,
            "thinking": settings.thinking,
        },
        "settings": shared,
    }


def environment(device: str, dtype: torch.dtype) -> dict[str, object]:
    """The part of a result's provenance that states date, versions and machine."""
    import torch
    import transformers

    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return made_by() | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": gpu or "cpu",
        "hardware": gpu or processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def made_by() -> dict[str, object]:
    """The part of a result's provenance that states the date and draftkit's version."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "draftkit": __version__}


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
