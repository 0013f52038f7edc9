"""What is asked of a measurement is refused where it is said, from Python as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkit.cli.evaluate import asked_of
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError, SettingError
from draftkit.evaluate.engines.llama_cpp import LlamaCppEngine, LlamaCppSettings
from draftkit.evaluate.engines.server import ServerEngine
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.options import ServerSettings
from draftkit.io.settings import with_values
from draftkit.requests import DraftSampling
from draftkit.results.settings import Settings, Sweep

# Values of settings that may not go together, as Python and as the command line have them.
CHOICES = {
    name: st.sampled_from([(value, text) for value, text in pairs])
    for name, pairs in {
        "verification": [(one, one) for one in ("rejection", "block", "coupled", "none")],
        "k_by_batch": [({4: 2}, "4:2"), ({4: 5}, "4:5")],
        "disable_above_batch": [(8, "8"), (0, "0")],
        "turns": [("all", "all"), ("last", "last")],
        "repeats": [(0, "0"), (-1, "-1")],
        "top_p": [(0.9, "0.9"), (0.0, "0")],
        "draft_sampling": [("greedy", "greedy"), ("hot", "hot")],
        "draft_temperature": [(1.0, "1"), (-1.0, "-1")],
        "draft_confidence": [(0.5, "0.5"), (1.0, "1")],
        "ignore_eos": [(True, "true")],
    }.items()
}
WRONG: dict[str, list[dict[str, Any]]] = {
    "num_speculative_tokens": [{"num_speculative_tokens": 0}, {"num_speculative_tokens": 2.5}],
    "max_new_tokens": [{"max_new_tokens": 1}],
    "concurrency": [{"concurrency": 0}, {"concurrency": True}],
    "context": [{"context": -1}],
    "limit": [{"limit": 0}],
    "repeats": [{"repeats": -1}],
    "turns": [{"turns": "last"}],
    "slices": [{"slices": ("language", "tongue")}],
    "verification": [{"verification": "trust"}],
    "k_by_batch": [
        {"k_by_batch": {}},
        {"k_by_batch": {4: 5}},
        {"k_by_batch": {-1: 2}},
        {"k_by_batch": {4: 2}, "disable_above_batch": 8},
    ],
    "disable_above_batch": [{"disable_above_batch": 0}],
}


@pytest.mark.parametrize(("setting", "changes"), [(name, one) for name, all in WRONG.items() for one in all])
def test_settings_that_no_measurement_can_have_are_refused_by_name(setting: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as refused:
        Settings(**changes)
    assert refused.value.setting == setting


def test_settings_that_go_together_are_taken() -> None:
    Settings(verification="block", k_by_batch={8: 4, 16: 0}, repeats=0)


def test_a_limit_stands_for_a_schedule() -> None:
    assert Settings(disable_above_batch=8).schedule == {8: 4}
    assert [one.schedule for one in Settings(disable_above_batch=8).sweep(k=(2, 4)).settings] == [{8: 2}, {8: 4}]


@pytest.mark.parametrize(
    "asked",
    [
        Settings(verification="coupled"),
        Settings(k_by_batch={8: 2}),
        Settings(disable_above_batch=8),
        Settings(draft_sampling=DraftSampling(temperature=0.5)),
        Settings(draft_sampling=DraftSampling(min_confidence=0.5)),
        Settings().sweep(draft_confidence=(0.0, 0.5)),
    ],
)
def test_vllm_is_not_asked_what_it_cannot_do(asked: Settings | Sweep) -> None:
    with pytest.raises(SettingError, match="for vLLM"):
        evaluate_draft("no-target", ["no-draft"], asked, engines=[VllmEngine(VllmSettings())])


def test_schedules_are_for_one_k() -> None:
    by_batch = Settings(k_by_batch={8: 2})
    with pytest.raises(SettingError, match="for one K"):
        by_batch.sweep(k=(2, 4))
    with pytest.raises(SettingError, match="for one K"):
        Sweep((by_batch, by_batch.at(num_speculative_tokens=2)))


def test_confidences_are_swept_as_k_is() -> None:
    sweep = Settings().sweep(k=(2, 4), draft_confidence=(0.0, 0.5))
    asked = [(one.num_speculative_tokens, one.draft_sampling.min_confidence) for one in sweep.settings]
    assert asked == [(2, 0.0), (2, 0.5), (4, 0.0), (4, 0.5)]
    assert sweep.groups == [sweep.settings]  # one run without a draft for all of them


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: DraftSampling("warm"), "draft_sampling"),  # type: ignore[arg-type]
        (lambda: VllmSettings(tensor_parallel_size=0), "tensor_parallel_size"),
        (lambda: VllmSettings(gpu_memory_utilization=1.5), "gpu_memory_utilization"),
        (lambda: Sweep.of(Settings(verification="coupled")).require_certifiable(), "verification"),
    ],
)
def test_so_are_those_of_engines_drafts_and_certificates(make: Callable[[], object], setting: str) -> None:
    with pytest.raises(SettingError) as refused:
        make()
    assert refused.value.setting == setting


@pytest.mark.parametrize(
    "asked",
    [
        Settings().sweep(k=(2, 4)),
        Settings(verification="block"),
        Settings(k_by_batch={8: 2}),
        Settings(draft_sampling=DraftSampling("greedy")),
        Settings(draft_sampling=DraftSampling(min_confidence=0.5)),
        Settings(disable_above_batch=8),
    ],
)
def test_a_server_is_not_asked_how_to_draft(asked: Settings | Sweep) -> None:
    """It runs as it was started: what would be ignored is refused, before anything is asked of it."""
    sweep = Sweep.of(asked)
    url = "http://127.0.0.1:9"
    llama_cpp = LlamaCppSettings(Path("no-program"), Path("log"))
    for engine in (ServerEngine(ServerSettings(url)), LlamaCppEngine(llama_cpp)):
        with pytest.raises(DraftkitError, match="for a server, which runs as it was started"):
            evaluate_draft("no-target", ["no-draft"], sweep, engines=[engine])


@given(st.fixed_dictionaries({}, optional=CHOICES))
def test_python_and_the_command_line_refuse_the_same(chosen: dict[str, tuple[object, str]]) -> None:
    """Whatever settings are combined: both take them as the same, or both refuse them."""
    values = {name: value for name, (value, _) in chosen.items()}
    texts = [f"{name}={text}" for name, (_, text) in chosen.items()]
    outcomes: list[object] = []
    for make in (
        lambda: with_values(Settings, values).sweep(k=(4,)),
        lambda: asked_of("zoo:target", ["ngram"], k="4", settings=texts).sweep,
    ):
        try:
            outcomes.append(make())
        except SettingError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]
