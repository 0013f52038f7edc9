"""Sources: a zoo name, a folder or a Hugging Face repository becomes a local folder."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from draftkit import zoo
from draftkit.errors import SourceError, command
from draftkit.hub.gguf import folder_of_gguf
from draftkit.hub.local_paths import looks_like_path
from draftkit.io.atomic import restore
from draftkit.io.jsonfile import object_in, read_text
from draftkit.io.tensors import gguf_file
from draftkit.layout.folder import TOKENIZER_FILES

Fetched = TypeVar("Fetched")

_CONFIG = ("config.json", "generation_config.json", "adapter_config.json", "hf_quant_config.json")
# Of a target that reads images; vLLM asks for what reads videos too.
_PROCESSOR = ("*processor_config.json",)
# Kinds of weights, the preferred one first: its files, then what else comes with them.
_WEIGHTS = (
    ("*.safetensors", "*.safetensors.index.json"),
    ("*.bin", "*.bin.index.json"),
    ("*.pt",),
)
# Weights that come beside those of any kind: the projection of PARD-2, a block drafter's embedding of its mask.
_BESIDE = ("warp_model.bin", "mask_embedding.pt")
# What trainers leave beside the weights under the same suffixes.
_TRAINING_STATE = ("training_args.*", "training_state*", "optimizer.*", "scheduler.*", "rng_state*")

PATIENCE = 120  # seconds in all that a busy Hub is waited for
MALFORMED = (TypeError, LookupError, AttributeError)  # of the client, where an answer has not what the Hub's have

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Located:
    """A source and the local folder that holds it, or stands for it where that is a GGUF file, or this itself.

    What is asked of it later is of the same commit, wherever its branch is by then.
    """

    path: Path
    name: str  # what the user would call it: 'org/name', 'zoo:eagle' or the path
    repo: str | None = None
    revision: str | None = None  # the commit hash, for Hub sources
    default_target: str | None = None  # for zoo drafts

    @property
    def at_commit(self) -> str:
        """The name by which another process finds the same source: with its commit, if it is of the Hub."""
        return self.name if self.repo is None else f"{self.repo}@{self.revision}"

    @cached_property
    def folder(self) -> Path:
        """The folder, or the one that stands for a GGUF file as that of a model which transformers reads."""
        return folder_of_gguf(self.path) if self.path.is_file() else self.path

    @cached_property
    def config_text(self) -> bytes:
        """The text of `config.json`, read once. Raises `SourceError`/`FormatError`."""
        return read_text(self.folder / "config.json")

    @cached_property
    def config(self) -> dict[str, object]:
        """The content of `config.json`, which nobody changes. Raises `SourceError`/`FormatError`."""
        return object_in(self.config_text, self.folder / "config.json")

    @property
    def is_unified(self) -> bool:
        """Whether it is a folder whose config has a `draftkit` block. Anything else is a foreign checkpoint."""
        return (self.path / "config.json").is_file() and "draftkit" in self.config

    def fetch(self) -> Path:
        """Download tokenizer and weights, where they are not here yet, and return the folder. Raises as `locate`."""
        if self.repo is not None:
            _on_hub(self.repo, self.revision, weights=True, tokenizer=True)
        return self.folder


def locate(
    source: str, *, revision: str | None = None, weights: bool = True, tokenizer: bool = True, as_file: bool = False
) -> Located:
    """Find `source` and return its local folder, downloading what is missing from the Hugging Face Hub.

    `source` is `zoo:NAME`, a folder, a GGUF file, `org/name`, `org/name@revision` or `hf://org/name[@revision]`; an
    existing folder wins over a repository of the same name. From the Hub come the config and, where wanted, the
    tokenizer, with what reads images, and one kind of weights. `as_file`: a GGUF file stays one, instead of a folder
    that stands for it as that of a model which transformers reads. Without a network, or with `HF_HUB_OFFLINE=1`, the
    Hub's cache answers.

    A folder that a killed run has left aside is put back first. Raises `SourceError` when the source cannot be had:
    missing, private or gated, no such revision, offline, no network, disk full.
    """
    if source.startswith("zoo:"):
        _refuse_revision(source, revision)
        return _in_zoo(source)
    if source.startswith("hf://"):
        return _on_hub(source, revision, weights=weights, tokenizer=tokenizer)
    restore(Path(os.path.expanduser(source)))
    if os.path.exists(os.path.expanduser(source)) or looks_like_path(source):
        _refuse_revision(source, revision)
        return _in_folder(source, as_file)
    return _on_hub(source, revision, weights=weights, tokenizer=tokenizer)


def locate_file(source: str, file: str, revision: str | None = None) -> Path | None:
    """One file of a source that `locate` takes, downloaded if need be, or None when the source lacks it.

    Raises `SourceError` as `locate` does.
    """
    if source.startswith("zoo:") or os.path.exists(os.path.expanduser(source)):
        path = locate(source).path / file
        return path if path.is_file() else None
    repo, revision = _repo_and_revision(source.removeprefix("hf://"), revision)

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError

    try:
        return Path(_patiently(partial(hf_hub_download, repo, file, revision=revision, tqdm_class=_terminal_bar())))
    except RemoteEntryNotFoundError:
        return None
    except (HTTPError, OSError, RuntimeError, ValueError, *MALFORMED) as error:
        raise _explained(error, repo, revision) from (None if is_bad_token(error) else error)


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise SourceError(f"{source} has no revisions", where=source, expected="a revision only with a Hub repository")


def _in_zoo(source: str) -> Located:
    name = source.removeprefix("zoo:")
    return Located(zoo.path(name), source, default_target="zoo:target" if name in zoo.drafts() else None)


def _in_folder(source: str, as_file: bool) -> Located:
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path) and path.suffix == ".gguf":
        return Located(path if as_file else folder_of_gguf(path), source)
    if os.path.isfile(path):
        raise SourceError(f"{source} is a file", where=path, hint=_instead_of(path))
    if not os.path.isdir(path):  # unlike the method of a path, False for a name that is too long
        raise SourceError(f"there is no folder {source}", where=path, hint="check the path; a Hub id is org/name")
    file = gguf_file(path)
    if file is None:
        return Located(path, source)
    return Located(file if as_file else folder_of_gguf(file), source)


def _instead_of(file: Path) -> str:
    """A hint for a user who gave a file where a model is wanted."""
    if gguf_file(file.parent) is not None or (file.parent / "config.json").is_file():
        return f"pass the folder: {command(file.parent)}"
    if file.suffix == ".json":
        report = command("draftkit", "report", file)
        return f"pass the folder of a model, a GGUF file or org/name; a result is shown by {report}"
    return "pass the folder that holds config.json and weights, a GGUF file or org/name"


def _on_hub(source: str, revision: str | None, *, weights: bool, tokenizer: bool) -> Located:
    repo, revision = _repo_and_revision(source, revision)

    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HTTPError  # httpx's in huggingface_hub 1.x, httpx2's in 2.x

    fetch = _cached if is_offline_mode() else _downloaded
    try:
        folder = _patiently(partial(fetch, repo, revision, weights=weights, tokenizer=tokenizer))
    except (HTTPError, OSError, RuntimeError, ValueError, *MALFORMED) as error:
        # A malformed token is quoted by the error about it, which must not reach a traceback either.
        raise _explained(error, repo, revision) from (None if is_bad_token(error) else error)
    return Located(folder, repo, repo=repo, revision=folder.name)


def _patiently(fetch: Callable[[], Fetched]) -> Fetched:
    """Call `fetch`, and again where the Hub has too many requests (429, 503) and says when to come back.

    Raises what `fetch` does, also where that would take more than `PATIENCE`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    keep_token()
    waited = 0.0
    while True:
        try:
            return fetch()
        except HfHubHTTPError as error:
            status, pause = error.response.status_code, _asked_pause(error.response.headers)
            if status not in (429, 503) or pause is None or waited + pause > PATIENCE:
                raise
        _log.warning("the Hub answers %s: trying again in %.0f s", status, pause)
        time.sleep(pause)
        waited += max(pause, 1.0)


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer asks to wait: a number or a date in `Retry-After`, or the Hub's own `RateLimit`."""
    from huggingface_hub.utils import parse_ratelimit_headers

    asked = headers.get("retry-after", "").strip()
    if asked.isdigit():
        return float(asked)
    try:
        return max((parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds(), 0.0)
    except (TypeError, ValueError):  # no date, or one without a time zone
        limit = parse_ratelimit_headers(headers)
        return None if limit is None else float(limit.reset_in_seconds)


def _repo_and_revision(source: str, revision: str | None) -> tuple[str, str | None]:
    repo, at, named = source.removeprefix("hf://").partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII) or (at and not named):
        raise _invalid_id(source)
    if named and revision and named != revision:
        raise SourceError(
            f"two revisions are given: {named} and {revision}", where=source, hint="give the revision once"
        )
    return repo, named or revision


def _downloaded(repo: str, revision: str | None, *, weights: bool, tokenizer: bool) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        info = HfApi().repo_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HTTPError as error:
        if is_bad_token(error) or (isinstance(error, HfHubHTTPError) and error.response.status_code < 500):
            raise  # the Hub answered, and the cache must not hide what it said
        try:
            folder = _cached(repo, revision, weights=weights, tokenizer=tokenizer)
        except LocalEntryNotFoundError:
            raise error from None
        _log.warning("%s cannot be reached: using the cached commit %s of %s", constants.ENDPOINT, folder.name, repo)
        return folder

    files = [file.rfilename for file in info.siblings or []]
    if weights and not _weights(files):
        raise SourceError(
            f"{repo} has no weights",
            where=f"{constants.ENDPOINT}/{repo}",
            expected="*.safetensors, *.bin or *.pt files in the top folder",
        )
    # The revision goes in as the user gave it: only then is it remembered for the day without a network.
    wanted = _needed(files, weights=weights, tokenizer=tokenizer)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, tqdm_class=_terminal_bar()))


def _terminal_bar() -> type:
    from huggingface_hub.utils import tqdm

    class TerminalBar(tqdm):
        """The Hub's progress bar, silent when standard error is no terminal (its own counts files regardless)."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{"disable": None, **kwargs})

    return TerminalBar


def _cached(repo: str, revision: str | None, *, weights: bool, tokenizer: bool) -> Path:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    try:
        files = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:  # downloaded file by file: what is there is all that is known
        files = [file.name for file in folder.iterdir()]
    if weights and not _weights(files):
        raise LocalEntryNotFoundError(f"no weights of {repo} in the cache")
    wanted = _needed(files, weights=weights, tokenizer=tokenizer)
    return Path(snapshot_download(repo, revision=folder.name, local_files_only=True, allow_patterns=wanted))


def _needed(files: list[str], *, weights: bool, tokenizer: bool) -> list[str]:
    others = _matching(files, _CONFIG + TOKENIZER_FILES + _PROCESSOR if tokenizer else _CONFIG)
    return others + _weights(files) + _matching(files, _BESIDE) if weights else others


def _weights(files: list[str]) -> list[str]:
    """The weights of the first kind that is there."""
    files = [file for file in files if not _matching([file], _TRAINING_STATE + _BESIDE)]
    for kind in _WEIGHTS:
        if _matching(files, kind[:1]):
            found = _matching(files, kind)
            # Mistral's repositories hold the same weights twice.
            return [file for file in found if not file.startswith("consolidated")] or found
    return []


def _matching(files: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The files of the top folder that match: subfolders hold other exports of the same model."""
    return [file for file in files if "/" not in file and any(fnmatchcase(file, pattern) for pattern in patterns)]


def _invalid_id(source: str) -> SourceError:
    return SourceError(
        f"{source!r} is neither a folder nor a Hub id{zoo.did_you_mean(source)}",
        where=source,
        expected="org/name, org/name@revision, zoo:NAME or the path of a folder",
    )


def is_bad_token(error: BaseException) -> bool:
    """Whether the token cannot be sent: httpx quotes the header, the codec keeps it."""
    return isinstance(error, UnicodeEncodeError) or "Bearer " in str(error)


def _is_disk_full(error: BaseException) -> bool:
    # hf_xet raises a bare RuntimeError with the system's message.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def _explained(error: BaseException, repo: str, revision: str | None) -> SourceError:
    """The error that says in the user's terms what went wrong between draftkit and the Hub."""
    from huggingface_hub import constants, errors, is_offline_mode

    url = f"{constants.ENDPOINT}/{repo}"
    source = f"{repo}@{revision}" if revision else repo
    log_in = "run `hf auth login` or set HF_TOKEN"
    match error:
        case errors.HFValidationError():
            return _invalid_id(repo)
        case _ if is_bad_token(error):
            return SourceError(
                "the Hub token holds characters that no token has",
                where="HF_TOKEN, or the token of `hf auth login`",
                hint="copy it again from the token page, or unset it",
            )
        case _ if _is_disk_full(error):
            return SourceError(
                f"the disk is full: {source} could not be downloaded",
                where=constants.HF_HUB_CACHE,
                hint="free some space, or set HF_HOME to a folder on a bigger disk",
            )
        case errors.GatedRepoError():
            return SourceError(f"{repo} is gated", where=url, hint=f"request access at {url}, then {log_in}")
        case errors.RepositoryNotFoundError():
            return SourceError(
                f"the Hub has no repository {repo}, or it is private",
                where=url,
                hint=f"check the spelling; for a private or gated repository, {log_in}",
            )
        case errors.RevisionNotFoundError():
            return SourceError(
                f"{repo} has no revision {revision}",
                where=url,
                expected="a branch, a tag or a full commit hash",
                hint="leave the revision out to get the default branch",
            )
        case errors.RemoteEntryNotFoundError():
            return SourceError(
                f"a file of {source} went away during the download", where=url, hint="run the command again"
            )
        case errors.LocalEntryNotFoundError() if is_offline_mode():
            return SourceError(
                f"{source} is not in the cache, or not all of it, and HF_HUB_OFFLINE is set",
                where=constants.HF_HUB_CACHE,
                hint="unset HF_HUB_OFFLINE, or download it on another machine and pass the folder",
            )
        case errors.LocalEntryNotFoundError(__cause__=Exception() as cause):
            return _explained(cause, repo, revision)
        case errors.HfHubHTTPError(response=response) if response.status_code == 401:
            return SourceError("the Hub rejects the token", where=url, hint=f"renew it: {log_in}")
        case errors.HfHubHTTPError(response=response):
            return SourceError(
                f"the Hub answered {response.status_code} {response.reason_phrase} for {source}",
                where=url,
                hint="try again later",
            )
        case errors.HTTPError():
            return SourceError(
                f"no network: the Hub cannot be reached and {source} is not in the cache",
                where=f"{constants.ENDPOINT} ({str(error) or type(error).__name__})",
                hint="check the connection, the proxy and HF_ENDPOINT, or pass a folder",
            )
        case OSError(strerror=str() as reason):
            where = error.filename or constants.HF_HUB_CACHE
            return SourceError(f"{source} could not be stored: {reason}", where=where)
        case errors.FileMetadataError() | ValueError() | TypeError() | LookupError() | AttributeError():
            return SourceError(
                f"{constants.ENDPOINT} does not answer like a Hub", where=url, hint="check the proxy and HF_ENDPOINT"
            )
        case _:
            return SourceError(f"the download of {source} broke off", where=url, hint="run the command again")


@functools.cache
def keep_token() -> None:
    """From now on the Hub's client in this process refuses to send the token to any server but the Hub.

    The client drops it where a request is redirected elsewhere, and not where an answer names an address to go on at:
    of a storage, of a check after an upload. The refusal is a `SourceError`.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http  # which alone says what makes clients so far: the user may have set it

    make = _http._GLOBAL_CLIENT_FACTORY

    def client() -> Any:
        made = make()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], _refuse_elsewhere]}
        return made

    set_client_factory(client)


def _refuse_elsewhere(request: Any) -> None:
    """Raise `SourceError` for a request of httpx that has the token and is not for the Hub."""
    from huggingface_hub import constants, get_token

    token, url = get_token(), request.url
    hub = type(url)(constants.ENDPOINT)
    elsewhere = (url.scheme, url.host, url.port) != (hub.scheme, hub.host, hub.port)
    if elsewhere and token and token in request.headers.get("authorization", ""):
        raise SourceError(
            f"{url.scheme}://{url.netloc.decode()} asks for the Hub's token, which is sent only to the Hub",
            where=constants.ENDPOINT,
            hint="set HF_ENDPOINT to the address of the Hub itself",
        )
