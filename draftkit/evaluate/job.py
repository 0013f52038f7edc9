"""What is asked of a measurement, opened once for all engines that take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import PromptSet, load_prompt_set
from draftkit.layout.digest import draft_sha256, target_sha256
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.results.cell import Heading
from draftkit.results.settings import Settings, Sweep
from draftkit.targets.chat import template_sha256

T = TypeVar("T", bound=Heading)


@dataclass
class Job:
    """A target, the names of drafts, and settings. Each part is opened when it is first asked for, and closed with
    `stack`. `target` None: a server has its own, and renders messages itself. `resumes`: whether earlier cells
    may be kept, for which all weights are digested. Raises `DraftkitError` where a part cannot be opened.
    """

    target: str | OpenedTarget | None
    sources: Sequence[str]
    sweep: Sweep
    stack: ExitStack
    resumes: bool = False
    _digests: dict[str, str | None] = field(default_factory=dict)

    @cached_property
    def opened_target(self) -> OpenedTarget:
        """The target of an engine that runs it itself, opened after all that is wrong with the settings has shown."""
        assert self.target is not None
        return open_target(self.target)

    @cached_property
    def prompts(self) -> PromptSet:
        return load_prompt_set(self.sweep.first.prompts, self.sweep.first.limit, strict=self.sweep.first.strict)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return None if self.target is None else self.opened_target.tokenizer

    @cached_property
    def opened(self) -> Mapping[str, OpenedDraft]:
        """The drafts by their names."""
        return {source: OpenedDraft(source, self.opened_target, self.stack) for source in self.sources}

    @cached_property
    def drafts(self) -> Mapping[str, Draft]:
        """The unified drafts by their names, foreign ones converted."""
        return {source: opened.draft for source, opened in self.opened.items()}

    def conversations(self, settings: Settings) -> Conversations:
        return Conversations(self.prompts.prompts, self.tokenizer, settings)

    def seen(self, record: T) -> T:
        """A heading or a cell with the content of prompts and template, which every engine is sent."""
        template = None
        if self.tokenizer is not None and self.sweep.first.template is not False:
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
        return target_sha256(self.opened_target.folder) if self.resumes else None
