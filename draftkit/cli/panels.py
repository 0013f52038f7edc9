"""Help by topic: commands by what one wants, the options of each panel under its name, and an example at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from draftkit.cli.output import say_stopped, stopping
from draftkit.errors import SettingError

# What one wants of draftkit, and the commands for it.
PANELS = {
    "Start here": ("convert", "eval", "train"),
    "Then": ("inspect", "doctor", "report", "push", "gate", "certify"),
    "More": ("adapt", "calibrate", "data", "vocab"),
}

EXAMPLES = {
    "convert": "draftkit convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct",
    "inspect": "draftkit inspect zoo:eagle3 --target zoo:target",
    "eval": "draftkit eval --target zoo:target --draft zoo:eagle3 --draft ngram --k 2,4 --concurrency 1,4",
    "certify": "draftkit certify --target zoo:target --draft zoo:eagle3",
    "gate": "draftkit gate new.json --against old.json --junit gate.xml",
    "calibrate": "draftkit calibrate rounds.jsonl --out calibration",
    "doctor": "draftkit doctor --target zoo:target --draft zoo:eagle3",
    "train": "draftkit train --recipe eagle3 --target T --data samples.jsonl --out run --set validation.every=500",
    "adapt": "draftkit adapt --draft D --target T --traffic logs.jsonl --out adapted",
    "report": "draftkit report before.json after.json --out report.html",
    "push": "draftkit push DRAFT ORG/NAME --results result.json --dry-run",
    "data prepare": "draftkit data prepare answers.jsonl samples.jsonl --target T",
    "data regenerate": "draftkit data regenerate prompts.jsonl answers.jsonl --target T --temperature 0.7",
    "data synthesize": "draftkit data synthesize --target T --count 20000 --out prompts.jsonl",
    "data check": "draftkit data check samples.jsonl --target T",
    "data states": "draftkit data states samples.jsonl states --target T --dry-run",
    "data stream": "draftkit data stream FOLDER --target T --vllm-python ENV/bin/python",
    "vocab transplant": "draftkit vocab transplant SMALL --tokenizer-of T --out OUT",
    "vocab prune": "draftkit vocab prune DRAFT --data samples.jsonl --plan",
}


# Settings whose option is not called as they are.
OPTIONS = {"num_speculative_tokens": "k", "prompts": "dataset", "tensor_parallel_size": "tensor_parallel"}


@contextmanager
def _saying_stopped() -> Iterator[None]:
    """Turn Ctrl-C into a line that says what is kept, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        say_stopped()
        raise typer.Exit(130) from None


class PanelGroup(TyperGroup):
    """Commands under what one wants of them; those of no panel come last."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        placed = {name for names in PANELS.values() for name in names}
        others = tuple(name for name in self.commands if name not in placed)
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for panel, names in (PANELS | {"Commands": others}).items():
            known = [(name, self.commands[name]) for name in names if name in self.commands]
            if known:
                with formatter.section(panel):
                    formatter.write_dl([(f"{name:{width}}", one.get_short_help_str(limit)) for name, one in known])


def _with_name(args: list[str]) -> list[str]:
    """The arguments with an empty name after a `--settings` that has none."""
    at = args.index("--settings") + 1 if "--settings" in args else len(args)
    alone = at == len(args) or args[at].startswith("-")
    return [*args[:at], "", *args[at:]] if alone and "--settings" in args else args


class PanelCommand(TyperCommand):
    """A command whose help is in panels, and that answers a wrong setting with its option and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_name(args))

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        stopping.forget()
        with _saying_stopped():  # options may import what takes seconds
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _saying_stopped():
                return super().invoke(ctx)
        except SettingError as error:
            option = self._option(ctx, error.setting)
            raise typer.BadParameter(str(error), ctx=ctx, param_hint=option and f"'{option}'") from error

    def _option(self, ctx: Any, setting: str) -> str | None:
        """The command's option for a setting; None where it has none."""
        names = {parameter.name: parameter.opts[0] for parameter in self.get_params(ctx)}
        option = names.get(setting) or names.get(OPTIONS.get(setting, setting))
        return option or (f"--set {setting}" if "settings" in names else None)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The parameters, in the order in which their panels come up; those without one come first."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            usual = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        inner = ctx
        names: list[str] = []
        while inner.parent is not None:  # the outermost is the program, whatever it is called
            names.insert(0, inner.info_name)
            inner = inner.parent
        example = EXAMPLES.get(" ".join(names))
        if example is not None:
            with formatter.section("Example"):
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
