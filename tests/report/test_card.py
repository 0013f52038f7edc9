"""Model cards: what they say of a draft, which measurements count, where the license comes from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures import eval_results
from fixtures.checkpoints import pico
from huggingface_hub import ModelCard, constants
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint
from draftkit.engines import sglang
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError
from draftkit.io.html import is_as_written
from draftkit.layout.digest import draft_sha256
from draftkit.layout.folder import read_draft
from draftkit.publish import write_card
from draftkit.report.card.card import EVAL_FOLDER, TEMPLATE
from draftkit.report.card.model_index import FEWEST_PROMPTS, MOST_LINES
from draftkit.results.cell import MeasuredTree, fields_of
from draftkit.runtime.tree_kinds import read_tree


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    target = pico.save_target_config(folder / "target")
    source = pico.write_checkpoint(folder / "source", pico.eagle3_config(), pico.eagle3_tensors())
    return convert_checkpoint(str(source), folder / "draft", target=str(target))


@pytest.fixture
def draft(converted: Path, tmp_path: Path) -> Path:
    """A unified EAGLE-3 draft; its source and its target have no card."""
    return Path(shutil.copytree(converted, tmp_path / "draft"))


def edit(draft: Path, **provenance: Any) -> None:
    """Change what a draft's config says of where it came from."""
    config = json.loads((draft / "config.json").read_text())
    config["draftkit"]["provenance"] |= provenance
    (draft / "config.json").write_text(json.dumps(config))


def card_of(draft: Path, *results: Path, **options: Any) -> ModelCard:
    write_card(draft, results, **({"repo": "org/pico", "force": True} | options))
    return ModelCard((draft / "README.md").read_text())


def test_categories_have_their_prompts_in_each_run(draft: Path, tmp_path: Path) -> None:
    def run(prompts: int) -> dict[str, Any]:
        return {name: {"mean": 2.5, "low": 2.0, "high": 3.0, "prompts": prompts} for name in ("math", "code")}

    results = [
        eval_results.write(tmp_path / f"{prompts}.json", eval_results.cell(draft, by_category=run(prompts)))
        for prompts in (3, 20)
    ]
    text = card_of(draft, *results).text
    assert "| 1 | mt-bench | 3 | 0 | 1 | 2.50 (3) | 2.50 (3) |" in text
    assert "| 2 | mt-bench | 3 | 0 | 1 | 2.50 (20) | 2.50 (20) |" in text


def test_a_card_says_what_was_measured_and_how(draft: Path, tmp_path: Path) -> None:
    result = eval_results.write(
        tmp_path / "result.json",
        eval_results.cell(draft),
        eval_results.cell(
            draft, num_speculative_tokens=5, temperature=1.0, tokens_per_second=150.0, **eval_results.sure()
        ),
        eval_results.cell("another/draft", acceptance_length={"mean": 9.75, "low": 9.5, "high": 9.875}),
    )
    text = card_of(draft, result).text
    assert "| 1 | mt-bench | 3 | 0 | 1 | 80 | greedy | **2.50** [2.25, 2.75] | 2.50 | – | 0.70 0.50 0.30 |" in text
    assert "| 1 | mt-bench | 5 | 1 | 1 | 150.0 | 100.0 | 1.80 [1.60, 2.00] | – / – / – |" in text
    assert "| 1 | mt-bench | 3 | 0 | 1 | 180.0 |" not in text  # how sure that is, the run does not say
    assert "| 1 | mt-bench | 3 | 0 | 1 | 2.75 | 2.25 |" in text  # by category
    assert "2026-01-02T03:04:05+00:00 | draftkit | A processor, 2 threads | float32" in text
    assert "org/mt-bench, split train, revision abc, turns first | sha256 0123456789ab |" in text
    assert "**At T = 0, org/pico at K = 3 has an acceptance length of " in text
    assert "what that gains in speed was not measured" in text
    assert "**At T = 1, use org/pico at K = 5 at batch 1, 1.80 × [1.60, 2.00]" in text
    assert "9.75" not in text
    assert "vllm serve" in text
    assert '"model": "org/pico", "method": "eagle3"' in text
    assert "--to sglang" in text
    assert "never proposes 192 of the target's 320 tokens" in text


def test_a_tree_that_is_to_be_used_is_served_where_it_is_drafted(draft: Path, tmp_path: Path) -> None:
    tree = fields_of(MeasuredTree.of(read_tree("eagle:topk=4,depth=5,nodes=16")))
    result = eval_results.write(
        tmp_path / "result.json",
        eval_results.cell(draft, tree=tree, num_speculative_tokens=5, **eval_results.sure()),
        eval_results.cell(draft, temperature=1.0),
    )
    text = card_of(draft, result).text
    assert "use org/pico with the tree eagle:topk=4,depth=5,nodes=16" in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 17" in text
    assert '"num_speculative_tokens": 5' not in text, "a chain so long was not measured"


def test_the_hub_gets_the_results(draft: Path, tmp_path: Path) -> None:
    unsure = eval_results.cell(draft, num_speculative_tokens=5)
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft, **eval_results.sure()), unsure)
    data = card_of(draft, result).data
    index = data.to_dict()["model-index"]
    assert eval_results_to_model_index(*model_index_to_eval_results(index)) == index
    length, speed, other = data.eval_results
    assert (other.metric_type, other.metric_args["num_speculative_tokens"]) == ("acceptance_length", 5)
    assert (length.metric_type, length.metric_value, length.dataset_type) == ("acceptance_length", 2.5, "org/mt-bench")
    assert (length.dataset_split, length.dataset_revision) == ("train", "abc")
    assert length.metric_args["low"] == 2.25
    assert length.metric_args["num_speculative_tokens"] == 3
    assert (speed.metric_type, speed.metric_value) == ("speedup", 1.8)
    assert data.library_name == "draftkit"
    assert {"speculative-decoding", "eagle3", "draftkit"} <= set(data.tags)
    assert data.model_name == "pico"


def test_new_fields_are_shown(draft: Path, tmp_path: Path) -> None:
    conventions = {"vllm": 2.5, "sglang": 2.375, "eagle": None}
    cell = eval_results.cell(draft, engine="vllm", acceptance_length_by_convention=conventions, **eval_results.sure())
    model = {"draft": str(draft), "best_k": 2, "stop_above": 16}
    other = {"draft": "another/draft", "best_k": 7}
    result = eval_results.write(tmp_path / "result.json", cell, speed_models=[model, other])
    text = card_of(draft, result).text
    assert "| run | dataset | K | T | concurrency | vllm | sglang | eagle |" in text
    assert "| 1 | mt-bench | 3 | 0 | 1 | 2.50 | 2.38 | – |" in text
    assert "K = 7" not in text
    assert "K = 2" not in text  # K = 3 was measured, and a card names one


def test_without_a_measured_speed_up_the_times_of_rounds_name_the_best_k(draft: Path, tmp_path: Path) -> None:
    model = {"draft": str(draft), "best_k": 2, "stop_above": 16}
    cell = eval_results.cell(draft, baseline_tokens_per_second=None)
    card = card_of(draft, eval_results.write(tmp_path / "result.json", cell, speed_models=[model]))
    assert "K = 2 is best; above 16 requests together, plain decoding is faster" in card.text
    assert "what that gains in speed was not measured" in card.text
    off = eval_results.write(
        tmp_path / "result.json", cell, speed_models=[model | {"withheld": "the predictions miss"}]
    )
    assert "K = 2" not in card_of(draft, off).text


def test_a_card_says_what_pays_and_what_is_doubtful(draft: Path, tmp_path: Path) -> None:
    cells = [eval_results.cell(draft, concurrency=c, **eval_results.sure()) for c in (1, 4)]
    warnings = [
        {"name": "loops", "message": "at T=0 90 % of the output repeats itself"},
        {"name": "no-warm-up", "message": f"{draft}, K=3, concurrency 1: something was still warming up"},
        {"name": "no-warm-up", "message": "another/draft, K=3, concurrency 1: something was still warming up"},
    ]
    other = eval_results.cell("another/draft")
    card = card_of(draft, eval_results.write(tmp_path / "result.json", *cells, other, warnings=warnings))
    speed = "1.80 × [1.60, 2.00]"
    assert f"**Use org/pico at K = 3 up to batch 4, {speed} to {speed}.**" in card.text
    assert "- at T=0 90 % of the output repeats itself\n- org/pico, K=3, concurrency 1: something was" in card.text
    assert "another/draft" not in card.text
    assert "without it, sooner where measured." in card.text
    names = [(entry.dataset_type, entry.metric_type, entry.metric_name) for entry in card.data.eval_results]
    assert len(names) == len(set(names)) == 4


def test_results_of_two_runs_at_one_setting_are_two_rows(draft: Path, tmp_path: Path) -> None:
    paths = [
        eval_results.write(tmp_path / f"{name}.json", eval_results.cell(draft, **eval_results.sure()))
        for name in ("one", "two")
    ]
    names = [entry.metric_name for entry in card_of(draft, *paths).data.eval_results]
    assert len(names) == len(set(names)) == 4


def test_speeds_without_an_interval_are_not_shown(draft: Path, tmp_path: Path) -> None:
    cells = eval_results.cell(draft), eval_results.cell(draft, concurrency=4, **eval_results.sure())
    warnings = [
        {"name": "unequal-baseline", "message": f"{draft}, K=3, concurrency {batch}: the speed-up compares …"}
        for batch in (1, 4)
    ]
    both = card_of(draft, eval_results.write(tmp_path / "both.json", *cells, warnings=warnings))
    assert "concurrency 4: the speed-up compares" in both.text
    assert "concurrency 1: the speed-up compares" not in both.text

    shutil.rmtree(draft / EVAL_FOLDER)
    card = card_of(draft, eval_results.write(tmp_path / "result.json", cells[0]))
    assert "what that gains in speed was not measured" in card.text
    assert "1.80" not in card.text
    assert "sooner" not in card.text


def test_results_with_few_fields(draft: Path, tmp_path: Path) -> None:
    needed = ("target", "draft", "num_speculative_tokens", "temperature", "concurrency", "acceptance_length")
    cell = {name: value for name, value in eval_results.cell(draft).items() if name in needed}
    result = eval_results.write(tmp_path / "result.json", cell, provenance={})
    card = card_of(draft, result)
    assert "**2.50** [2.25, 2.75]" in card.text
    assert len(card.data.eval_results) == 1


def test_measurements_stay_with_the_draft(draft: Path, tmp_path: Path) -> None:
    cells = eval_results.cell(draft, **eval_results.sure()), eval_results.cell("another/draft")
    first = card_of(draft, eval_results.write(tmp_path / "result.json", *cells))
    [kept] = json.loads((draft / "eval" / "result.json").read_text())["cells"]
    assert kept["draft_sha256"] == draft_sha256(read_draft(draft))
    moved = draft.rename(tmp_path / "elsewhere")
    assert str(card_of(moved)) == str(first)  # by its digest
    more = eval_results.write(tmp_path / "more.json", eval_results.cell(moved, temperature=1.0, **eval_results.sure()))
    assert len(card_of(moved, more).data.eval_results) == 4


def test_a_measurement_of_other_weights_does_not_count(draft: Path, tmp_path: Path) -> None:
    card_of(draft, eval_results.write(tmp_path / "result.json", eval_results.cell(draft)))
    weights = draft / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DraftkitError, match=r"result\.json was measured with other weights(.|\n)*measure again"):
        card_of(draft)


@pytest.mark.parametrize(
    "changes",
    [{"draft": "another/draft"}, {"draft_sha256": "0" * 64}],
    ids=["another folder", "another digest"],
)
def test_what_is_no_measurement_of_the_draft(draft: Path, tmp_path: Path, changes: dict[str, str]) -> None:
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft, **changes))
    with pytest.raises(DraftkitError, match=r"result\.json has no measurement of this draft(.|\n)*draftkit eval"):
        card_of(draft, result)
    assert not (draft / "README.md").exists()


def test_a_foreign_draft_has_the_digest_of_what_it_converts_to(draft: Path, converted: Path, tmp_path: Path) -> None:
    again = convert_checkpoint(
        str(converted.parent / "source"), tmp_path / "again", target=str(converted.parent / "target")
    )
    assert draft_sha256(read_draft(again)) == draft_sha256(read_draft(draft))


def test_a_draft_that_was_not_measured(draft: Path) -> None:
    card = card_of(draft)
    assert "Nothing has been measured yet" in card.text
    assert "model-index" not in card.data.to_dict()


def test_another_card_is_kept(draft: Path, tmp_path: Path) -> None:
    (draft / "README.md").write_text("mine")
    with pytest.raises(DraftkitError, match=r"draftkit has not written(.|\n)*--force"):
        write_card(draft)
    assert (draft / "README.md").read_text() == "mine"
    write_card(draft, force=True)
    write_card(draft, repo="org/name")  # it knows its own again
    assert "org/name" in (draft / "README.md").read_text()
    with (draft / "README.md").open("a") as card:
        card.write("\nA word of mine.\n")
    with pytest.raises(DraftkitError, match="was edited since"):
        write_card(draft)
    assert "A word of mine." in (draft / "README.md").read_text()


def readme(folder: Path, header: str) -> None:
    (folder / "README.md").write_text(f"---\n{header}\n---\n# A model\n")


def test_the_license_is_inherited(draft: Path, tmp_path: Path) -> None:
    source, target = (tmp_path / name for name in ("source", "target"))
    for folder in (source, target):
        folder.mkdir()
    edit(draft, source=str(source), target=str(target))
    card = card_of(draft)
    assert card.data.license is None
    assert "Unknown: none is stated by its source, source or its target, target." in card.text
    readme(target, "license: other\nlicense_name: community\nlicense_link: https://example.org/license")
    card = card_of(draft)
    assert (card.data.license, card.data.license_name) == ("other", "community")
    assert "[community](https://example.org/license), inherited from its target, target." in card.text
    (draft / "README.md").unlink()
    readme(source, "license: mit")
    assert "`mit`, inherited from its source, source." in card_of(draft).text
    card = card_of(draft, license="apache-2.0")
    assert card.data.license == "apache-2.0"
    assert "`apache-2.0`, as its publisher states." in card.text
    assert str(card_of(draft)) == str(card)  # what the card says is not forgotten


def test_the_training_run_is_told(draft: Path) -> None:
    edit(draft, source="draftkit train", format="trained")
    (draft / "train.yaml").write_text(
        "recipe: eagle3\ndata: /home/someone/chat.jsonl\nseed: 0\nlora: null\n"
        "optimization: {optimizer: muon, lr: 0.001, max_steps: 0}\n"
    )
    text = card_of(draft).text
    assert "Trained with draftkit" in text
    assert "| optimization.optimizer | muon |\n| optimization.lr | 0.001 |" in text
    assert "| data | chat.jsonl |" in text
    assert "max_steps" not in text


@pytest.mark.parametrize(
    ("target", "base", "relation"), [("org/target", "org/target", "adapter"), ("./target", None, None)]
)
def test_only_a_hub_id_is_a_base_model(draft: Path, target: str, base: str | None, relation: str | None) -> None:
    edit(draft, target=target, source="./nowhere")
    header = card_of(draft).data.to_dict()
    assert (header.get("base_model"), header.get("base_model_relation")) == (base, relation)


@pytest.mark.parametrize("name", zoo.drafts())
def test_a_card_for_every_method(name: str, tmp_path: Path) -> None:
    draft = convert_checkpoint(f"zoo:{name}", tmp_path / "draft", target="zoo:target")
    spec = read_draft(draft).spec
    text = card_of(draft).text
    assert f"| method | {spec.method} |" in text
    assert ("vllm serve" in text) == (refusal_by_vllm(spec) is None)
    assert ("vLLM refuses it" in text) == (refusal_by_vllm(spec) is not None)
    assert ("sglang.launch_server" in text) == sglang.serves(spec)


def test_the_card_that_is_checked_in(tmp_path: Path) -> None:
    """It is of the embedded draft as it is now; `model_cards/README.md` says how it is made."""
    cards = Path(__file__).parents[2] / "model_cards"
    draft = convert_checkpoint("zoo:eagle3", tmp_path / "draft", target="zoo:target")
    text = (cards / "zoo-eagle3.md").read_text()
    assert f"`{draft_sha256(read_draft(draft))}`" in text
    assert ModelCard(text).data.eval_results
    assert is_as_written(cards / "zoo-eagle3.md")
    headings = [re.findall(r"^## .*$", card, re.MULTILINE) for card in (text, card_of(draft).text)]
    assert headings[0] == headings[1]
    assert (cards / "template.md").samefile(TEMPLATE)


def test_local_paths_are_not_told(draft: Path, tmp_path: Path) -> None:
    dataset = {"name": "chats", "source": "/home/someone/chats.jsonl"}
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft), provenance={"dataset": dataset})
    card = card_of(draft, result)
    assert "/home/someone" not in str(card)
    assert {entry.dataset_type for entry in card.data.eval_results} == {"chats"}


def test_a_local_card_names_places(draft: Path, tmp_path: Path) -> None:
    """Of the draft's folder a pushed card says the repository, and another where it is seen from around it."""
    edit(draft, target=str(tmp_path / "models" / "llama"))
    text = card_of(draft, repo=None).text
    assert "`llama`" in text
    assert "vllm serve TARGET" in text  # nobody can paste what is a name on this machine
    assert "--model-path TARGET" in text
    assert "`TARGET` stands for the target (`llama`)" in text
    assert str(tmp_path / "models") not in text
    assert str(draft) not in text
    assert f"--draft ./{draft.name}" in text


@pytest.mark.parametrize(("target", "shown"), [("org/target", "org/target"), ("zoo:target", "TARGET")])
def test_commands_of_a_card_name_what_a_reader_can_paste(target: str, shown: str, draft: Path) -> None:
    edit(draft, target=target)
    text = card_of(draft).text
    assert f"vllm serve {shown} " in text
    assert f"--to sglang --target {shown}\n" in text
    assert f"draftkit eval --target {shown} --draft org/pico" in text
    assert ("`TARGET` stands for the target (`zoo:target`)" in text) is (shown == "TARGET")


def test_every_table_says_what_tells_its_rows_apart(draft: Path, tmp_path: Path) -> None:
    cells = [
        eval_results.cell(draft, context=context, engine=engine, **eval_results.sure())
        for context in (None, 4096)
        for engine in ("draftkit", "vllm")
    ]
    card = card_of(draft, eval_results.write(tmp_path / "result.json", *cells))
    heads = [line for line in card.text.splitlines() if line.startswith("| run | dataset")]
    assert len(heads) >= 3
    assert all(head.startswith("| run | dataset | K | T | concurrency | context | engine |") for head in heads)
    assert "| 1 | mt-bench | 3 | 0 | 1 | 4096 | vllm |" in card.text
    shown = [entry.metric_name for entry in card.data.eval_results]
    index = json.loads((draft / "model-index.json").read_text())  # has what the header has no room for
    names = [entry["metric_name"] for entry in index]
    assert names[: len(shown)] == shown
    assert len(set(names)) == len(names) == 8
    assert "acceptance length (K=3, T=0, concurrency=1, context=4096, vllm)" in names
    assert index[0]["metric_args"]["concurrency"] == 1
    assert str(card.data).count("\n") < MOST_LINES


def test_a_length_of_few_prompts_is_no_entry(draft: Path, tmp_path: Path) -> None:
    few, enough = (eval_results.cell(draft, concurrency=n, num_prompts=n) for n in (FEWEST_PROMPTS - 1, FEWEST_PROMPTS))
    card = card_of(draft, eval_results.write(tmp_path / "result.json", few, enough))
    assert [entry.metric_args["num_prompts"] for entry in card.data.eval_results] == [FEWEST_PROMPTS]
    assert f"What was measured on fewer than {FEWEST_PROMPTS} prompts is not in the metadata." in card.text


def test_a_publisher_says_what_no_file_tells(draft: Path, draftkit: Command) -> None:
    """It is kept by a card that is written again; a target that was a folder is linked and can be served."""
    said = ("--base-model", "org/target", "--dataset", "org/chats", "--language", "en", "--language", "de")
    push = ("push", draft, "org/pico", "--dry-run", "--allow-unmeasured")
    assert draftkit(*push, *said).code == 0
    assert draftkit(*push).code == 0
    card = ModelCard((draft / "README.md").read_text())
    header = card.data.to_dict()
    assert (header["base_model"], header["base_model_relation"]) == ("org/target", "adapter")
    assert (header["datasets"], header["language"]) == (["org/chats"], ["en", "de"])
    assert "vllm serve org/target " in card.text


def test_languages_are_those_of_the_target(draft: Path, tmp_path: Path) -> None:
    target = tmp_path / "speaking"
    target.mkdir()
    (target / "README.md").write_text("---\nlanguage: fr\n---\n# A model\n")
    edit(draft, target=str(target))
    assert card_of(draft).data.to_dict()["language"] == ["fr"]


def test_figures_come_with_the_card(draft: Path, tmp_path: Path) -> None:
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft), eval_results.cell("another/draft"))
    path = "figures/result/acceptance-by-position.svg"
    assert f"![acceptance by position]({path})" in card_of(draft, result).text
    assert (draft / path).read_bytes().startswith(b"<svg")


def test_no_torch_is_needed(draft: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from draftkit.publish import write_card; "
        "write_card(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, draft], env=environment, check=True, timeout=300, stdout=subprocess.PIPE
    )
    assert done.stdout.split() == [b"False"]


def test_names_cannot_break_the_card(draft: Path, tmp_path: Path) -> None:
    odd = "a | b\n## c <script>"
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft, dataset=odd))
    card = card_of(draft, result)
    assert "a \\| b ## c &lt;script>" in card.text
    assert "<script>" not in card.text


def test_command(draftkit: Command, draft: Path, tmp_path: Path) -> None:
    result = eval_results.write(tmp_path / "result.json", eval_results.cell(draft))
    push = ("push", draft, "org/pico", "--dry-run")
    done = draftkit(*push, "--results", result, "--license", "mit")
    assert done.code == 0
    card = (draft / "README.md").read_text()
    assert done.out.endswith(f"\n{draft / 'README.md'}:\n\n{card}")
    assert (draft / "eval" / "result.json").exists()
    assert draftkit(*push, "--license", "apache-2.0").code == 0  # its own card
    edited = (draft / "README.md").read_text().replace("apache", "APACHE")
    (draft / "README.md").write_text(edited)
    assert draftkit(*push).code == 0
    assert (draft / "README.md").read_text() == edited
    refused = draftkit(*push, "--license", "apache-2.0")
    assert refused.code == 1
    assert "--force" in refused.err
    assert draftkit(*push, "--force").code == 0
    assert (draft / "README.md").read_text() != edited
    assert draftkit("push", draft, "org/pico", "--force").code == 2
    assert "nothing.json is missing" in draftkit(*push, "--results", tmp_path / "nothing.json").err
