"""What is asked of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from draftkit.errors import DraftkitError, SettingError, require_count, require_setting
from draftkit.io.settings import group, setting, values_of
from draftkit.requests import (
    DraftSampling,
    Like,
    SamplingParameters,
    Turns,
    Verification,
    check_schedule,
)
from draftkit.runtime.tree_kinds import EXAMPLES, DraftTree, read_tree

SLICES = ("language", "thinking", "tools", "category", "length")
CERTIFIED = ("rejection", "block")  # the kinds of verification whose output a certificate can judge


def read_schedule(text: str) -> dict[int, int]:
    """`4:6,16:3` → {4: 6, 16: 3}, largest batch → K. Raises `SettingError` for anything else."""
    try:
        return {int(batch): int(count) for batch, count in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        what = f"k_by_batch is {text}"
        raise SettingError(what, "k_by_batch", expected="largest batch:K pairs, as 4:6,16:3") from None


def read_slices(text: str) -> tuple[str, ...]:
    """The kinds of slices in a text such as `language,tools`, in its order, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


@dataclass(frozen=True)
class Settings:
    """How to measure one cell; each field says what it is for.

    `dtype` and `device` None: bfloat16 on a GPU where there is one, float32 on the CPU. Request i is drawn with the
    seed `sampling.seed` + i.

    Raises `SettingError` for a value outside its range, and for two that do not go together.
    """

    num_speculative_tokens: int = setting("Draft tokens a round; of a tree its depth.", 4, unit="tokens")
    max_new_tokens: int = setting("Tokens to generate per prompt, at most.", 128, unit="tokens")
    concurrency: int = setting("Sequences decoded together.", 1, unit="sequences")
    prompts: str = setting(
        "zoo (bundled), mt-bench, humaneval, …, a JSONL file, a .txt file with a prompt in each line, or a Hub "
        "dataset. A row has messages, conversations, turns, prompt, data or question; or text, gone on with as it is.",
        "zoo",
    )
    limit: int | None = setting("Use this many prompts, spread over the set.", None, unit="prompts")
    strict: bool = setting(
        "Refuse prompts with parts that are not measured, as videos, or with unreadable images; else they are left out "
        "and counted.",
        False,
    )
    media_root: str | None = setting(
        "The folder below which the images of prompts lie; default: that of their file.", None
    )
    turns: Turns = setting(
        "Of prompts with several: the first; all, each after the target's own answers; or each answer that is "
        "recorded, as an agent's, asked for anew after all that its row has before it.",
        "first",
    )
    thinking: bool | None = setting("The chat template's enable_thinking; default: its own.", None)
    template: bool | None = setting(
        "Apply the chat template to all prompts, or to none; default: where there is one, but not to text.", None
    )
    context: int = setting(
        "Put other conversations of the set before each prompt, up to as many tokens; 0 puts none.", 0, unit="tokens"
    )
    slices: tuple[str, ...] = setting(
        f"Say how acceptance shifts with {', '.join(SLICES)}; several as language,tools.",
        (),
        reads=read_slices,
    )
    ignore_eos: bool = setting("Generate max_new_tokens tokens, whatever the model says.", False)
    repeats: int = setting(
        "Passes over the prompts at most, without the draft and with it by turns, until the speed-up is known to 5 %; "
        "0 runs plain decoding once, before all drafts.",
        3,
        unit="passes",
    )
    device: str | None = setting("cpu, cuda or cuda:N; default: cuda where there is one.", None)
    dtype: str | None = setting("float32, bfloat16 or float16; default: bfloat16 on a GPU, float32 on the CPU.", None)
    sampling: SamplingParameters = group(SamplingParameters)
    draft_sampling: DraftSampling = group(DraftSampling)
    verification: Verification = setting(
        "rejection and block keep the distribution, coupled the very tokens of plain decoding.", "rejection"
    )
    k_by_batch: dict[int, int] | None = setting(
        "Largest batch:K pairs, as 4:6,16:3; beyond the last nothing is drafted.", None, reads=read_schedule
    )
    disable_above_batch: int | None = setting(
        "Draft nothing while more sequences than this are decoded together.",
        None,
        unit="sequences",
        needs="no k_by_batch",
    )
    tree: str | None = setting(f"Draft a tree instead of a chain: {', '.join(EXAMPLES)}.", None)
    eager: bool = setting("On a GPU, launch every kernel instead of replaying CUDA graphs.", False)
    compile: bool = setting(
        "On a CPU, run rounds as compiled programs, which are kept: faster, once a minute has gone into each kind of "
        "batch and K. Needs a C++ compiler.",
        False,
        later=True,
    )
    like: Like = setting(
        "Whose rule holds beyond a draft's positions: vLLM's first model runner drafts no more there (vllm-v1), its "
        "second drafts on (vllm-v2).",
        "vllm-v2",
        later=True,
    )

    def __post_init__(self) -> None:
        require_count("num_speculative_tokens", self.num_speculative_tokens)
        require_count("max_new_tokens", self.max_new_tokens, least=2)
        require_count("concurrency", self.concurrency)
        require_count("context", self.context, least=0)
        require_count("repeats", self.repeats, least=0)
        for name in ("limit", "disable_above_batch"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        require_setting(self.turns in get_args(Turns), "turns", self.turns, ", ".join(get_args(Turns)))
        if self.context and self.turns == "recorded":
            what, hint = "recorded turns have a context of their own", "leave out --context, and read --slice length"
            raise SettingError(what, "context", hint=hint)
        modes = get_args(Verification)
        require_setting(self.like in get_args(Like), "like", self.like, ", ".join(get_args(Like)))
        require_setting(self.verification in modes, "verification", self.verification, ", ".join(modes))
        for kind in self.slices:
            require_setting(kind in SLICES, "slices", kind, ", ".join(SLICES))
        if self.tree is not None:
            self._settle_tree(read_tree(self.tree))
        if self.k_by_batch is not None:
            check_schedule(self.k_by_batch, self.num_speculative_tokens)
            if self.disable_above_batch is not None:
                what = "k_by_batch and disable_above_batch say the same thing twice"
                raise SettingError(what, "k_by_batch", hint="give one of them")

    def _settle_tree(self, tree: DraftTree) -> None:
        """K becomes the depth. Raises `SettingError` for what goes with a chain alone."""
        object.__setattr__(self, "num_speculative_tokens", tree.depth)
        alone = {
            "verification": self.verification if self.verification == "block" else None,
            "draft_confidence": self.draft_sampling.min_confidence or None,
            "draft_sampling": "probabilistic" if self.draft_sampling.mode == "probabilistic" else None,
            "draft_temperature": self.draft_sampling.temperature,
            "k_by_batch": self.k_by_batch,
            "disable_above_batch": self.disable_above_batch,
        }
        for name, value in alone.items():
            if value is not None:
                raise SettingError(
                    f"{name} is {value!r}, and a tree is drafted", name, expected="a chain of drafts",
                    hint=f"leave out {name}, or --tree: a tree's nodes are chosen, and each round has all of them",
                )  # fmt: skip

    @property
    def drafted_tree(self) -> DraftTree | None:
        """What is drafted instead of a chain."""
        return None if self.tree is None else read_tree(self.tree)

    @property
    def schedule(self) -> dict[int, int] | None:
        """Largest batch → K; None where K is the same at every batch size."""
        if self.disable_above_batch is not None:
            return {self.disable_above_batch: self.num_speculative_tokens}
        return self.k_by_batch

    @property
    def draft_mode(self) -> str:
        """How drafts are drawn at these settings: greedy or probabilistic."""
        if self.tree is not None:
            return "greedy"
        return "probabilistic" if self.draft_sampling.parameters(self.sampling).temperature else "greedy"

    @property
    def exact(self) -> bool:
        """Whether the output must be that of plain decoding, token for token."""
        return self.verification == "coupled" or self.tree is not None or self.sampling.temperature == 0

    def at(
        self,
        *,
        num_speculative_tokens: int | None = None,
        tree: str | None = None,
        concurrency: int | None = None,
        temperature: float | None = None,
        context: int | None = None,
        draft_confidence: float | None = None,
    ) -> Settings:
        """The same settings but for those that a sweep varies; None keeps what they are."""
        return replace(
            self,
            num_speculative_tokens=_or(num_speculative_tokens, self.num_speculative_tokens),
            tree=_or(tree, self.tree),
            concurrency=_or(concurrency, self.concurrency),
            context=_or(context, self.context),
            sampling=replace(self.sampling, temperature=_or(temperature, self.sampling.temperature)),
            draft_sampling=replace(
                self.draft_sampling, min_confidence=_or(draft_confidence, self.draft_sampling.min_confidence)
            ),
        )

    def sweep(
        self,
        *,
        k: Sequence[int] = (),
        tree: Sequence[str] = (),
        concurrency: Sequence[int] = (),
        temperature: Sequence[float] = (),
        context: Sequence[int] = (),
        draft_confidence: Sequence[float] = (),
    ) -> Sweep:
        """Every combination of these values, all else as it is; without values, that of these settings.

        Raises `SettingError` for several K with K by batch, which is for one, and for K beside a tree.
        """
        (self.at(tree=tree[0]) if tree else self)._check_ks(k)
        return Sweep(
            tuple(
                self.at(
                    num_speculative_tokens=tokens,
                    tree=shape,
                    concurrency=batch,
                    temperature=hot,
                    context=length,
                    draft_confidence=least,
                )
                for length in context or (self.context,)
                for hot in temperature or (self.sampling.temperature,)
                for batch in concurrency or (self.concurrency,)
                for shape in tree or (self.tree,)
                for tokens in k or (self.num_speculative_tokens,)
                for least in draft_confidence or (self.draft_sampling.min_confidence,)
            )
        )

    def _check_ks(self, ks: Sequence[int]) -> None:
        if len(set(ks)) > 1 and self.k_by_batch is not None:
            raise SettingError("schedules are for one K", "num_speculative_tokens", expected="one")
        if self.tree is not None and set(ks) - {self.num_speculative_tokens}:
            raise SettingError(
                f"K beside the tree {self.tree}", "num_speculative_tokens", expected="its depth alone",
                hint="leave out --k, or --tree",
            )  # fmt: skip


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


@dataclass(frozen=True)
class Sweep:
    """Settings that are measured one after another: what all of one measurement are asked.

    They are alike but for K, tree, concurrency, temperature, context and draft_confidence. Raises `DraftkitError`
    otherwise, and for none.
    """

    settings: tuple[Settings, ...]

    def __post_init__(self) -> None:
        if len({_shared(settings) for settings in self.settings}) != 1:
            raise DraftkitError(
                f"a sweep of {len(self.settings)} settings",
                expected="at least one, alike but for K, tree, concurrency, temperature, context and draft_confidence",
            )
        if not self.trees:
            self.first._check_ks(self.k)

    @classmethod
    def of(cls, asked: Settings | Sweep) -> Sweep:
        return asked if isinstance(asked, Sweep) else cls((asked,))

    @property
    def first(self) -> Settings:
        return self.settings[0]

    @property
    def k(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.num_speculative_tokens for settings in self.settings))

    @property
    def trees(self) -> tuple[DraftTree, ...]:
        """The trees that are drafted; none where chains are."""
        return tuple(dict.fromkeys(tree for one in self.settings if (tree := one.drafted_tree) is not None))

    @property
    def concurrency(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.concurrency for settings in self.settings))

    @property
    def temperature(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(settings.sampling.temperature for settings in self.settings))

    @property
    def context(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(settings.context for settings in self.settings))

    @property
    def groups(self) -> list[tuple[Settings, ...]]:
        """The settings, those together that share a run without a draft."""
        groups: dict[tuple[float, ...], list[Settings]] = {}
        for settings in self.settings:
            shared = (settings.context, settings.sampling.temperature, settings.concurrency)
            groups.setdefault(shared, []).append(settings)
        return [tuple(group) for group in groups.values()]

    def require_certifiable(self) -> None:
        """Raise `SettingError` for a verification that no certificate can judge."""
        verification = self.first.verification
        require_setting(
            verification in CERTIFIED, "verification", verification, f"{' or '.join(CERTIFIED)}, to certify"
        )

    @property
    def largest(self) -> Settings:
        """The settings that would take the most memory."""
        widest = max(
            self.settings, key=lambda one: one.drafted_tree.span if one.drafted_tree else one.num_speculative_tokens
        )
        return widest.at(concurrency=max(self.concurrency), context=max(self.context))


@dataclass(frozen=True)
class Taken:
    """Which settings an engine takes. `by`: the engine, as a message calls it.

    `several_k`: whether one measurement has several K. `verification`: the kinds that it has. `left`: the settings that
    it does not take, by name.
    """

    by: str
    several_k: bool = True
    verification: tuple[str, ...] = get_args(Verification)
    left: tuple[str, ...] = ()

    def check(self, sweep: Sweep) -> None:
        """Raise `SettingError` for a setting that the engine does not take, instead of one that means nothing."""
        given, usual = [values_of(one) for one in sweep.settings], values_of(Settings())
        beyond = {name: f"{name} {one[name]!r}" for name in self.left for one in given if one[name] != usual[name]}
        if len(sweep.k) > 1 and not self.several_k:
            beyond["num_speculative_tokens"] = "several K"
        if (verification := sweep.first.verification) not in self.verification:
            beyond["verification"] = f"{verification} verification"
        for name, what in beyond.items():
            raise SettingError(f"{what} for {self.by}", name, hint="leave it out")


DRAWN = ("draft_sampling", "draft_greedy_below", "draft_temperature", "draft_confidence")  # how drafts are drawn
SCHEDULED = ("k_by_batch", "disable_above_batch")  # K depends on the batch; that of a cell is the largest
# The settings that each kind of engine takes: a server that was started elsewhere, and vLLM, which is started here.
AS_STARTED = Taken(
    "a server, which runs as it was started",
    several_k=False,
    verification=("rejection",),
    left=(*SCHEDULED, *DRAWN, "tree"),
)
VLLM = Taken("vLLM", verification=CERTIFIED, left=(*SCHEDULED, "draft_temperature", "draft_confidence", "tree"))


def _shared(settings: Settings) -> str:
    """What all settings of a sweep have in common, to compare; there may be dictionaries in it."""
    varied = {"num_speculative_tokens", "tree", "concurrency", "context"}
    shared = vars(settings.at(temperature=0.0, draft_confidence=0.0))
    return repr({name: value for name, value in shared.items() if name not in varied})
