"""Fixtures that several test files share."""

from __future__ import annotations

import os

# Kernels that oneDNN writes for a shape are kept for 1,024 shapes, some 100 MB for each file of tests in bfloat16. It
# reads this where torch is imported.
os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}

import ctypes
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from fixtures import examples  # noqa: F401  # hypothesis takes its settings from examples
from fixtures.checkpoints import pico  # hypothesis takes its settings from examples
from fixtures.engines.drafter_cases import case, load  # noqa: F401
from fixtures.gpu import kernels  # hypothesis takes its settings from examples
from fixtures.releases import skip_what_is_newer
from transformers.utils import logging

from draftkit.cli import main
from draftkit.runtime import architecture_check

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where Triton interprets its kernels, what is marked `interpreter` runs and nothing else; elsewhere the rest.

    A GPU runs both: there the kernels run natively.
    """
    _mark_all_but_a_few(items)
    skip_what_is_newer(items)
    chosen, others = [], []
    for item in items:
        marked = item.get_closest_marker("interpreter") is not None
        (chosen if kernels.NATIVE or marked == kernels.INTERPRETED else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def _mark_all_but_a_few(items: list[pytest.Item]) -> None:
    """Of a test marked `few(n)`, all but n evenly spaced cases are `long`. A case that is asked for by its id runs."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        (n,) = found[0].get_closest_marker("few").args
        chosen = {number * len(found) // n for number in range(n)}
        for number, item in enumerate(found):
            if number not in chosen:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Let no collection look at what the imports made: there are many, and each took 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain at the end of what they find there


def pytest_runtest_teardown() -> None:
    """Give memory back that glibc keeps of tensors that are gone: 800 MB after the tests of evaluation alone."""
    if sys.platform == "linux" and psutil.Process().memory_info().rss > 3 << 28:
        ctypes.CDLL(None).malloc_trim(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What draftkit finds out about architectures stays with the test run, whose workers share it."""
    base = tmp_path_factory.getbasetemp()
    os.environ["XDG_CACHE_HOME"] = str(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session", autouse=True)
def _not_asked_in_the_interpreter() -> Iterator[None]:
    """The interpreter takes 40 s to hold an architecture against transformers; `make test`'s first step does it."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels.INTERPRETED:
            patch.setattr(architecture_check, "compare", lambda tiny: architecture_check.Decoding("equal"))
        yield


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: exit code and both streams."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def draftkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The `draftkit` command, in this process: `draftkit("convert", source, out)`."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["draftkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        streams = capsys.readouterr()
        return Outcome(int(exit.value.code or 0), streams.out, streams.err)

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of the pico target; conversions need no more of one."""
    return pico.save_target_config(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def running_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pico target with weights and a tokenizer, as `eval` needs it."""
    logging.disable_progress_bar()  # as `eval` does where it is the first to import transformers
    return pico.save_tokenizer(pico.save_llama(tmp_path_factory.mktemp("running-target")))
