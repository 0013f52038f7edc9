"""The releases of engines that draftkit knows, and those of which is spoken: the one that a user asks for with `--for`,
else the one that a measurement was made with, else the one that is installed, else all.

An engine's own are `RELEASES` of its `engines/NAME/releases.py`, the newest first; they are found by being there.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

from draftkit import engines
from draftkit.engines.releases import Release
from draftkit.errors import DraftkitError
from draftkit.io.records import did_you_mean

_ASKED: ContextVar[Release | None] = ContextVar("asked", default=None)
BUILDS = ("", "-cpu")  # what follows an engine's name in the names of its packages


def known() -> dict[str, Sequence[Release]]:
    """Engine → its releases that have a table, the newest first."""
    tables = [import_module(name).RELEASES for name in _modules()]
    return {releases[0].engine: releases for releases in tables}


@cache
def _modules() -> tuple[str, ...]:
    packages = (module.name for module in pkgutil.iter_modules(engines.__path__) if module.ispkg)
    names = (f"{engines.__name__}.{package}.releases" for package in packages)
    return tuple(name for name in names if find_spec(name) is not None)


def asked(engine: str) -> Sequence[Release]:
    """The releases of an engine of which is spoken, the newest first: none where another engine is asked for."""
    wanted = _ASKED.get()
    if wanted is not None:
        return (wanted,) if wanted.engine == engine else ()
    here = installed(engine)
    return known()[engine] if here is None else (here,)


def plain_parts(to: str) -> dict[str, Release]:
    """The parts of drafts of which the engine of a layout, as `--to` names it, reads no quantized weights, each with
    the release that does not: of vLLM where the layout is none of an engine's own."""
    releases = asked(_spelled(to) or "vLLM")
    return {name.split()[0]: release for release in reversed(releases) for name in release.plain_parts}


def chosen() -> Release | None:
    """The one release of which is spoken, if it is one: what a user asks for, or what has run."""
    return _ASKED.get()


@contextmanager
def speaking_of(name: str | None) -> Iterator[None]:
    """Speak of one release within the body, as `vllm==0.33`. Raises `DraftkitError` for one that has no table."""
    with _speaking(None if name is None else named(name)):
        yield


@contextmanager
def measured_by(engine: str, version: str | None) -> Iterator[None]:
    """Speak within the body of the release that ran, of an engine and its version as a result names them, unless a user
    asks for another; nothing changes for one without a table."""
    spelled = _spelled(engine)
    ran = None if spelled is None or version is None else numbered(spelled, version)
    with _speaking(chosen() or ran):
        yield


@contextmanager
def _speaking(release: Release | None) -> Iterator[None]:
    token = _ASKED.set(release)
    try:
        yield
    finally:
        _ASKED.reset(token)


def names() -> list[str]:
    """What `--for` takes."""
    return [f"{engine.lower()}=={one.number}" for engine, releases in known().items() for one in releases]


def named(name: str) -> Release:
    """The release that a user names, as `vllm==0.33` or `vllm==0.33.0`. Raises `DraftkitError` for another."""
    engine, _, number = name.partition("==")
    spelled = _spelled(engine)
    release = None if spelled is None else numbered(spelled, number)
    if release is None:
        near = did_you_mean(name, names())
        raise DraftkitError(f"draftkit has no table of {name}{near}", expected="one of " + ", ".join(names()))
    return release


def _spelled(engine: str) -> str | None:
    """How the tables spell the name of an engine; None for one that has none."""
    return next((one for one in known() if one.lower() == engine.lower()), None)


def numbered(engine: str, version: str) -> Release | None:
    """The release of an engine with a table that a version is of, as 0.33.1 is of 0.33; None where there is none."""
    same = (one for one in known()[engine] if f"{version.lstrip('v')}.".startswith(f"{one.number}."))
    return next(same, None)


def installed(engine: str) -> Release | None:
    """The release of an engine in this environment; None where there is none, or none with a table."""
    versions = (_version(f"{engine.lower()}{build}") for build in BUILDS)
    version = next((one for one in versions if one is not None), None)
    return None if version is None else numbered(engine, version)


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
