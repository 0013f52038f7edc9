"""The usual mistakes of measuring speculative decoding, told from what was asked and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftkit.checks.evidence import FAR, Asked
from draftkit.checks.registry import check
from draftkit.engines.known import chosen, known, numbered
from draftkit.engines.serving import refusal_notes
from draftkit.finding import Finding
from draftkit.layout.architecture import Architecture
from draftkit.layout.provenance import FactOrigin, trained_tokens
from draftkit.layout.spec import DraftSpec
from draftkit.results.cell import Cell
from draftkit.results.settings import Settings
from draftkit.results.statistics import is_looping
from draftkit.results.verdict import disturbed, unexplained

CONSISTENT = 0.25  # how far the gap between chunks may be from acceptance length × time per token
SAME_WORK = 0.02  # how far the outputs with and without a draft may differ in length at temperature 0
NOISE = "selector-noise-by-step"  # the rule of vLLM's releases that tells it
COLD = 5  # times the median that a slowest first token may take
PROMPTS = 0.5  # of plain decoding's time, from which on its prompts decide more than any draft


@check
def double_bos(asked: Asked) -> Iterator[Finding]:
    if asked.bos is not None and list(asked.first_ids[:2]) == [asked.bos, asked.bos]:
        yield Finding(
            "double-bos",
            "warning",
            f"the prompts begin with two beginning-of-sequence tokens ({', '.join(map(str, asked.first_ids[:4]))} …): "
            "the template writes one and the tokenizer another",
        )


@check
def first_turn_only(asked: Asked, settings: Settings) -> Iterator[Finding]:
    several = sum(turns > 1 for turns in asked.turns)
    if several and settings.turns == "first":
        yield Finding(
            "first-turn-only",
            "warning",
            f"{several} of {len(asked.turns)} prompts have further turns, which were not asked (--set turns=all)",
        )


@check
def other_noise(cell: Cell) -> Iterator[Finding]:
    """Sampled proposals of a selector, whose noise vLLM has changed between its releases."""
    release = None if cell.engine_version is None else numbered("vLLM", cell.engine_version)
    others = [one for one in known()["vLLM"] if one.rules[NOISE].there != (release and release.rules[NOISE].there)]
    if release is not None and cell.engine == "vllm" and cell.method == "dflash2" and cell.temperature and others:
        yield Finding(
            "other-noise",
            "note",
            f"{release} has drawn these proposals with other noise than {', '.join(map(str, others))}: compare sampled "
            "figures of dflash2 drafts within one of them",
            source="vLLM v1/worker/gpu/spec_decode/dflash2/speculator.py",
        )


@check
def not_served(spec: DraftSpec) -> Iterator[Finding]:
    """A draft that the release that is asked for, or that was measured, does not serve as it lies."""
    if chosen() is not None and (notes := refusal_notes(spec)):
        yield Finding("not-served", "warning", notes[0], fix="; ".join(notes[1:]), source="tables of releases")


@check
def masked_prompts(asked: Asked) -> Iterator[Finding]:
    if asked.masked:
        yield Finding(
            "masked-prompts",
            "warning",
            f"{asked.masked} rows of {asked.source} hold a placeholder instead of a prompt and were left out: not "
            "comparable with figures for the whole set; pass the file that the publisher's script prepares",
        )


@check
def prompts_with_media(asked: Asked) -> Iterator[Finding]:
    if asked.left_out is not None and asked.left_out.rows:
        yield Finding("prompts-left-out", "warning", str(asked.left_out))


@check
def loops(cell: Cell, settings: Settings) -> Iterator[Finding]:
    if cell.repetition is not None and is_looping(cell.repetition):
        forced = "; ignore_eos makes outputs run on after their end" if settings.ignore_eos else ""
        yield Finding(
            "loops",
            "warning",
            f"at T={cell.temperature:g} {100 * cell.repetition:.0f} % of the output repeats itself, which is "
            f"easy to draft: acceptance lengths are higher than those of real text{forced}",
            extent=cell.repetition,
        )


@check
def estimated(cell: Cell) -> Iterator[Finding]:
    if cell.estimated:
        yield Finding(
            "acceptance-estimated",
            "warning",
            f"{cell.draft}, concurrency {cell.concurrency}: the server does not say what it accepts; told from the "
            "sizes of the chunks that it streams, which are longer than rounds where it puts several together",
        )


@check
def beyond_positions(cell: Cell) -> Iterator[Finding]:
    if beyond := cell.num_drafts_beyond:
        yield Finding(
            "beyond-positions",
            "warning",
            f"{cell.name}: in {beyond} of {cell.num_drafts} rounds a sequence was too long for the draft; vLLM's "
            "first model runner (V1) drafts nothing there and counts the round, and so did this measurement",
            extent=beyond / max(cell.num_drafts or 1, 1),
        )


@check
def beyond_training(cell: Cell, origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    """Text much longer than any that the draft has seen, as far as its training has said."""
    trained = trained_tokens(origins.values())
    longest = max((one.prompt_tokens + one.tokens for one in cell.by_prompt or () if one.prompt_tokens), default=0)
    if trained is not None and longest > FAR * trained:
        yield Finding(
            "beyond-training",
            "warning",
            f"{cell.name}: sequences grew to {longest:,} tokens, and the draft was trained up to {trained:,}",
            cost="acceptance may fall with the length",
            fix="doctor --context tells what mends it; or train on longer samples",
            source="vllm-project/speculators #684",
        )


@check
def shortened_blocks(cell: Cell, architecture: Architecture) -> Iterator[Finding]:
    """A row that sees the later rows of its block was trained with all of them there."""
    most = architecture.draft_tokens
    if architecture.fixed_length and most is not None and cell.num_speculative_tokens < most:
        yield Finding(
            "shortened-blocks",
            "warning",
            f"{cell.draft}, K={cell.num_speculative_tokens}: the draft's block was trained for K={most}; its rows see "
            "the masks after them, and with fewer of those they draft other tokens",
        )


@check
def lengthened_blocks(cell: Cell, architecture: Architecture) -> Iterator[Finding]:
    most = architecture.draft_tokens
    if most is not None and cell.num_speculative_tokens > most:
        seen = ", and that the rows before them see" if architecture.fixed_length else ""
        yield Finding(
            "lengthened-blocks",
            "warning",
            f"{cell.draft}, K={cell.num_speculative_tokens}: the draft's block was trained for K={most}; the further "
            f"tokens come from rows that it was not trained for{seen}, here as in vLLM",
        )


@check
def heads_used_again(cell: Cell, facts: Mapping[str, object]) -> Iterator[Finding]:
    """Multi-token prediction modules, each of which was trained for one position."""
    heads, k = facts.get("num_modules"), cell.num_speculative_tokens
    if not isinstance(heads, int):
        return
    if heads > 1 and facts.get("modules") == "first" and k > 1:
        what = f"only the first of {heads} multi-token prediction modules drafts, as in vLLM,"
    elif k > heads:
        what = f"the target has {heads} multi-token prediction module(s),"
    else:
        return
    refused = f"; vLLM refuses this K, which is no multiple of {heads}" if k > heads and k % heads else ""
    yield Finding(
        "heads-used-again",
        "warning",
        f"{cell.draft}, K={k}: {what} run again on their own states for the further tokens, which most were not "
        f"trained for: expect less acceptance there; recipe mtp trains it{refused}",
    )


@check
def latency_disagrees(cell: Cell) -> Iterator[Finding]:
    """One request at a time: a round's chunk comes after as many tokens' times as it emits."""
    itl, tpot = cell.itl_ms, cell.tpot_ms
    emitted = cell.acceptance_length_by_convention.get("eagle")
    if not (itl and tpot and emitted and cell.concurrency == 1):
        return
    ratio = itl.mean / tpot.mean
    if abs(ratio / emitted - 1) > CONSISTENT:
        yield Finding(
            "latency-disagrees",
            "warning",
            f"{cell.name}: chunks are {ratio:.2f} times as far apart as tokens, and rounds emit {emitted:.2f}: "
            "times were disturbed, or most answers are too short to tell",
            extent=abs(ratio / emitted - 1),
        )


@check
def unexplained_speed(cell: Cell) -> Iterator[Finding]:
    """A round takes at least as long as a plain step, so that a draft brings no more than the tokens of a round."""
    length = cell.acceptance_length
    if length is not None and unexplained(cell):
        yield Finding(
            "speed-unexplained",
            "warning",
            f"{cell.name}, T={cell.temperature:g}: {cell.times_faster:.2f} times plain decoding is more than an "
            f"acceptance length of {length.mean:.2f} accounts for: the baseline was disturbed; measure again on a "
            "machine that does nothing else, with --set repeats=10",
            extent=(cell.times_faster or 0.0) / length.mean,
        )


@check
def disturbed_speed(cell: Cell) -> Iterator[Finding]:
    if disturbed(cell):
        yield Finding(
            "speed-disturbed",
            "warning",
            f"{cell.name}, T={cell.temperature:g}: what a round costs against a plain step is known to "
            f"±{cell.pace_error:.0%} only, after {cell.passes} {'pass' if cell.passes == 1 else 'passes'} by turns: "
            "something else used the machine, or the prompts are few",
            extent=cell.pace_error,
        )


@check
def no_warm_up(cell: Cell) -> Iterator[Finding]:
    ttft = cell.ttft_quantiles_ms
    if ttft and (cell.num_prompts or 0) >= 8 and ttft[100] > COLD * max(ttft[90], 1e-9):
        yield Finding(
            "no-warm-up",
            "warning",
            f"{cell.name}: one first token took {ttft[100]:.0f} ms, nine of ten at most {ttft[90]:.0f}: something "
            "was still warming up",
            extent=ttft[100] / max(ttft[90], 1e-9),
        )


@check
def mostly_prompts(cell: Cell, settings: Settings) -> Iterator[Finding]:
    """One request at a time, most of which is the wait for its first token, with a draft as without one."""
    first, tpot, speed = cell.baseline_ttft_ms, cell.tpot_ms, cell.baseline_tokens_per_second
    one_each = cell.concurrency == 1 and settings.turns == "first"
    if not (one_each and first and tpot and speed and cell.num_prompts and cell.baseline_output_tokens):
        return
    tokens = cell.baseline_output_tokens / cell.num_prompts
    request_ms = 1000 * tokens / speed
    share = first.mean / request_ms
    if tokens > 1 and PROMPTS < share < 1:
        decoding = (request_ms - first.mean) / (tokens - 1) / tpot.mean
        yield Finding(
            "mostly-prompts",
            "note",
            f"{cell.name}: {share:.0%} of plain decoding's time passes before the first tokens, which no draft brings "
            f"sooner; from there on it is {decoding:.2f} × as fast with the draft",
            fix="measure answers as long as yours are (--max-new-tokens)",
            extent=share,
        )


@check
def unequal_baseline(cell: Cell) -> Iterator[Finding]:
    output, baseline = cell.output_tokens, cell.baseline_output_tokens
    if cell.temperature or output is None or baseline is None:
        return
    if abs(output / max(baseline, 1) - 1) > SAME_WORK:
        yield Finding(
            "unequal-baseline",
            "warning",
            f"{cell.name}: {output} tokens with the draft and {baseline} without one: the speed-up "
            "compares different texts",
            extent=abs(output / max(baseline, 1) - 1),
        )
