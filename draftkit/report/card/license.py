"""The license of a draft: stated by its publisher, inherited from what it was made of, or unknown. Never invented."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import SourceError
from draftkit.hub.locate import locate_file
from draftkit.layout.provenance import Provenance

KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class License:
    """`metadata`: the keys of the card's header, none when unknown. `text`: what the card says, a sentence or two."""

    metadata: dict[str, str]
    text: str


def find_license(provenance: Provenance, folder: Path, given: str | None = None, target: str | None = None) -> License:
    """The license of the draft in `folder`.

    `given` goes first, then what the folder's README.md says, then the cards of the source and of the `target`, read
    from the Hub or from their folders. A card that cannot be had counts as one that says nothing.
    """
    origins = {}
    if provenance.format != "trained":
        origins[f"its source, {provenance.source}"] = provenance.source, provenance.source_revision
    if target is not None:
        origins[f"its target, {target}"] = target, provenance.target_revision
    inherited = {name: _stated_by(*origin) for name, origin in origins.items()}
    name, metadata = next(((n, found) for n, found in inherited.items() if found), ("", {}))
    own = {"license": given} if given else _stated_in(folder / "README.md")
    if own and own != metadata:
        return License(own, f"{_named(own)}, as its publisher states.")
    if metadata:
        return License(metadata, f"{_named(metadata)}, inherited from {name}.")
    return License({}, f"Unknown: none is stated by {' or '.join(inherited) or 'anyone'}.")


def _stated_by(source: str, revision: str | None) -> dict[str, str]:
    """What the card of a path, a Hub repository or a zoo model says."""
    try:
        card = locate_file(source, "README.md", revision)
    except SourceError:
        return {}
    return {} if card is None else _stated_in(card)


def _stated_in(card: Path) -> dict[str, str]:
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        metadata = metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, YAMLError):
        return {}
    return {key: str(metadata[key]) for key in KEYS if metadata.get(key)} if metadata else {}


def _named(metadata: dict[str, str]) -> str:
    name = metadata.get("license_name") or metadata.get("license", "")
    link = metadata.get("license_link")
    return f"[{name}]({link})" if link else f"`{name}`"
