"""Uploading to the Hugging Face Hub: one commit that has all files or is not made.

The Hub's own client sends the files. Large ones go to Xet storage (`hf_xet`), which takes only the pieces that it has
not got yet; without it (HF_HUB_DISABLE_XET=1, as a Hub of one's own may need) they go by Git LFS, file by file. Either
way, an upload that broke off goes on when it is started again, because what has arrived is not sent twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.errors import SourceError
from draftkit.hub.locate import MALFORMED, is_bad_token, keep_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What must not stay beside other weights: their older shards, and what was measured with them.
_REPLACED = ("model*.safetensors", "model.safetensors.index.json", "eval/*.json")
_FULL = re.compile(r"storage|quota|payment|billing", re.IGNORECASE)
_XET_REFUSAL = re.compile(r"HTTP status client error \((\d{3})")  # hf_xet has no classes for what the Hub answers
_LOG_IN = "run `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True)
class Uploaded:
    """Where the files are. `new`: a commit was made; False when the repository had them all."""

    url: str
    commit: str
    new: bool

    def to_dict(self) -> dict[str, object]:
        """The upload as `push --json` prints it."""
        return {"url": self.url, "commit": self.commit, "new": self.new}


def check_repo_id(repo: str) -> None:
    """Raise `SourceError` for what cannot be the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        valid = repo.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise SourceError(
            f"{repo!r} is no name of a repository",
            expected="org/name: letters, digits, '-', '_' and '.', each part at most 96 characters long",
        )


def upload(
    repo: str, files: Mapping[str, Path | bytes], *, message: str, private: bool = False, revision: str | None = None
) -> Uploaded:
    """Put files (paths in the repository → a file here, or its bytes) into a model repository of the Hub.

    The repository and the branch `revision` are made when there are none. Weights and measurements that the repository
    has under names not among `files` are removed by the same commit; other files stay. Raises `SourceError`.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError

    check_repo_id(repo)
    if get_token() is None:
        raise SourceError("there is no Hub token to write with", where="HF_TOKEN", hint=f"{_LOG_IN}, with write access")
    keep_token()
    api = HfApi()
    try:
        _ensure_repository(api, repo, private)
        if revision is not None and revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        return _commit(api, repo, files, message, revision)
    except (HTTPError, OSError, RuntimeError, ValueError, *MALFORMED) as error:
        # The error about a malformed token quotes it, and must not reach a traceback either.
        raise _explained(error, repo, revision) from (None if is_bad_token(error) else error)


def _ensure_repository(api: HfApi, repo: str, private: bool) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=True if private else None, exist_ok=True)  # None: as the organization wants
        return
    if private and not info.private:
        raise SourceError(
            f"{repo} exists, and everyone can read it",
            where=f"{api.endpoint}/{repo}",
            expected="a private repository, or none yet",
            hint="make it private in its settings, or push to another name",
        )


def _commit(api: HfApi, repo: str, files: Mapping[str, Path | bytes], message: str, revision: str | None) -> Uploaded:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    before = api.repo_info(repo, revision=revision)
    there = [file.rfilename for file in before.siblings or []]
    stale = [name for name in there if name not in files and any(fnmatchcase(name, pattern) for pattern in _REPLACED)]
    commit = api.create_commit(
        repo,
        [
            *(CommitOperationAdd(name, content) for name, content in files.items()),
            *(CommitOperationDelete(name) for name in stale),
        ],
        commit_message=message,
        revision=revision,
    )
    url = f"{api.endpoint}/{repo}" + (f"/tree/{revision}" if revision else "")
    return Uploaded(url, commit.oid, new=commit.oid != before.sha)


def _explained(error: BaseException, repo: str, revision: str | None) -> SourceError:
    """The error that says in the user's terms what went wrong between draftkit and the Hub."""
    from huggingface_hub import constants, errors

    url = f"{constants.ENDPOINT}/{repo}"
    again = "run the same command again: what has arrived is not sent twice"
    if is_bad_token(error):
        return SourceError(
            "the Hub token holds characters that no token has",
            where="HF_TOKEN, or the token of `hf auth login`",
            hint="copy it again from the token page",
        )
    if refusal := _XET_REFUSAL.search(str(error)):
        if refusal[1] == "404":
            return SourceError(
                f"{constants.ENDPOINT} has no Xet storage", where=url, hint="HF_HUB_DISABLE_XET=1 uploads by Git LFS"
            )
        return _refused(error, int(refusal[1]), repo, revision, url)
    match error:
        case errors.RevisionNotFoundError():
            return SourceError(f"{repo} has no branch {revision}", where=url, expected="a branch, no tag and no commit")
        case errors.HfHubHTTPError(response=response):
            return _refused(error, response.status_code, repo, revision, url)
        case errors.OfflineModeIsEnabled():
            return SourceError("HF_HUB_OFFLINE is set", where=url, hint="unset it to push")
        case errors.HTTPError():
            return SourceError(
                f"the connection to the Hub broke off: {repo} is as it was",
                where=f"{constants.ENDPOINT} ({str(error) or type(error).__name__})",
                hint=again,
            )
        case ValueError() if "metadata in README.md" in str(error):
            return SourceError(
                f"the Hub refuses the header of README.md:\n    {_detail(error)}",
                where="README.md",
                hint="--license takes the Hub's names for licenses: https://hf.co/docs/hub/repositories-licenses",
            )
        case ValueError() if _FULL.search(str(error)):
            return _full(repo, url, _detail(error))
        case OSError(filename=str() as name, strerror=str() as reason):
            return SourceError(f"a file cannot be read: {reason}", where=name)
        case _ if isinstance(error.__cause__, Exception):
            return _explained(error.__cause__, repo, revision)
        case ValueError() | TypeError() | LookupError() | AttributeError():
            return SourceError(
                f"{constants.ENDPOINT} does not answer like a Hub", where=url, hint="check the proxy and HF_ENDPOINT"
            )
        case _:
            return SourceError(f"the upload to {repo} broke off: it is as it was", where=url, hint=again)


def _refused(error: BaseException, status: int, repo: str, revision: str | None, url: str) -> SourceError:
    """The error that says what an answer of the Hub with this status means."""
    said = str(getattr(error, "server_message", None) or "")
    if status in (402, 413) or (status == 403 and _FULL.search(said)):
        return _full(repo, url, said)
    if status == 401:
        return SourceError("the Hub rejects the token", where=url, hint=f"renew it: {_LOG_IN}")
    if status in (403, 404):
        return SourceError(
            f"the token may not write to {repo}",
            where=url,
            expected=f"a token with write access, of a member of {repo.partition('/')[0]} who may write",
            hint=f"check the spelling; {_LOG_IN}",
        )
    if status == 400:
        return SourceError(
            f"the Hub refuses {repo}@{revision}" if revision else f"the Hub refuses {repo}",
            where=url,
            expected=said or None,
        )
    if status in (409, 412):
        return SourceError(f"{repo} was changed at the same time", where=url, hint="run the same command again")
    return SourceError(
        f"the Hub answered {status}" + (f": {said}" if said else ""), where=url, hint="run the same command again later"
    )


def _full(repo: str, url: str, said: str) -> SourceError:
    return SourceError(
        f"the storage of {repo.partition('/')[0]} is used up: {said}".rstrip(": "),
        where=url,
        hint="remove what is not needed there, or push without --private",
    )


def _detail(error: BaseException) -> str:
    """The Hub's own words, after the client's line."""
    return "\n    ".join(line for line in str(error).splitlines()[1:] if line.strip())
