"""Publishing a draft: its model card, and its folder on the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.engines.serving import refusal_notes
from draftkit.engines.vllm.serve import method_note
from draftkit.errors import DraftkitError, FormatError, LayoutError, command
from draftkit.hub.local_paths import file_with_names, names_of_paths, read_values, text_with_names, with_names
from draftkit.hub.upload import Uploaded, check_repo_id, upload
from draftkit.io.atomic import write_file
from draftkit.io.finite import check_finite
from draftkit.io.html import is_as_written, signed
from draftkit.io.jsonfile import dump
from draftkit.layout.digest import draft_sha256
from draftkit.layout.folder import Draft, read_draft
from draftkit.report.card.card import EVAL_FOLDER, CardInput, own_part, render_card, target_of, with_sure_speeds
from draftkit.report.card.model_index import FEWEST_PROMPTS, Stated, eval_results, find_license, stated_of
from draftkit.report.page.figures import all_figures, figure_files
from draftkit.report.page.series import join
from draftkit.results.record import Result

CARD = "README.md"
INDEX = "model-index.json"  # what of it the card's header has no room for
FIGURES_FOLDER = "figures"
# What goes to the Hub besides the draft itself; checkpoints of a training run hold more, which does not.
BESIDE = (
    CARD, INDEX, "model.safetensors.index.json", "LICENSE*", "NOTICE*", "train.yaml", "inputs.json", "versions.json",
    "adapter/*", f"{EVAL_FOLDER}/*.json", f"{FIGURES_FOLDER}/**/*",
)  # fmt: skip


@dataclass(frozen=True)
class Publication:
    """What a push uploads. `files`: a path in the repository → a file here, or its bytes.

    `left_out`: what else lies in the folder. `num_results`: entries of the card's `model-index`. `notes`: what vLLM
    cannot read from the folder.
    """

    repo: str
    files: dict[str, Path | bytes]
    left_out: tuple[str, ...]
    card: str
    num_results: int
    notes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by path in the repository."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def write_card(
    folder: Path,
    results: Sequence[Path] = (),
    *,
    repo: str | None = None,
    license: str | None = None,
    stated: Stated | None = None,
    force: bool = False,
) -> list[Path]:
    """Write the model card of the unified draft in `folder`, and return the files written.

    `results`: files of `eval --json`; what they say of this draft is kept under `folder/eval`, and counts again the
    next time. `repo`: the name under which the card speaks of the draft; without one it is `./NAME` of the folder,
    until it is pushed. Of other paths of this machine the files have names. `license`: the Hub's name of its license,
    inherited without one. `stated`: what else its publisher says, beside what a card that is there says. A card that
    draftkit has not written, or that was edited since, is replaced with `force` only. Raises `DraftkitError`.
    """
    draft, name = read_draft(folder), repo or _relative(folder)
    made = _card_files(draft, results, name, license, stated or Stated())
    public = _without_paths({**_files(draft), **made}, folder, _own_names(folder, name))
    files = {path: content for path, content in public.items() if path in made and isinstance(content, bytes)}
    files[CARD] = signed(_text(files[CARD])).encode()
    if _has_own_card(folder) and not force:
        raise DraftkitError(
            "there is a card already that draftkit has not written, or that was edited since",
            where=folder / CARD,
            hint="replace it with --force",
        )
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


def _has_own_card(folder: Path) -> bool:
    """Whether the folder has a card that draftkit has not written, or that was edited since."""
    card = folder / CARD
    return card.exists() and not is_as_written(card)


def push_draft(
    folder: Path,
    repo: str,
    *,
    results: Sequence[Path] = (),
    license: str | None = None,
    stated: Stated | None = None,
    private: bool = False,
    revision: str | None = None,
    allow_unmeasured: bool = False,
) -> Uploaded:
    """Upload the unified draft in `folder` to `org/name`, on the branch `revision`.

    See `plan_push` for what is checked and what goes there. Nothing is uploaded again that the repository has, and no
    commit is made when it has everything. Raises `DraftkitError`.
    """
    return upload_draft(
        plan_push(folder, repo, results=results, license=license, stated=stated, allow_unmeasured=allow_unmeasured),
        private=private,
        revision=revision,
    )


def plan_push(
    folder: Path,
    repo: str,
    *,
    results: Sequence[Path] = (),
    license: str | None = None,
    stated: Stated | None = None,
    allow_unmeasured: bool = False,
    force: bool = False,
) -> Publication:
    """Check a draft and say what a push of it uploads. Needs no token, and writes nothing.

    The tensors must fit the spec and be finite, and everything under `folder/eval` must have been measured with them.
    A README.md in the folder is taken as it is; the card is made from `results` and from what `folder/eval` has where
    there is none, and for `results`, a `license` or what is `stated` where nobody has edited it; with `force`, always.
    In all files the folder's own path becomes `repo`, and any other path of this machine its last part. A card without
    a measured result is refused, unless `allow_unmeasured`. Raises `DraftkitError`.
    """
    check_repo_id(repo)
    draft = read_draft(folder)
    check_finite(draft.tensors, draft.path)
    made = _card_files(draft, results, repo, license, stated or Stated())
    card = folder / CARD
    edited = _has_own_card(folder) and not force
    asked = bool(results) or license is not None or stated not in (None, Stated())
    if edited or (card.exists() and not asked and not force):
        if asked:
            raise DraftkitError(
                "the folder has a card that was edited, which would not show what is asked for",
                where=card,
                hint=f"{command('draftkit', 'push', folder, repo, '--dry-run', '--force')} with it; then push without",
            )
        made[CARD] = _read_text(card).encode()
    files = _without_paths({**_files(draft), **made}, folder, _own_names(folder, repo))
    text = _text(files[CARD]) if edited else signed(_text(files[CARD]))
    files[CARD] = text.encode()
    num_results = _num_results(text, card)
    if not num_results and not allow_unmeasured:
        raise LayoutError(
            "the card has no measured result",
            where=folder,
            expected=f"what `draftkit eval --json` printed for this draft, of {FEWEST_PROMPTS} prompts or more, as "
            "--results FILE",
            hint="measure it first, or push with --allow-unmeasured",
        )
    notes = (*refusal_notes(draft.spec), *method_note(draft.spec))
    return Publication(repo, files, _left_out(folder, files), text, num_results, notes)


def upload_draft(publication: Publication, *, private: bool = False, revision: str | None = None) -> Uploaded:
    """Upload what `plan_push` planned. Raises `SourceError`."""
    message = "Upload a draft with draftkit"
    return upload(publication.repo, publication.files, message=message, private=private, revision=revision)


def _card_files(
    draft: Draft, results: Iterable[Path], name: str, license: str | None, stated: Stated
) -> dict[str, bytes]:
    """The card of a draft, the results that it shows, its figures and its whole `model-index`, by path in the
    repository."""
    sha256 = draft_sha256(draft)
    paths = {path.stem: path for path in sorted((draft.path / EVAL_FOLDER).glob("*.json"))}
    paths |= _by_name(results)
    parts = {stem: own_part(path, draft.path, sha256, name) for stem, path in paths.items()}
    shown = {stem: with_sure_speeds(result) for stem, (result, _) in parts.items()}
    figures = {name: image for stem, result in shown.items() for name, image in _figures(stem, result).items()}
    records = list(shown.values())
    target = target_of(draft, records)
    found = find_license(draft.provenance, draft.path, license, target)
    stated = stated_of(draft.path, draft.provenance, target, stated)
    card = render_card(CardInput(draft, records, found, stated, name, sha256, list(figures)))
    entries = [
        {name: value for name, value in vars(entry).items() if value is not None} for entry in eval_results(records)
    ]
    index = {INDEX: dump(entries).encode()} if entries else {}
    kept = {f"{EVAL_FOLDER}/{stem}.json": dump(stored).encode() for stem, (_, stored) in parts.items()}
    return kept | figures | index | {CARD: card.encode()}


def _by_name(results: Iterable[Path]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for path in results:
        if path.stem in paths:
            raise DraftkitError(f"two result files are called {path.name}", where=path, hint="rename one of them")
        paths[path.stem] = path
    return paths


def _figures(stem: str, result: Result) -> dict[str, bytes]:
    """The figures of a result, by path in the repository."""
    files = figure_files(all_figures(join([result])))
    return {f"{FIGURES_FOLDER}/{stem}/{name}": content for name, content in files.items()}


def _files(draft: Draft) -> dict[str, Path | bytes]:
    """The files of a draft's folder that belong on the Hub."""
    found = {draft.path / "config.json", *draft.files, *(handle.origin for handle in draft.tensors.values())}
    found |= {path for pattern in BESIDE for path in draft.path.glob(pattern) if path.is_file()}
    return {path.relative_to(draft.path).as_posix(): path for path in found}


def _forms(path: str) -> list[str]:
    """How text holds a path: as it is, in JSON, and either in the quotes of a shell."""
    plain = (path, json.dumps(path)[1:-1])
    quote = "'\"'\"'"  # of `command`, for a quote within
    return list(dict.fromkeys((*plain, *(text.replace("'", quote) for text in plain))))


def _own_names(folder: Path, name: str) -> dict[str, str]:
    """The draft's own folder in all forms → what its card calls it: a repository, or `_relative` as it is written."""
    relative = _relative(folder)
    names = dict.fromkeys((*_forms(os.path.realpath(folder)), *_forms(relative)), name)
    return names if name != relative else names | {form: form for form in _forms(relative)}


def _without_paths(files: Mapping[str, Path | bytes], folder: Path, own: Mapping[str, str]) -> dict[str, Path | bytes]:
    """The files with names instead of this machine's paths; `own` has that of the draft's `folder` in all its forms."""
    values = [
        read_values(content) if isinstance(content, Path) else json.loads(content)
        for name, content in files.items()
        if isinstance(content, Path) or name.endswith(".json")
    ]
    names = names_of_paths(values) | dict(own)
    if "/" in str(folder):  # a bare name may be any word of the card: that of a method or format
        names[str(folder)] = own[os.path.realpath(folder)]
    public: dict[str, Path | bytes] = dict(files)
    for name, content in files.items():
        if isinstance(content, Path):
            public[name] = file_with_names(content, names)
        elif name.endswith(".json"):
            public[name] = dump(with_names(json.loads(content), names)).encode()
        elif name.endswith(".md"):
            public[name] = text_with_names(content.decode(), names).encode()
    return dict(sorted(public.items()))


def _relative(folder: Path) -> str:
    """A draft's own folder as its card calls it before it has a repository: from the folder around it."""
    return f"./{Path(os.path.realpath(folder)).name}"


def _left_out(folder: Path, files: Iterable[str]) -> tuple[str, ...]:
    taken = {name.partition("/")[0] for name in files}
    return tuple(sorted(path.name for path in folder.iterdir() if path.name not in taken))


def _text(content: Path | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else _read_text(content)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path.name} is not UTF-8 text", where=path) from None


def _num_results(card: str, where: Path) -> int:
    """Entries of a card's `model-index`. Raises `FormatError` for a header that is not valid."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return len(ModelCard(card).data.eval_results or [])
    except (ValueError, YAMLError) as error:
        raise FormatError(f"the header of {CARD} is not valid: {error}", where=where) from error
