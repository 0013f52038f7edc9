"""Rounds of an 8B-shaped target on a GPU against the roofline: plain decoding and four shapes of drafts.

`python -m scripts.bench.gpu [--batches 1 8 100] [--context 512]`; `--shape tiny --device cpu` tries the script out.
`--profile` says instead, of plain rounds and EAGLE-3's, how many kernels they launch and where their time goes.
`--json FILE` keeps the figures.

All weights are random; drafts are accepted at set rates, so that every round emits `--acceptance-length` tokens. The
roofline is the time to move the weights that the models' forwards read and the live cache at the measured speed of a
copy. `target` and `draft` are those forwards alone, in CUDA graphs of their own; what a round takes beyond them is
`outside`: sampling, input preparation, launches and the host. Assisted generation cannot be told what to accept, so its
time per round is measured, as the difference of two lengths, and the same acceptance length is credited to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftkit.evaluate.job import processor
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.models.eagle import EagleModel
from draftkit.models.mlp_speculator import MlpSpeculatorModel
from draftkit.requests import Request, Verification
from draftkit.runtime import rounds
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter, PardDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.mlp_speculator import MlpSpeculatorDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.emitted import Drafted, Emitted, Verify, emit
from draftkit.runtime.engine import Engine, OnRound
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.distribution import distribution
from draftkit.runtime.ops.random import acceptance_stream, target_stream, uniform
from draftkit.runtime.ops.sample import sample
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target
from scripts.bench.runtime import LATENCIES, commit, latencies

Module = TypeVar("Module", bound=nn.Module)

ROUNDS = 40
WARM_UP = 5  # rounds; the first one captures the graph
PROFILED = 20  # rounds
REPEATS = 20
COPIED_BYTES = 1 << 30
SEED = 0
COLUMNS = ("batch", "draft", "K", "round", "roofline", "×", "target", "draft", "outside", "tokens/s", "× plain")


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of its drafts. `small` is the config of the standalone draft and of PARD."""

    target: LlamaConfig
    small: LlamaConfig
    draft_vocab_size: int
    inner_size: int  # of the MLP speculator


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, vocab: int, *, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
    )


SHAPES = {
    "8b": Shape(  # Llama 3.1 8B, Llama 3.2 1B
        llama(4096, 14336, 32, 32, 8, 128256, tied=False), llama(2048, 8192, 16, 32, 8, 128256, tied=True), 32000, 3072
    ),
    "tiny": Shape(llama(64, 96, 4, 4, 2, 320, tied=False), llama(32, 48, 2, 4, 2, 320, tied=True), 128, 48),
}


def device_milliseconds(run: Callable[[], object]) -> float:
    """Median time of `run` on the device."""
    times = []
    for _ in range(REPEATS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return median(times)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written ones together, by a kernel: a copy in a CUDA graph is none, and moved 2.7
    of an H200's 4.8 TB/s."""
    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / device_milliseconds(captured(lambda: torch.neg(source, out=target)))


@dataclass(frozen=True)
class Draft:
    """A draft in its drafter: one round drafts `k` tokens.

    `forwards(B, length)` gives what runs the model's forwards of one round, and nothing else, for B sequences of that
    length. `weights` are the bytes of weights that they read, and `passes` how often they read the draft's own cache,
    whose size `slot_bytes` tells.
    """

    name: str
    drafter: Drafter
    k: int
    weights: int
    passes: int
    slot_bytes: SlotBytes
    forwards: Callable[[int, int], Callable[[], object]]


class Bench:
    """Target and drafts of one shape on one device."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.shape = SHAPES[options.shape]
        torch.manual_seed(SEED)
        self.model = self.causal_lm(self.shape.target)
        self.small = self.causal_lm(self.shape.small)
        self.bandwidth = self.copy_bandwidth()
        self.figures: list[dict[str, object]] = []

    def causal_lm(self, config: LlamaConfig) -> PreTrainedModel:
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=ATTENTION)
        model.generation_config.eos_token_id = None
        return model.eval().requires_grad_(False)

    def copy_bandwidth(self) -> float:
        """Bytes per millisecond, read and written ones together."""
        if self.device.type == "cuda":
            return copy_bandwidth()
        source = torch.empty(1 << 26, dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.milliseconds(lambda: target.copy_(source))

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median time of `run`, as a CUDA graph on a GPU."""
        if self.device.type == "cuda":
            return device_milliseconds(captured(run))
        run()
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return median(times) * 1e3

    def drafts(self) -> list[Draft]:
        k = self.options.k
        eagle, mlp, standalone = EagleDrafter(self.eagle()), MlpSpeculatorDrafter(self.mlp(k)), Target(self.small)
        causal, pard = CausalLMDrafter(standalone), PardDrafter(standalone, self.shape.small.vocab_size - 1)
        small, parallel = read_bytes(self.small), 2 * k
        head = read_bytes(eagle.model) - parameter_bytes(eagle.model.fc)
        steps = [(k + 1, True), *[(1, False)] * (k - 1)]
        return [
            Draft(
                "EAGLE-3",
                eagle,
                k,
                parameter_bytes(eagle.model.fc) + k * head,
                k,
                lambda capacity, _: capacity * eagle.model.spec.decoder.cached_numbers * self.dtype.itemsize,
                lambda batch, length: in_turn(
                    [self.eagle_pass(eagle.model, batch, rows, length, fuse=fuse) for rows, fuse in steps]
                ),
            ),
            Draft(
                "PARD-1B",
                pard,
                parallel,
                small,
                1,
                standalone.slot_bytes,
                lambda batch, length: self.lm_pass(standalone, batch, 2 * parallel, length),
            ),
            Draft(
                "standalone 1B",
                causal,
                k,
                k * small,
                k,
                standalone.slot_bytes,
                lambda batch, length: in_turn([self.lm_pass(standalone, batch, rows, length) for rows, _ in steps]),
            ),
            Draft(
                "MLP", mlp, k, mlp_bytes(mlp.model), 0, lambda *_: 0, lambda batch, _: self.mlp_steps(mlp.model, batch)
            ),
        ]

    def eagle(self) -> EagleModel:
        """EAGLE-3: a layer as wide as the target's, which reads three states and has a vocabulary of its own."""
        target = self.shape.target
        layers = target.num_hidden_layers
        spec = EagleSpec(
            decoder=Decoder(
                hidden_size=target.hidden_size,
                intermediate_size=target.intermediate_size,
                num_hidden_layers=1,
                num_attention_heads=target.num_attention_heads,
                num_key_value_heads=target.num_key_value_heads,
                head_dim=target.head_dim,
                hidden_act="silu",
                rms_norm_eps=1e-5,
                qkv_bias=False,
                output_bias=False,
                mlp_bias=False,
                qk_norm=False,
                sliding_window=None,
                rope=Rope(base=500000.0, declared_base=None, scaling=None, max_position_embeddings=8192),
            ),
            vocab_size=target.vocab_size,
            draft_vocab_size=self.shape.draft_vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=(1, layers // 2, layers - 1),
            token_entry="attention",
            concatenation="embedding_hidden",
            fusion_bias=False,
            feature_norm="none",
            embedding_norm=True,
            hidden_norm=True,
            input_norm=False,
            norm_before_residual=False,
            final_norm=True,
            feedback="pre_norm",
            logit_scale=1.0,
            embed_tokens="target",
            lm_head="draft",
            parallel=None,
        )
        model = self.placed(EagleModel(spec, ATTENTION))
        model.rotary = type(model.rotary)(model.rotary.config).to(self.device)  # its frequencies stay in float32
        model.borrow(self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return model

    def mlp(self, k: int) -> MlpSpeculatorModel:
        target = self.shape.target
        spec = MlpSpeculatorSpec(
            target_hidden_size=target.hidden_size,
            inner_size=self.shape.inner_size,
            vocab_size=target.vocab_size,
            num_heads=k,
            tied=True,
            scale_input=True,
            top_k_per_head=(1,) * k,
            num_candidates=1,
        )
        return self.placed(MlpSpeculatorModel(spec))

    def placed(self, model: Module) -> Module:
        return model.to(self.device, self.dtype).eval().requires_grad_(False)

    def rows(self, batch: int, count: int, length: int) -> tuple[Tensor, Tensor, Callable[[SlotCache], CacheRows]]:
        """Tokens and positions [B, T] at the end of sequences of `length`, and what finds their rows of a cache."""
        positions = torch.arange(length - count, length, device=self.device).repeat(batch, 1)
        tokens = torch.randint(self.shape.target.vocab_size, (batch, count), device=self.device)
        slots = torch.arange(batch, device=self.device)
        return tokens, positions, lambda cache: cache.rows(slots, positions, length)

    def lm_pass(self, model: Target, batch: int, count: int, length: int) -> Callable[[], object]:
        """A forward of `count` rows for each sequence."""
        tokens, positions, of = self.rows(batch, count, length)
        cache = SlotCache(batch, length)
        return lambda: model.forward(tokens, positions, of(cache))

    def eagle_pass(
        self, model: EagleModel, batch: int, count: int, length: int, *, fuse: bool = False
    ) -> Callable[[], object]:
        """A pass of `count` rows, and the logits of one; with `fuse` from target features."""
        tokens, positions, of = self.rows(batch, count, length)
        cache = SlotCache(batch, length)
        width = model.spec.feature_size if fuse else model.spec.decoder.hidden_size
        features = torch.randn(batch, count, width, device=self.device, dtype=self.dtype)

        def run() -> Tensor:
            hidden = model.fuse(features) if fuse else features
            return model.logits(model(tokens, hidden, positions, kv=of(cache)).head_input[:, -1])

        return run

    def mlp_steps(self, model: MlpSpeculatorModel, batch: int) -> Callable[[], object]:
        features = torch.randn(batch, model.spec.target_hidden_size, device=self.device, dtype=self.dtype)
        token = torch.zeros(batch, dtype=torch.int64, device=self.device)

        def run() -> Tensor:
            state = model.start(features)
            for step in range(model.spec.num_heads):
                _, state = model(step, state, token)
            return state

        return run

    def timed_round(self, batch: int, draft: Draft | None) -> tuple[float, float]:
        """The median time of a round in ms with all slots taken, and the mean length of their sequences."""
        times: list[float] = []
        lengths: list[float] = []

        def on_round(touched: list[Generation]) -> None:
            if len(touched) == batch and touched[-1].rounds:
                times.append(time.perf_counter())
                lengths.append(mean(g.length for g in touched))

        self.decode(batch, draft, on_round)
        gaps = [after - before for before, after in pairwise(times)]
        return median(gaps[WARM_UP:]) * 1e3, mean(lengths[WARM_UP:])

    def profile(self, batch: int, draft: Draft | None) -> tuple[str, float]:
        """The kernels, on a CPU the operators, that rounds spend most time in, as a table of torch's; and how many of
        them a round has."""
        cuda = self.device.type == "cuda"
        profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        seen = 0

        def on_round(touched: list[Generation]) -> None:
            nonlocal seen
            seen += len(touched) == batch and bool(touched[-1].rounds)
            if seen == WARM_UP:
                profiler.start()
            if seen == WARM_UP + PROFILED:
                profiler.stop()
                seen += 1

        self.decode(batch, draft, on_round)
        spent = f"self_{'device' if cuda else 'cpu'}_time_total"
        averages = profiler.key_averages()
        kernels = (one for one in averages if not cuda or str(one.device_type).endswith("CUDA"))
        launched = sum(one.count for one in kernels if not one.key.startswith("Mem"))  # copies are none
        return averages.table(sort_by=spent, row_limit=25, max_name_column_width=60), launched / PROFILED

    def decode(self, batch: int, draft: Draft | None, on_round: OnRound) -> None:
        """About `ROUNDS` rounds with all slots taken."""
        tokens = 1.0 if draft is None else self.options.acceptance_length
        prompts = torch.randint(self.shape.target.vocab_size, (batch, self.options.context)).tolist()
        most = round(ROUNDS * tokens) + 1
        requests = [Request(str(i), tuple(prompt), most, ignore_eos=True) for i, prompt in enumerate(prompts)]
        self.engine(batch, draft).generate(requests, on_round=on_round)

    def engine(self, batch: int, draft: Draft | None) -> Engine:
        return Engine(
            Target(self.model, None if draft is None else draft.drafter.aux_layers),
            None if draft is None else draft.drafter,
            num_speculative_tokens=0 if draft is None else draft.k,
            num_slots=batch,
        )

    def note(self, figure: str, batch: int, draft: Draft | None, **values: float) -> None:
        """Keep figures of a batch and draft."""
        name, k = ("plain", 0) if draft is None else (draft.name, draft.k)
        self.figures.append({"figure": figure, "draft": name, "k": k, "batch": batch, **values})

    def latency_row(self, concurrency: int, draft: Draft | None) -> list[str]:
        """How long first tokens and further steps take while prompts of `--context` tokens come in."""
        most = round(ROUNDS * self.options.acceptance_length)
        prompts = torch.randint(self.shape.target.vocab_size, (concurrency, self.options.context)).tolist()
        requests = [Request(str(i), tuple(prompt), most, ignore_eos=True) for i, prompt in enumerate(prompts)]
        found = latencies(self.engine(concurrency, draft), requests)
        self.note("latency", concurrency, draft, **dict(zip(LATENCIES[2:], map(float, found), strict=True)))
        return [str(concurrency), "–" if draft is None else draft.name, *found]

    def row(self, batch: int, draft: Draft | None, plain: float | None) -> tuple[list[str], float]:
        """A row of the table, and tokens/s."""
        taken, length = self.timed_round(batch, draft)
        target = Target(self.model, None if draft is None else draft.drafter.aux_layers)
        k = 0 if draft is None else draft.k
        end = round(length) + k + 1
        scoring = self.milliseconds(self.lm_pass(target, batch, k + 1, end))
        drafting = 0.0 if draft is None else self.milliseconds(draft.forwards(batch, end))
        moved = read_bytes(self.model) + batch * target.slot_bytes(round(length), 0)
        if draft is not None:
            moved += draft.weights + batch * draft.passes * draft.slot_bytes(round(length), 0)
        needed = moved / self.bandwidth
        speed = batch * (1.0 if draft is None else self.options.acceptance_length) / taken * 1e3
        outside = 1 - (scoring + drafting) / taken
        self.note("round", batch, draft, positions=round(length), ms=taken, bytes_ms=needed, tokens_per_second=speed)
        cells = [str(batch), "–" if draft is None else draft.name, str(k), f"{taken:.2f}", f"{needed:.2f}"]
        cells += [f"{taken / needed:.2f}", f"{scoring:.2f}", f"{drafting:.2f}", f"{outside:.1%}", f"{speed:.0f}"]
        return [*cells, "" if plain is None else f"{speed / plain:.2f}"], speed

    def draft_step(self, model: EagleModel) -> str:
        """One draft step of EAGLE-3 against one decoding step of the target, measured and by bytes."""
        end = self.options.context + ROUNDS
        step = self.milliseconds(self.eagle_pass(model, 1, 1, end))
        target = self.milliseconds(self.lm_pass(Target(self.model), 1, 1, end))
        by_bytes = (read_bytes(model) - parameter_bytes(model.fc)) / read_bytes(self.model)
        ratios = f"{step / target:.4f}, by bytes {by_bytes:.4f}"
        return f"EAGLE-3 draft step / target step: {step:.3f} / {target:.3f} ms = {ratios}"

    def assisted(self) -> float:
        """Tokens/s of assisted generation at the acceptance length, batch 1, with the standalone draft."""
        rounds = 0

        def count(*_: object) -> None:
            nonlocal rounds
            rounds += 1

        for model in (self.model, self.small):
            model.set_attn_implementation("sdpa")
        settings = self.small.generation_config
        settings.num_assistant_tokens = self.options.k
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        prompt = torch.randint(self.shape.target.vocab_size, (1, self.options.context), device=self.device)
        hook = self.model.register_forward_pre_hook(count)
        found = []
        for most in (ROUNDS, ROUNDS, 3 * ROUNDS):  # the first one warms up
            rounds, began = 0, time.perf_counter()
            self.model.generate(
                prompt, assistant_model=self.small, do_sample=False, max_new_tokens=most, pad_token_id=0
            )
            self.synchronize()
            found.append((rounds, time.perf_counter() - began))
        hook.remove()
        for model in (self.model, self.small):
            model.set_attn_implementation(ATTENTION)
        (fewer, short), (more, long) = found[1:]
        return self.options.acceptance_length * (more - fewer) / (long - short)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def write_figures(file: Path | None, device: str, figures: list[dict[str, object]]) -> None:
    """Keep figures in a file, where one is wanted."""
    if file is not None:
        told = {"device": device, "commit": commit(), "figures": figures}
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def accept_at_random(length: float) -> None:
    """Have rounds with drafts accept so many that `length` tokens come of each on average."""
    usual = rounds.verification

    def verification(mode: Verification, *, all_greedy: bool) -> Verify:
        def verify(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
            k = drafted.tokens.shape[1]
            if not k:
                return usual(mode, all_greedy=all_greedy)(drafted, logits, parameters, start)
            rates = (length - 1 - torch.arange(k, device=logits.device)).clamp(0, 1) * drafted.valid
            accepted = (uniform(acceptance_stream(parameters.seed, start, k)) < rates).long().cumprod(-1).sum(-1)
            p = distribution(logits.take_along_dim(accepted[:, None, None], 1), parameters)
            token = sample(p, target_stream(parameters.seed, (start + accepted)[:, None]))
            return emit(drafted, accepted, token[:, 0], rates)

        return verify

    rounds.verification = verification


def in_turn(passes: list[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [run() for run in passes]


def parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def read_bytes(model: nn.Module) -> int:
    """The bytes of weights that a forward reads: an embedding's are looked up, unless the head uses them too."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() * p.itemsize for p in model.parameters() if id(p) not in tables)


def mlp_bytes(model: MlpSpeculatorModel) -> int:
    """What the steps of a round read: every one the head and the norm, the first one its own projection."""
    first, others = map(parameter_bytes, model.proj)
    steps = model.spec.num_heads
    return steps * (parameter_bytes(model.head) + parameter_bytes(model.ln)) + first + (steps - 1) * others


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 100])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--k", type=int, default=4, help="draft tokens a round; twice as many for PARD")
    parser.add_argument("--acceptance-length", type=float, default=3.0)
    parser.add_argument("--latency", type=int, nargs="*", default=[8, 64], help="concurrencies to time first tokens at")
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of how much there is")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = arguments()
    console = Console(width=140)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device: nothing measured")
        return
    bench = Bench(options)
    place = torch.cuda.get_device_name() if bench.device.type == "cuda" else processor()
    title = (
        f"{datetime.now(UTC).date().isoformat()}, commit {commit()}, torch {torch.__version__}\n{place}, copies "
        f"{bench.bandwidth / 1e6:.0f} GB/s; shape {options.shape}, {options.context} tokens of context, acceptance "
        f"length {options.acceptance_length}; ms"
    )
    table = Table(*COLUMNS, title=title)
    drafts = bench.drafts()
    if options.profile:
        for batch, draft in product(options.batches, (None, drafts[0])):
            print(f"{'plain' if draft is None else draft.name}, batch {batch}, {PROFILED} rounds")
            told, launched = bench.profile(batch, draft)
            bench.note("kernels", batch, draft, of_a_round=launched)
            print(told)
        write_figures(options.json, place, bench.figures)
        return
    accept_at_random(options.acceptance_length)
    speeds = {}
    for batch in options.batches:
        cells, plain = bench.row(batch, None, None)
        table.add_row(*cells)
        for draft in drafts:
            cells, speeds[batch, draft.name] = bench.row(batch, draft, plain)
            table.add_row(*cells)
    console.print(table)
    waits = Table(*LATENCIES, title="first tokens and steps, ms")
    for concurrency, draft in product(options.latency, (None, *drafts[:1], drafts[2])):
        waits.add_row(*bench.latency_row(concurrency, draft))
    console.print(waits)
    write_figures(options.json, place, bench.figures)
    eagle = drafts[0].drafter
    assert isinstance(eagle, EagleDrafter)
    console.print(bench.draft_step(eagle.model))
    assisted = bench.assisted()
    for draft in drafts:
        if (1, draft.name) in speeds:
            ratio = speeds[1, draft.name] / assisted
            console.print(f"{draft.name}: {ratio:.2f} × assisted generation ({assisted:.0f} tokens/s)")


if __name__ == "__main__":
    main()
