"""draftkit: convert, train, measure and explain draft models for speculative decoding.

The public API, functions and the types that they take and return, is imported on first use, so that `import draftkit`
stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from draftkit.version import __version__

if TYPE_CHECKING:
    from draftkit.convert.api import convert_checkpoint, inspect_checkpoint
    from draftkit.data.samples import Sample
    from draftkit.doctor.diagnose import Diagnosis, diagnose_draft
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.errors import DraftkitError
    from draftkit.evaluate.engines.server import ServerEngine
    from draftkit.evaluate.evaluate import evaluate_draft
    from draftkit.evaluate.options import ServerSettings
    from draftkit.finding import Finding
    from draftkit.layout.folder import Draft
    from draftkit.loading import load_drafter
    from draftkit.loading import load_model as load_target
    from draftkit.loading import open_draft as load_draft
    from draftkit.publish import push_draft
    from draftkit.requests import DraftSampling, Request, SamplingParameters
    from draftkit.results.cell import Cell, Interval
    from draftkit.results.gate import Gate
    from draftkit.results.matching import gate_results
    from draftkit.results.record import Result
    from draftkit.results.saved import ResultFile
    from draftkit.results.settings import Settings, Sweep
    from draftkit.runtime.engine import Engine
    from draftkit.runtime.records import Generation
    from draftkit.targets.target import Target
    from draftkit.train.adapt import Adaptation, AdaptSettings, adapt_draft
    from draftkit.train.config import TrainConfig
    from draftkit.train.run import train_draft
    from draftkit.train.tuner import DraftTuner, SimulatedAcceptance, simulate_acceptance

__all__ = [
    "AdaptSettings",
    "Adaptation",
    "Cell",
    "Diagnosis",
    "Draft",
    "DraftSampling",
    "DraftTuner",
    "DraftkitError",
    "Engine",
    "Finding",
    "Gate",
    "Generation",
    "Interval",
    "Request",
    "Result",
    "ResultFile",
    "Sample",
    "SamplingParameters",
    "ServerEngine",
    "ServerSettings",
    "Settings",
    "SimulatedAcceptance",
    "Sweep",
    "Target",
    "TrainConfig",
    "VllmSettings",
    "__version__",
    "adapt_draft",
    "convert_checkpoint",
    "diagnose_draft",
    "evaluate_draft",
    "gate_results",
    "inspect_checkpoint",
    "load_draft",
    "load_drafter",
    "load_target",
    "push_draft",
    "simulate_acceptance",
    "train_draft",
]

_HOMES = {
    "AdaptSettings": ("draftkit.train.adapt", "AdaptSettings"),
    "Adaptation": ("draftkit.train.adapt", "Adaptation"),
    "Cell": ("draftkit.results.cell", "Cell"),
    "Diagnosis": ("draftkit.doctor.diagnose", "Diagnosis"),
    "Draft": ("draftkit.layout.folder", "Draft"),
    "DraftSampling": ("draftkit.requests", "DraftSampling"),
    "DraftTuner": ("draftkit.train.tuner", "DraftTuner"),
    "DraftkitError": ("draftkit.errors", "DraftkitError"),
    "Engine": ("draftkit.runtime.engine", "Engine"),
    "Finding": ("draftkit.finding", "Finding"),
    "Gate": ("draftkit.results.gate", "Gate"),
    "Generation": ("draftkit.runtime.records", "Generation"),
    "Interval": ("draftkit.results.cell", "Interval"),
    "Request": ("draftkit.requests", "Request"),
    "Result": ("draftkit.results.record", "Result"),
    "ResultFile": ("draftkit.results.saved", "ResultFile"),
    "Sample": ("draftkit.data.samples", "Sample"),
    "SamplingParameters": ("draftkit.requests", "SamplingParameters"),
    "ServerEngine": ("draftkit.evaluate.engines.server", "ServerEngine"),
    "ServerSettings": ("draftkit.evaluate.options", "ServerSettings"),
    "Settings": ("draftkit.results.settings", "Settings"),
    "Sweep": ("draftkit.results.settings", "Sweep"),
    "Target": ("draftkit.targets.target", "Target"),
    "TrainConfig": ("draftkit.train.config", "TrainConfig"),
    "VllmSettings": ("draftkit.engines.vllm.settings", "VllmSettings"),
    "SimulatedAcceptance": ("draftkit.train.tuner", "SimulatedAcceptance"),
    "adapt_draft": ("draftkit.train.adapt", "adapt_draft"),
    "convert_checkpoint": ("draftkit.convert.api", "convert_checkpoint"),
    "diagnose_draft": ("draftkit.doctor.diagnose", "diagnose_draft"),
    "evaluate_draft": ("draftkit.evaluate.evaluate", "evaluate_draft"),
    "gate_results": ("draftkit.results.matching", "gate_results"),
    "inspect_checkpoint": ("draftkit.convert.api", "inspect_checkpoint"),
    "load_draft": ("draftkit.loading", "open_draft"),
    "load_drafter": ("draftkit.loading", "load_drafter"),
    "load_target": ("draftkit.loading", "load_model"),
    "push_draft": ("draftkit.publish", "push_draft"),
    "train_draft": ("draftkit.train.run", "train_draft"),
    "simulate_acceptance": ("draftkit.train.tuner", "simulate_acceptance"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftkit' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
