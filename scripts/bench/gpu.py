"""Rounds of an 8B-shaped target on a GPU against the roofline: plain decoding and three shapes of drafts.

`python -m scripts.bench.gpu [--batches 1 8 100] [--context 512]`; `--shape tiny --device cpu` tries the script out.

All weights are random. Drafts are accepted at set rates, so that a round emits `--acceptance-length` tokens on average.
The roofline is the time to move the weights that forwards read and the live cache, at the measured speed of a copy.
`target` and `draft` are those forwards alone, in CUDA graphs of their own. The rest of a round is `outside`: sampling,
input preparation, launches and the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import torch
from fixtures.checkpoints import pico
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftkit.evaluate.job import processor
from draftkit.models.eagle import EagleModel
from draftkit.requests import Request, Verification
from draftkit.runtime import rounds
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter, PardDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.emitted import Drafted, Emitted, Verify, emit
from draftkit.runtime.engine import Engine, OnRound
from draftkit.runtime.ops.distribution import distribution
from draftkit.runtime.ops.random import acceptance_stream, target_stream, uniform
from draftkit.runtime.ops.sample import sample
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target
from scripts import _bench
from scripts._bench import show, stamp

ROUNDS = 40
WARM_UP = 5  # rounds; the first one captures the graph
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


def llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int, *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
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
        llama(4096, 14336, 32, 32, 8, 128256, tied=False), llama(2048, 8192, 16, 32, 8, 128256, tied=True), 32000
    ),
    "tiny": Shape(llama(64, 96, 4, 4, 2, 320, tied=False), llama(32, 48, 2, 4, 2, 320, tied=True), 128),
}


@dataclass(frozen=True)
class Draft:
    """A draft in its drafter: one round drafts `k` tokens.

    For B sequences of a length, `forwards` gives what runs the model's forwards of one round, and nothing else; `moved`
    the bytes of weights and of the draft's cache that they read.
    """

    name: str
    drafter: Drafter
    k: int
    moved: Callable[[int, int], int]
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

    def causal_lm(self, config: LlamaConfig) -> PreTrainedModel:
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=ATTENTION)
        model.generation_config.eos_token_id = None
        return model.eval().requires_grad_(False)

    def copy_bandwidth(self) -> float:
        """Bytes per millisecond, read and written ones together.

        A kernel copies: a copy in a CUDA graph is none, and moved 2.7 of an H200's 4.8 TB/s.
        """
        source = torch.ones(COPIED_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPIED_BYTES / self.milliseconds(lambda: torch.neg(source, out=target))

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median time of `run`; on a GPU the device's, as a CUDA graph."""
        run()
        if self.device.type != "cuda":
            times = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
            return median(times) * 1e3
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
        for first, last in events:
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
        return median(first.elapsed_time(last) for first, last in events)

    def drafts(self) -> list[Draft]:
        k = self.options.k
        eagle, standalone = EagleDrafter(self.eagle()), Target(self.small)
        causal, pard = CausalLMDrafter(standalone), PardDrafter(standalone, self.shape.small.vocab_size - 1)
        small, head = read_bytes(self.small), read_bytes(eagle.model) - parameter_bytes(eagle.model.fc)
        cached = eagle.model.spec.decoder.cached_numbers * self.dtype.itemsize
        steps = [(k + 1, True), *[(1, False)] * (k - 1)]
        return [
            Draft(
                "EAGLE-3",
                eagle,
                k,
                lambda batch, length: parameter_bytes(eagle.model.fc) + k * (head + batch * length * cached),
                lambda batch, length: in_turn(
                    [self.eagle_pass(eagle.model, batch, rows, length, fuse=fuse) for rows, fuse in steps]
                ),
            ),
            Draft(
                "PARD-1B",
                pard,
                2 * k,
                lambda batch, length: small + batch * standalone.slot_bytes(length, 0),
                lambda batch, length: self.lm_pass(standalone, batch, 4 * k, length),
            ),
            Draft(
                "standalone 1B",
                causal,
                k,
                lambda batch, length: k * (small + batch * standalone.slot_bytes(length, 0)),
                lambda batch, length: in_turn([self.lm_pass(standalone, batch, rows, length) for rows, _ in steps]),
            ),
        ]

    def eagle(self) -> EagleModel:
        """EAGLE-3: a layer as wide as the target's, which reads three states and has a vocabulary of its own."""
        target, decoder = self.shape.target, pico.EAGLE3_SPEC.decoder
        layers, widths = target.num_hidden_layers, ("hidden_size", "intermediate_size", "head_dim")
        sizes = {name: getattr(target, name) for name in (*widths, "num_attention_heads", "num_key_value_heads")}
        spec = replace(
            pico.EAGLE3_SPEC,
            decoder=replace(decoder, rope=replace(decoder.rope, max_position_embeddings=8192), **sizes),
            vocab_size=target.vocab_size,
            draft_vocab_size=self.shape.draft_vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layer_ids=(1, layers // 2, layers - 1),
        )
        model = EagleModel(spec, ATTENTION).to(self.device, self.dtype).eval().requires_grad_(False)
        model.rotary = type(model.rotary)(model.rotary.config).to(self.device)  # its frequencies stay in float32
        model.borrow(self.model.get_input_embeddings(), self.model.get_output_embeddings())
        return model

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

    def decode(self, batch: int, draft: Draft | None, on_round: OnRound) -> None:
        """About `ROUNDS` rounds with all slots taken."""
        tokens = 1.0 if draft is None else self.options.acceptance_length
        prompts = torch.randint(self.shape.target.vocab_size, (batch, self.options.context)).tolist()
        most = round(ROUNDS * tokens) + 1
        requests = [Request(str(i), tuple(prompt), most, ignore_eos=True) for i, prompt in enumerate(prompts)]
        drafter, k = (None, 0) if draft is None else (draft.drafter, draft.k)
        target = Target(self.model, None if drafter is None else drafter.aux_layers)
        engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=batch)
        engine.generate(requests, on_round=on_round)

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
            moved += draft.moved(batch, round(length))
        needed = moved / self.bandwidth
        speed = batch * (1.0 if draft is None else self.options.acceptance_length) / taken * 1e3
        outside = 1 - (scoring + drafting) / taken
        cells = [str(batch), "–" if draft is None else draft.name, str(k), f"{taken:.2f}", f"{needed:.2f}"]
        cells += [f"{taken / needed:.2f}", f"{scoring:.2f}", f"{drafting:.2f}", f"{outside:.1%}", f"{speed:.0f}"]
        return [*cells, "" if plain is None else f"{speed / plain:.2f}"], speed


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


def arguments() -> argparse.Namespace:
    parser = _bench.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 100])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--k", type=int, default=4, help="draft tokens a round; twice as many for PARD")
    parser.add_argument("--acceptance-length", type=float, default=3.0)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return
    bench = Bench(options)
    place = torch.cuda.get_device_name() if bench.device.type == "cuda" else processor()
    drafts = bench.drafts()
    accept_at_random(options.acceptance_length)
    rows = []
    for batch in options.batches:
        cells, plain = bench.row(batch, None, None)
        rows += [cells, *(bench.row(batch, draft, plain)[0] for draft in drafts)]
    sizes = f"shape {options.shape}, {options.context} tokens of context, acceptance length {options.acceptance_length}"
    show(f"{stamp()}\n{place}, copies {bench.bandwidth / 1e6:.0f} GB/s; {sizes}; ms", COLUMNS, rows)


if __name__ == "__main__":
    main()
