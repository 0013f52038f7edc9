"""`--settings` of the commands that take `--set`: what each setting is for, its unit, its default and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, replace
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.output import console
from draftkit.errors import DraftkitError, command

if TYPE_CHECKING:
    from draftkit.io.settings import Setting


def _show(context: typer.Context, name: str | None) -> None:
    """List the settings of the command, or explain those of a name, and exit. Raises `DraftkitError` for no such."""
    if name is None or context.info_name is None:
        return
    listed = list(settings_of_command(context.info_name))
    if not name:
        _list(context.info_name, listed)
    for one in _named(listed, context.info_name, name) if name else ():
        _explain(one)
    raise typer.Exit


SettingsOption = Annotated[
    str | None,
    typer.Option(
        "--settings", metavar="[NAME]", is_eager=True, callback=_show,
        help="List what --set takes, or explain one setting, and exit.",
    ),
]  # fmt: skip


def _named(listed: list[Setting], kind: str, name: str) -> list[Setting]:
    """The settings of that name, of all recipes or families that have it. Raises `DraftkitError` for no such."""
    from draftkit.io.records import did_you_mean

    found = [one for one in listed if name in (one.name, one.name.rpartition(".")[2])]
    if not found:
        near = did_you_mean(name, [one.name for one in listed])
        raise DraftkitError(f"{kind} has no setting {name}{near}", hint=command("draftkit", kind, "--settings"))
    return found


def settings_of_command(kind: str) -> Iterator[Setting]:
    """What `--set` of eval, train or convert takes."""
    if kind == "eval":
        from draftkit.evaluate.engines import further_settings
        from draftkit.evaluate.options import OPTIONS, known_settings

        for one in known_settings(*further_settings()):
            option = OPTIONS.get(one.name)
            yield one if option is None else replace(one, where=f"the option {option}")
    elif kind == "train":
        from draftkit.io.settings import settings_of
        from draftkit.train.config import TrainConfig
        from draftkit.train.recipes import recipe_class, recipe_names

        yield from settings_of(TrainConfig)
        for recipe in recipe_names():
            options = recipe_class(recipe).options_type
            yield from (replace(one, where=f"recipe {recipe}") for one in settings_of(options, "options."))
    else:
        from draftkit.layout.facts import settings_of_facts
        from draftkit.layout.families import families

        for family, cls in sorted(families().items()):
            yield from (replace(one, where=f"drafts of the family {family}") for one in settings_of_facts(cls))


def _list(kind: str, listed: list[Setting]) -> None:
    from draftkit.io.settings import words_of
    from draftkit.report.terminal.screen import named_table

    table = named_table("setting", "value", "default", "what for", title=f"settings of {kind}")
    for one in listed:
        table.add_row(one.name, words_of(one.kind).replace("`", ""), _default(one), _about(one))
    console().print(table)


def _default(one: Setting) -> str:
    if one.default is MISSING:
        return ""
    return "" if one.default in (None, "", (), {}) else str(one.default)


def _about(one: Setting) -> str:
    more = (f"in {one.unit}" if one.unit else "", f"needs {one.needs}" if one.needs else "", one.where)
    ends = "; ".join(part for part in more if part)
    return f"{one.help} ({ends})" if ends else one.help


def _explain(one: Setting) -> None:
    from draftkit.io.settings import words_of

    rows = {
        "value": words_of(one.kind).replace("`", ""), "default": _default(one), "unit": one.unit, "needs": one.needs,
        "of": one.where,
    }  # fmt: skip
    console().print(f"{one.name}: {one.help}", soft_wrap=True)
    for label, text in rows.items():
        if text:
            console().print(f"  {label}: {text}", soft_wrap=True)
