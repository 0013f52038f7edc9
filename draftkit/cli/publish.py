"""`draftkit push`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.options import (
    BaseModelOption,
    DraftArgument,
    JsonOption,
    LanguagesOption,
    LicenseOption,
    ReleaseOption,
    TrainedOnOption,
)
from draftkit.cli.output import console, counted, print_json, say_next, stopping

if TYPE_CHECKING:
    from draftkit.publish import Publication


def push(
    folder: DraftArgument,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hugging Face Hub.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(help="What `draftkit eval --json` printed, for a folder without a card; repeatable."),
    ] = None,
    license: LicenseOption = None,
    base_model: BaseModelOption = None,
    datasets: TrainedOnOption = None,
    languages: LanguagesOption = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, made when there is none.")] = None,
    allow_unmeasured: Annotated[
        bool, typer.Option("--allow-unmeasured", help="Upload a draft whose card has no measured result.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Write the card into DIR, print it and the files, and upload nothing; takes no token."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --dry-run: replace a card of another program, or one that was edited."),
    ] = False,
    release: ReleaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload a draft with its model card to the Hugging Face Hub. Started again, an upload goes on where it was."""
    if force and not dry_run:
        raise typer.BadParameter("--force replaces a card, which --dry-run writes.")
    _quiet_hub()
    from draftkit.publish import CARD, plan_push, upload_draft, write_card
    from draftkit.report.card.model_index import Stated

    stated = Stated(base_model, tuple(datasets or ()), tuple(languages or ()))
    publication = plan_push(
        folder, repo, results=results or [], license=license, stated=stated, allow_unmeasured=allow_unmeasured,
        force=force,
    )  # fmt: skip
    if dry_run:
        asked = bool(results) or license is not None or stated != Stated()
        if asked or force or not (folder / CARD).exists():
            write_card(folder, results or [], repo=repo, license=license, stated=stated, force=force)
        _show(publication, folder, as_json)
        return
    stopping.kept = lambda: "what has reached the Hub is kept there; the same command goes on"
    uploaded = upload_draft(publication, private=private, revision=revision)
    if as_json:
        print_json({"schema": 1, "repo": repo} | uploaded.to_dict())
    else:
        print(f"{uploaded.url}: " + (f"commit {uploaded.commit}" if uploaded.new else "nothing has changed"))
        at = "" if revision is None else f"@{revision}"
        for note in publication.notes:
            print(note, file=sys.stderr)
        say_next("eval", "--target", "TARGET", "--draft", f"{repo}{at}")


def _quiet_hub() -> None:
    """No advice of the Hub's client, which is meant for programmers, and no bars off a terminal."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _show(publication: Publication, folder: Path, as_json: bool) -> None:
    """Print what would be uploaded."""
    from draftkit.report.terminal.screen import named_table

    files = [{"path": name, "bytes": size} for name, size in publication.sizes.items()]
    if as_json:
        left_out, card = list(publication.left_out), publication.card
        print_json({"schema": 1, "repo": publication.repo, "files": files, "left_out": left_out, "card": card})
        return
    total = sum(publication.sizes.values())
    results = f"a card with {counted(publication.num_results, 'result')} in its header"
    print(f"would be uploaded to {publication.repo}: {counted(len(files), 'file')}, {total:,} bytes, {results}")
    table = named_table("file", "bytes")
    table.columns[1].justify = "right"
    for file in files:
        table.add_row(str(file["path"]), f"{file['bytes']:,}")
    console().print(table)
    if publication.left_out:
        print(f"left out: {', '.join(publication.left_out)}")
    print(f"\n{folder / 'README.md'}:\n\n{publication.card}", end="")
    say_next("push", folder, publication.repo)
