"""Hold draftkit's tree rounds against EAGLE's own repository and DDTree's, round by round at temperature 0.

    python -m scripts.check.trees --eagle CLONE --ddtree CLONE [--prompts 6] [--tokens 48]

EAGLE: its `eagle/model/cnets.py` drafts (with the weights of zoo:eagle3), its `evaluate_posterior` decides, and
transformers scores the tree with a 4-D mask and no cache. `ea_model.py` is not run, for it needs an old transformers.
DDTree: its `build_ddtree_tree` and `follow_verified_tree`, on the logits of zoo:dflash; its own model needs flash-attn,
so that `loguru`, `model` and `dflash` are stubs where it imports them. Equal are to be all nodes, and how many stood;
EAGLE's are in draftkit's order too. Exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftkit import zoo
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.loading import load_drafter, load_model, open_draft, open_target
from draftkit.requests import Request
from draftkit.results.settings import Settings
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.runtime.tree_kinds import read_tree
from draftkit.targets.target import Target


class ReferenceRound(NamedTuple):
    """A tree as another program has it, and how many of its nodes stood."""

    tokens: list[int]
    parents: list[int]
    accepted: int


def decoded(name: str, tree: str, requests: Sequence[Request]) -> list[Generation]:
    """What draftkit does."""
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        drafter = load_drafter(draft, model, tokenizer)
    shape = read_tree(tree)
    target = Target(model, drafter.aux_layers)
    return Engine(target, drafter, num_speculative_tokens=shape.depth, num_slots=1, tree=shape).generate(requests)


def plain_target() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        zoo.path("target"), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def scored(
    model: PreTrainedModel,
    text: Sequence[int],
    nodes: Tensor,
    mask: Tensor,
    depth: Tensor,
    layers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Logits and states of the tree's rows, root first, after all of `text` but its newest token: no cache."""
    known, rows = len(text) - 1, len(nodes)
    seen = torch.ones(known + rows, known + rows).tril().bool()
    seen[known:, known:] = mask.bool()
    bias = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
    ids = torch.cat((torch.tensor(text[:known], dtype=torch.int64), nodes))[None]
    places = torch.cat((torch.arange(known), known + depth))[None]
    out = model(input_ids=ids, position_ids=places, attention_mask=bias, use_cache=False, output_hidden_states=True)
    states = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
    return out.logits[0, known:], states[0]


def goes_on(target: PreTrainedModel, text: Sequence[int], request: Request) -> bool:
    """Whether an answer has neither ended nor its full length."""
    answer = text[len(request.prompt) :]
    return len(answer) < request.max_new_tokens and target.config.eos_token_id not in answer


LAYERS: tuple[int, ...] = (2, 5, 7)  # of EAGLE-3: the third, the middle and the third from the end of ten


@torch.no_grad()
def eagle_rounds(clone: Path, requests: Sequence[Request], k: int, depth: int, nodes: int) -> Iterator[list[Any]]:
    """The rounds of each request by EAGLE's code; `depth` and `nodes` in draftkit's counting."""
    sys.path.insert(0, str(clone))
    from eagle.model.cnets import Model  # type: ignore[import-not-found]
    from eagle.model.configs import EConfig  # type: ignore[import-not-found]
    from eagle.model.utils import evaluate_posterior  # type: ignore[import-not-found]

    target = plain_target()
    config = EConfig.from_pretrained(str(zoo.path("eagle3") / "config.json"))
    config.rope_scaling, config.pretraining_tp = None, 1
    draft = Model(config, load_emb=False, total_tokens=nodes + 1, depth=depth - 1, top_k=k)
    weights = torch.load(zoo.path("eagle3") / "pytorch_model.bin", weights_only=True)
    print("not among EAGLE's tensors:", draft.load_state_dict({n: t.float() if t.is_floating_point() else t
                                                               for n, t in weights.items()}, strict=False))  # fmt: skip
    draft.embed_tokens.weight.data = target.get_input_embeddings().weight.data
    draft.eval().init_tree()
    for request in requests:
        text = list(request.prompt)
        out = target(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer] for layer in LAYERS], dim=-1)
        text.append(int(out.logits[0, -1].argmax()))
        draft.reset_kv()
        rounds: list[ReferenceRound] = []
        while goes_on(target, text, request):
            tokens, paths, mask, places = draft.topK_genrate(features, torch.tensor([text]), None, None)
            logits, states = scored(target, text, tokens[0], mask[0, 0], places, LAYERS)
            candidates = torch.cat((tokens[0], torch.tensor([-1])))[paths]
            best, count, after = evaluate_posterior(logits[paths], candidates, None)
            path = paths[best, : int(count) + 1]
            parents = [int(mask[0, 0, row, :row].nonzero().max()) for row in range(1, mask.shape[2])]
            rounds.append(ReferenceRound(tokens[0, 1:].tolist(), parents, int(count)))
            features = states[len(text) - 1 :][path][None]
            text += [*tokens[0, path[1:]].tolist(), int(after.argmax())]
        yield rounds


@torch.no_grad()
def ddtree_rounds(clone: Path, requests: Sequence[Request], depth: int, nodes: int) -> Iterator[list[Any]]:
    """The rounds of each request by DDTree's code, on the logits of draftkit's DFlash."""
    from draftkit.runtime.cache import SlotCache
    from draftkit.runtime.drafters.protocol import Committed, NewSequence

    for name in ("loguru", "model", "dflash"):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules["loguru"])["logger"] = SimpleNamespace(warning=print)
    vars(sys.modules["model"]).update(dict.fromkeys(("DFlashDraftModel", "sample", "extract_context_feature")))
    times = {"cuda_time": lambda: 0.0, "empty_stage_times": lambda names: dict.fromkeys(names, 0.0)}
    vars(sys.modules["dflash"]).update(times | {"dflash_generate": None})
    sys.path.insert(0, str(clone))
    import ddtree  # type: ignore[import-not-found]

    target = plain_target()
    own, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    with open_draft("zoo:dflash", "zoo:target") as draft:
        drafter = load_drafter(draft, own, tokenizer)
    assert drafter.aux_layers is not None
    layers = tuple(layer if isinstance(layer, int) else -1 for layer in drafter.aux_layers.states)
    for request in requests:
        text, capacity = list(request.prompt), len(request.prompt) + request.max_new_tokens + nodes + depth + 2
        out = target(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
        drafter.allocate(1, capacity, depth)
        drafter.prefill([NewSequence(0, torch.tensor(text), features[0])])
        features, added = features[:, -1:], [int(out.logits[0, -1].argmax())]
        text += added
        rounds: list[ReferenceRound] = []
        while goes_on(target, text, request):
            heard: list[Tensor] = []

            def draw(step: int, logits: Tensor, ids: Tensor | None = None, heard: list[Tensor] = heard) -> Tensor:
                heard.append(logits)
                return logits.argmax(-1)

            one = torch.tensor([0])
            start = torch.tensor([len(text) - len(added)])
            drafter.propose(
                Committed(one, torch.tensor([added]), one + len(added), start, features, capacity, SlotCache(1, 1)),
                depth, draw,
            )  # fmt: skip
            tokens, depths, parents, children, visible, _ = ddtree.build_ddtree_tree(torch.cat(heard), nodes)
            rows = torch.cat((torch.tensor(text[-1:]), tokens))
            places = torch.cat((torch.zeros(1, dtype=torch.int64), depths))
            logits, states = scored(target, text, rows, visible, places, layers)
            path, after = ddtree.follow_verified_tree(children, logits.argmax(-1)[None])
            rounds.append(ReferenceRound(tokens.tolist(), [int(parent) for parent in parents[1:]], len(path) - 1))
            features = states[len(text) - 1 :][path][None]
            added = [*rows[path[1:]].tolist(), after]
            text += added
        yield rounds


def named(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    """The nodes of a tree as paths of tokens."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def compare(what: str, found: Sequence[Generation], reference: Iterator[list[ReferenceRound]]) -> bool:
    rounds = same = ordered = stood = 0
    for generation, theirs in zip(found, reference, strict=True):
        for one, other in zip(generation.rounds, theirs, strict=True):
            rounds += 1
            same += named(one.proposal, one.parents) == named(other.tokens, other.parents)
            ordered += (list(one.proposal), list(one.parents)) == (other.tokens, other.parents)
            stood += one.accepted == other.accepted
    print(
        f"{what}: {rounds} rounds; the same nodes in {same}, in the same order in {ordered}, as many stood in {stood}"
    )
    return same == stood == rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eagle", type=Path)
    parser.add_argument("--ddtree", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = open_target("zoo:target").tokenizer
    prompts = load_prompt_set("zoo", given.prompts).prompts
    requests = Conversations(prompts, tokenizer, Settings(max_new_tokens=given.tokens)).first_requests
    fine = True
    for k, depth, nodes in ((10, 6, 59), (4, 4, 13)) if given.eagle else ():
        tree = f"eagle:topk={k},depth={depth},nodes={nodes}"
        found = decoded("eagle3", tree, requests)
        fine &= compare(f"EAGLE, {tree}", found, eagle_rounds(given.eagle, requests, k, depth, nodes))
    for nodes in (16, 60) if given.ddtree else ():
        tree = f"best:nodes={nodes},depth=7"
        found = decoded("dflash", tree, requests)
        fine &= compare(f"DDTree, {tree}", found, ddtree_rounds(given.ddtree, requests, 7, nodes))
    sys.exit(not fine)


if __name__ == "__main__":
    main()
