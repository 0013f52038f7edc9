"""Training on samples with images: their states come from the whole target, and what is simulated is what serving
accepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.processors import picture, save_visual_target
from fixtures.training.image_samples import write_image_samples
from transformers import AutoConfig, LlamaConfig

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.data.sample_files import open_samples
from draftkit.data.sample_media import SampleMedia
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.data.states.workers import command_of
from draftkit.data.states.write import StatesSettings, TargetExtractor, open_states_job
from draftkit.errors import DraftkitError
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter, open_target
from draftkit.requests import Request
from draftkit.results.statistics import length_over_prompts
from draftkit.runtime.engine import Engine
from draftkit.targets.media import of_length
from draftkit.targets.rope import left_out_of_drafts
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization, StreamSettings, Validation
from draftkit.train.setup import read_split
from draftkit.train.tuner import DraftTuner

torch.set_num_threads(1)
KIND = "qwen2_5_vl"
LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_visual_target(tmp_path_factory.mktemp("target"), KIND)


@pytest.fixture
def data(target: Path, tmp_path: Path) -> Path:
    return write_image_samples(target, tmp_path / "data" / "samples.jsonl", count=4, new=8)


def config(target: Path, data: Path, out: Path, recipe: str = "eagle3", **changes: object) -> TrainConfig:
    settings = TrainConfig(
        recipe=recipe, target=str(target), data=str(data), out=str(out), device="cpu", tokens_per_row=256,
        optimization=Optimization(lr=3e-3, max_steps=2), options={"layers": LAYERS},
    )  # fmt: skip
    return replace(settings, **changes)  # type: ignore[arg-type]


def states_folder(target: Path, data: Path, out: Path) -> Path:
    settings = StatesSettings(target=str(target), layers=LAYERS, encoding="float32", device="cpu")
    with open_states_job(data, out, settings) as job:
        job.write()
    return out


def decoded_length(draft: Path | None, target: Path, data: Path, numbers: Iterable[int], k: int) -> float:
    """The acceptance length with which draftkit's engine decodes the answers of some samples again."""
    assert draft is not None
    opened, samples = open_target(str(target)).with_images(), open_samples(data)
    chosen = [samples[number] for number in numbers]
    media = SampleMedia(data, opened)(chosen)
    requests = [
        Request(s.id, tuple(s.tokens[:begin].tolist()), end - begin, media=of_length(media[number], begin))
        for number, s in enumerate(chosen)
        for begin, end in s.spans
    ]
    model = opened.load(device="cpu", dtype=torch.float32)
    drafter = load_drafter(read_draft(draft), model)
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=k, num_slots=4)
    rounds = [
        (sum(min(r.accepted, g.length - r.position) for r in g.rounds), len(g.rounds))
        for g in engine.generate(requests)
    ]
    return length_over_prompts(rounds).mean


@pytest.mark.slow
def test_stored_states_are_those_of_the_whole_target(target: Path, data: Path, tmp_path: Path) -> None:
    folder, samples = states_folder(target, data, tmp_path / "states"), open_samples(data)
    stored = OfflineStates(folder, data=data, target=target, aux_layers=AuxLayers(LAYERS), dtype=torch.float32)
    opened = open_target(str(target)).with_images()
    model = load_training_target(opened, device="cpu", dtype=torch.float32)
    media = SampleMedia(data, opened)
    alone = dict(TargetExtractor(model, LAYERS, 64, media)(list(samples)))
    blind = dict(TargetExtractor(model, LAYERS, 64)(list(samples)))
    for number, sample in enumerate(samples):
        found = stored.states_of([number], len(sample)).features
        assert found is not None
        expected = alone[number][:, :-1].flatten(1)
        torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
        assert (blind[number][:, :-1].flatten(1) - expected).abs().amax() > 0.1, "the images matter"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle3", "dflash"])
def test_a_run_with_images(recipe: str, target: Path, data: Path, tmp_path: Path) -> None:
    """With the target in this process and from its stored states: to the same metrics, which are those of decoding."""
    here = config(target, data, tmp_path / "run", recipe, validation=Validation(share=0.5, k=2))
    trained = train_draft(here)
    online = trained.metrics
    assert online["eval_acceptance_length_documents"] == 3
    _, _, judges = read_split(here)
    assert decoded_length(trained.draft, target, data, judges, 2) == online["eval_acceptance_length"]
    states = str(states_folder(target, data, tmp_path / "states"))
    stored = train_draft(replace(here, out=str(tmp_path / "stored"), states=states)).metrics
    assert stored["eval_loss"] == pytest.approx(online["eval_loss"], rel=1e-3)
    assert stored["eval_acceptance_length"] == online["eval_acceptance_length"]


def test_a_draft_of_a_target_with_three_axes_has_plain_rope(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run says so, as the check of the data does."""
    draft = train_draft(config(target, data, tmp_path / "run", validation=Validation(share=0.0))).draft
    assert draft is not None
    said = "drafts have plain rope, without the target's mrope_section"
    assert said in capsys.readouterr().err
    spec = read_draft(draft).spec
    assert spec.architecture.rope is not None
    assert spec.architecture.rope.scaling is None
    reading = AutoConfig.from_pretrained(target)
    rope = [
        one
        for one in findings(
            Evidence.of_draft(read_draft(draft), target_config=reading, draft_name="draft"), "training_models"
        )
        if one.name == "rope"
    ]
    assert [(one.severity, one.message.startswith(said)) for one in rope] == [("note", True), ("ok", False)]


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({}, []),
        ({"mrope_section": [4, 6, 6], "mrope_interleaved": True}, ["mrope_section", "mrope_interleaved"]),
        ({"mrope_interleaved": False, "partial_rotary_factor": 1.0}, []),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
    ],
)
def test_what_a_draft_leaves_of_the_targets_rope_is_what_it_turns(rope: dict[str, object], told: list[str]) -> None:
    assert left_out_of_drafts(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope)) == told


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["eagle3", "dflash"])
def test_a_draft_trained_on_images_accepts_more_there(recipe: str, target: Path, tmp_path: Path) -> None:
    """More than one trained on the same questions without images, on rows that neither has seen; and decoding accepts
    what was simulated."""
    files = {
        name: write_image_samples(target, tmp_path / name / "samples.jsonl", first=first, count=count, images=images)
        for name, first, count, images in (("images", 0, 48, True), ("text", 0, 48, False), ("judges", 48, 64, True))
    }
    lengths = {}
    for name in ("images", "text"):
        settings = config(
            target, files[name], tmp_path / "runs" / name, recipe,
            optimization=Optimization(lr=3e-3, max_steps=50),
            validation=Validation(samples=str(files["judges"]), k=3),
        )  # fmt: skip
        trained = train_draft(settings)
        decoded = decoded_length(trained.draft, target, files["judges"], range(64), 3)
        assert decoded == trained.metrics["eval_acceptance_length"]
        lengths[name] = trained.metrics
    assert lengths["images"]["eval_acceptance_length_low"] > lengths["text"]["eval_acceptance_length_high"]


def test_images_that_are_others_now(target: Path, data: Path, tmp_path: Path) -> None:
    image = data.parent / "1.png"
    image.write_bytes(picture(56, 28, 9))
    with pytest.raises(DraftkitError, match=r"sample 1: 1.png is another image than when it was prepared"):
        states_folder(target, data, tmp_path / "states")
    image.unlink()
    with pytest.raises(DraftkitError, match=r"sample 1: 1.png: the file cannot be read: No such file"):
        train_draft(config(target, data, tmp_path / "run", validation=Validation(share=0.0, every=0)))


@pytest.mark.long
def test_images_in_another_folder(target: Path, data: Path, tmp_path: Path) -> None:
    """They are named where states are stored, by each worker, and where a run goes on."""
    first = train_draft(config(target, data, tmp_path / "run", save_every=1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for image in data.parent.glob("*.png"):
        image.rename(elsewhere / image.name)
    settings = StatesSettings(target=str(target), layers=LAYERS, device="cpu", media_root=str(elsewhere))
    words = command_of(data, tmp_path, settings)
    assert words[words.index("--media-root") + 1] == str(elsewhere)
    with open_states_job(data, tmp_path / "states", settings) as job:
        assert job.write().num_documents == 4
    with pytest.raises(DraftkitError, match=r"sample 0: 0\.png") as refused:
        train_draft(config(target, data, tmp_path / "again"))
    assert "--set media_root=FOLDER" in str(refused.value)
    longer = Optimization(lr=3e-3, max_steps=3)
    again = config(target, data, tmp_path / "run", media_root=str(elsewhere), save_every=1, optimization=longer)
    assert train_draft(again, resume=True).checkpoint != first.checkpoint


def test_another_processor_than_the_data_were_prepared_with(target: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        text = file.read_bytes()
        if file.name == "preprocessor_config.json":
            text = text.replace(b'"merge_size": 2', b'"merge_size": 1')
        (other / file.name).write_bytes(text)
    media = SampleMedia(data, open_target(str(other)).with_images())
    with pytest.raises(DraftkitError, match="sample 0: the target's processor makes other tokens"):
        media(list(open_samples(data)))


def test_targets_that_read_text_alone(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match=r"^sample 0 has images: the target reads text alone") as caught:
        states_folder(Path("zoo:target"), data, tmp_path / "states")
    assert "take the target that the samples were prepared for" in str(caught.value)


def test_what_is_not_done_with_images_is_refused_by_name(target: Path, data: Path, tmp_path: Path) -> None:
    streamed = config(target, data, tmp_path / "run", stream=StreamSettings(folder=str(tmp_path / "stream")))
    with pytest.raises(DraftkitError, match="images are not trained on with --states-from vllm"):
        train_draft(streamed)
    draft = train_draft(config(target, data, tmp_path / "run", validation=Validation(share=0.0))).draft
    assert draft is not None
    tuner = DraftTuner(draft, str(target), device="cpu")
    with pytest.raises(DraftkitError, match="the samples have images"):
        tuner.simulate_acceptance(data)
    opened = open_target(str(target)).with_images()
    model = load_training_target(opened, device="cpu", dtype=torch.float32)
    seeing = DraftTuner(draft, model, media=SampleMedia(data, opened))
    assert seeing.simulate_acceptance(data, k=2).length.mean >= 1
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    source = OnlineStates(load_training_target("zoo:target", device="cpu", dtype=torch.float32), None)
    with pytest.raises(DraftkitError, match=r"has images, and .* reads none"):
        source.states(tokens, tokens, tokens, media={0: {"pixel_values": torch.zeros(1)}})
