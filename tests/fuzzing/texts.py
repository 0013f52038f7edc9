"""Texts: settings, prompts, conversations, answers, documents, results, tokenizers and chat templates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eval_results
import pico
import templates
import yaml
from report_results import full_result, old_result

from draftkit.data.prepare import prepare
from draftkit.data.response_file import ResponseFile
from draftkit.data.rows import REGENERATED, read_rows
from draftkit.data.samples import Document, Origin, read_documents, read_training_documents, write_documents
from draftkit.data.spans import Renderer
from draftkit.data.tokenizer import TargetTokenizer, load_tokenizer
from draftkit.evaluate.datasets import load_prompt_set
from draftkit.evaluate.prompts import encode_prompt
from draftkit.io.records import to_dict
from draftkit.models import chat
from draftkit.report.page import page
from draftkit.report.series import join
from draftkit.results.record import read_result
from draftkit.results.saved import ResultFile
from draftkit.train.config import BRITISH, read_config
from draftkit.train.recipes import RECIPES
from fuzzing.judge import Kind, check_clean, command, refusal
from fuzzing.mutate import SNIPPETS, changed, damaged, misspelled, places, value_at, written

VALUES = (
    "1", "-1", "0", "1e-4", "1.5", ".nan", ".inf", "-.inf", "[1]", "[]", "{}", "{a: 1}", "&a [*a]", "&a {b: *a}", "*a",
    "null", "~",
    "true", "no", "'x'", '"\\0"', '"\\ud800"', "2020-13-01", "2020-12-01", "0x", "0b", "1_000", "010", "1:30",
    "!!python/name:os.system x",
    "!!set {a}", "!!binary aGk=", "!!int x", "? [a]", "a: b: c", "[", "{", "'", "- 1", "|", ">", "%", "@", "`", "kl",
    "lk(3)",
    "0.1*ce + 0.9*tv", "top_k(0)", "linear", "cosine", "eagle3", "float32", "[1, 2]", "9" * 25, "9" * 5000, "[" * 300,
    "1e999", "",
)  # fmt: skip


class Settings(Kind):
    """`train --config FILE --set …`. What was given is in the resolved run as it was, and that resolves to itself."""

    share = 3.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.sound = {}
        for recipe in RECIPES:
            flags = {"recipe": recipe, "target": "T", "data": "D", "out": "O", "draft": "S"}
            self.sound[recipe] = yaml.safe_load(read_config(None, ["lora={}"], flags).to_yaml())

    def run(self, rng: random.Random, folder: Path) -> bool:
        sound = self.sound[rng.choice(list(self.sound))]
        paths = [path for path in places(sound) if path and all(isinstance(part, str) for part in path)]
        chosen = {"recipe", "target", "data", "out", "draft", *rng.sample(list(sound), 3)}
        given = {name: value for name, value in sound.items() if name in chosen}
        given = changed(rng, given, [*BRITISH, "lr", "steps", "unknown"], rng.choice([0, 0, 1, 1, 2]))
        try:
            text = yaml.safe_dump(given, allow_unicode=True).encode(errors="surrogatepass")
        except (RecursionError, ValueError, yaml.YAMLError):
            text = b"[" * 1000
        plain = rng.random() < 0.8
        file = folder / "run.yaml"
        file.write_bytes(text if plain else damaged(rng, text))
        settings: dict[str, str] = {}
        for _ in range(rng.choice([0, 1, 1, 2])):
            path = ".".join(rng.choice(paths))
            settings[misspelled(rng, path) if rng.random() < 0.2 else path] = rng.choice(VALUES)
        assignments = [f"{name}={value}" for name, value in settings.items()]
        if rng.random() < 0.05:
            return self.by_command(file, assignments)
        if refusal(read_config, file, assignments, {}) is not None:
            return False
        run = read_config(file, assignments, {})
        resolved = json.loads(json.dumps(to_dict(run) | {"options": to_dict(run.recipe_options())}))
        if len(settings) == 1:
            path = tuple(BRITISH.get(part, part) for part in next(iter(settings)).split("."))
            loaded = yaml.safe_load(next(iter(settings.values())))
            assert _covers(value_at(resolved, path), loaded), f"{settings} is read as {value_at(resolved, path)!r}"
        if plain and not settings:
            assert _covers(resolved, given)
        return True

    def by_command(self, file: Path, assignments: list[str]) -> bool:
        """The resolved run is that of the file that it is printed as."""
        arguments = [part for assignment in assignments for part in ("--set", assignment)]
        code, out, _ = command("train", "--config", file, *arguments, "--dry-run")
        check_clean(file.parent, "run.yaml")
        if code == 0:
            file.write_text(out, encoding="utf-8")
            assert read_config(file, [], {}).to_yaml() == out
        return code == 0


def _covers(resolved: Any, given: Any) -> bool:
    """Whether what was given stands in what was made of it; 1e-4 is a text for YAML and a number for draftkit."""
    if isinstance(given, dict):
        named = {BRITISH.get(key, key): value for key, value in given.items()}
        return isinstance(resolved, dict) and all(
            key in resolved and _covers(resolved[key], named[key]) for key in named
        )
    if isinstance(given, list):
        return isinstance(resolved, list) and all(map(_covers, resolved, given)) and len(given) == len(resolved)
    if isinstance(given, str) and isinstance(resolved, float):
        return float(given) == resolved
    return resolved == given and isinstance(given, bool) == isinstance(resolved, bool)


ROWS: list[dict[str, Any]] = [
    {"turns": ["What is a set?", "And a list?"], "question_id": 3, "category": "code"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                  {"role": "assistant", "content": "Hello."}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}], "id": "a"},
    {"prompt": "One and one?", "response": "Two."},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
     "completion": [{"role": "assistant", "content": "Yes."}]},
    {"prompt": "One", "category": None},
    {"text": "A text of some words."},
    {"question": "Why?"},
    {"messages": [{"role": "user", "content": "f(2)?"}, {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": "{\"x\": 2}"}}]}, {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"}], "tools": "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]"},
]  # fmt: skip
ROW_KEYS = (
    "messages", "conversations", "prompt", "completion", "response", "turns", "text", "tools", "role", "content",
    "from", "value",
    "id", "question_id", "category", "data", "question", "tool_calls", "system", "name",
)  # fmt: skip


def rows_text(rng: random.Random) -> bytes:
    """JSON Lines of changed rows."""
    chosen = [rng.choice(ROWS) for _ in range(rng.choice([1, 1, 2, 4]))]
    lines = [written(rng, changed(rng, row, ROW_KEYS, rng.choice([0, 1, 1, 2]))) for row in chosen]
    text = rng.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(lines) + rng.choice([b"\n", b""])
    return damaged(rng, text) if rng.random() < 0.1 else text


class Prompts(Kind):
    """Prompts of `eval`: each has a text, which the target can read."""

    share = 6.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.tokenizers = [templates.tokenizer(t).tokenizer for t in (None, templates.CHATML, templates.STRICT)]

    def run(self, rng: random.Random, folder: Path) -> bool:
        file = folder / rng.choice(["prompts.jsonl", "prompts.json", "prompts.txt"])
        file.write_bytes(rows_text(rng))
        limit = rng.choice([None, 1, 2])
        if refusal(load_prompt_set, str(file), limit) is not None:
            return False
        prompts = load_prompt_set(str(file), limit).prompts
        assert prompts
        tokenizer = rng.choice(self.tokenizers)
        for prompt in prompts:
            assert prompt.turns
            assert all(prompt.turns)
            refusal(encode_prompt, prompt, tokenizer)
        return True


class Rows(Kind):
    """`data prepare`: what it writes can be trained on."""

    share = 5.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        chosen = (None, templates.CHATML, templates.LLAMA3, templates.STRICT, templates.GENERATION, templates.THINKING)
        self.renderers = [Renderer(templates.tokenizer(template)) for template in chosen]

    def run(self, rng: random.Random, folder: Path) -> bool:
        file = folder / rng.choice(["rows.jsonl", "rows.jsonl", "rows.json"])
        data = rows_text(rng)
        if file.suffix == ".json" and rng.random() < 0.8:
            data = b"[" + b",".join(line for line in data.splitlines() if line) + b"]"
        file.write_bytes(data)
        return prepared(file, rng.choice(self.renderers), folder, rng.choice([None, 4, 16]))


def prepared(file: Path, renderer: Renderer, folder: Path, max_length: int | None = None) -> bool:
    out = folder / "out"
    out.mkdir()
    documents = out / "documents.jsonl"
    refused = refusal(lambda: prepare(read_rows(str(file)), renderer, documents, max_length=max_length))
    check_clean(out, *[] if refused else ["documents.jsonl"])
    if refused is None:
        assert read_training_documents(documents)
    return refused is None


class Answers(Kind):
    """Files of responses: going on with one, and making documents of it."""

    share = 4.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        target = templates.tokenizer(templates.CHATML)
        self.renderer = Renderer(target)
        self.settings = {"source": "S", "target": "T", "temperature": 0.0, "tokenizer_sha256": target.sha256}
        self.rows = [
            {"id": "a", "category": "all", "sequences": [{"tokens": [1, 5, 6, 7, 2], "supervised": [[2, 5]]}]},
            {"id": "b", "category": "code", "refused": "too long"},
            {
                "id": "c",
                "sequences": [{"tokens": [1, 5], "supervised": []}, {"tokens": [9, 8, 7], "supervised": [[1, 3]]}],
            },
        ]

    def run(self, rng: random.Random, folder: Path) -> bool:
        rows: list[Any] = [{"format": REGENERATED, "version": 1, "settings": self.settings}, *self.rows]
        for _ in range(rng.choice([0, 1, 2])):
            place = rng.randrange(len(rows))
            rows[place] = changed(rng, rows[place], ("sequences", "tokens", "supervised", "refused", "id", "settings"))
        text = b"\n".join(written(rng, row) for row in rows) + rng.choice([b"\n", b"\n", b"", b'\n{"id": "d", "seq'])
        file = folder / "answers.jsonl"
        file.write_bytes(damaged(rng, text) if rng.random() < 0.2 else text)
        if rng.random() < 0.5:
            return refusal(ResponseFile, file, self.settings) is None
        return prepared(file, self.renderer, folder)


class Documents(Kind):
    """Prepared documents."""

    share = 5.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        made = [Document.of(f"d{i}", [3, 4, 5, 6, 7, 8], [(2, 4), (5, 6)]) for i in range(3)]
        write_documents(corpus / "documents.jsonl", made, Origin(target="T", tokenizer_sha256="0" * 64))
        self.lines = (corpus / "documents.jsonl").read_bytes().splitlines()

    def run(self, rng: random.Random, folder: Path) -> bool:
        lines = list(self.lines)
        for _ in range(rng.choice([0, 1, 2])):
            place = rng.randrange(len(lines))
            keys = ("id", "tokens", "supervised", "spans", "category", "origin")
            lines[place] = written(rng, changed(rng, json.loads(self.lines[place]), keys))
        text = b"\n".join(lines) + rng.choice([b"\n", b""])
        file = folder / "documents.jsonl"
        file.write_bytes(damaged(rng, text) if rng.random() < 0.3 else text)
        if refusal(read_training_documents, file) is not None:
            return False
        for document in read_documents(file):
            assert len(document.supervised) == len(document.tokens)
        return True


class Results(Kind):
    """Results of `eval`: reading them, showing them as a page, and going on with one."""

    share = 2.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        plain = json.loads(eval_results.write(corpus / "plain.json", eval_results.cell("draft")).read_text())
        full = full_result()
        self.samples = [full | {"cells": full["cells"][:2]}, old_result(), plain]
        self.keys = sorted({path[-1] for path in places(self.samples[0]) if path and isinstance(path[-1], str)})

    def run(self, rng: random.Random, folder: Path) -> bool:
        file = folder / "result.json"
        sample = rng.choice(self.samples)
        file.write_bytes(written(rng, changed(rng, sample, self.keys, rng.choice([1, 1, 2]))))
        resumed = refusal(self.resume, file, sample["provenance"]) is None
        if refusal(read_result, file) is not None:
            return resumed
        read = [read_result(file)]

        def shown() -> None:
            series = join(read)
            page(read, series, {}).encode()

        if rng.random() < 0.1:
            refusal(shown)
        return True

    def resume(self, file: Path, provenance: dict[str, Any]) -> None:
        ResultFile(file, resume=True).begin(provenance)


class Tokenizers(Kind):
    """tokenizer.json and its config: what is loaded encodes text."""

    share = 1.5

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        pico.save_tokenizer(corpus / "target")
        self.tokenizer = json.loads((corpus / "target" / "tokenizer.json").read_text())
        self.config = json.loads((corpus / "target" / "tokenizer_config.json").read_text())
        self.parts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in ("(?=a)*", "(", "\\p{Foo}", "(a+)+b", "[[:alpha:]", "\\1", "(?<x>a)\\k<x>", "a{99999}", "")
        ] + [{"type": "Metaspace", "replacement": "ab"}, {"type": "Sequence", "pretokenizers": []}, {"type": "Foo"}]

    def run(self, rng: random.Random, folder: Path) -> bool:
        keys = (
            "truncation",
            "padding",
            "normalizer",
            "post_processor",
            "type",
            "content",
            "special",
            "dropout",
            "unk_token",
        )
        tokenizer = self.tokenizer
        for _ in range(rng.choice([0, 1, 1, 2])):
            rest = {key: value for key, value in tokenizer.items() if key != "model"}
            tokenizer = changed(rng, rest, keys) if rng.random() < 0.6 else changed(rng, tokenizer, keys)
            if not isinstance(tokenizer, dict):
                break
            tokenizer = tokenizer if "model" in tokenizer else tokenizer | {"model": self.tokenizer["model"]}
        if isinstance(tokenizer, dict) and rng.random() < 0.3:
            tokenizer = tokenizer | {rng.choice(["pre_tokenizer", "decoder", "normalizer"]): rng.choice(self.parts)}
        names = (
            "chat_template",
            "tokenizer_class",
            "auto_map",
            "added_tokens_decoder",
            "eos_token",
            "model_max_length",
        )
        (folder / "tokenizer.json").write_bytes(written(rng, tokenizer))
        (folder / "tokenizer_config.json").write_bytes(
            written(rng, changed(rng, self.config, names, rng.choice([0, 1, 2])))
        )
        if refusal(load_tokenizer, str(folder)) is not None:
            return False
        target = load_tokenizer(str(folder))
        return refusal(lambda: Renderer(target).encode("Aa bb,\n é 12")) is None


PIECES = (
    "{{ bos_token }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m.role }}",
    "{{ m['content'] | trim }}",
    "{% if m.role == 'user' %}", "{% else %}", "{% endif %}", "{% if add_generation_prompt %}", "<|im_start|>",
    "<|im_end|>\n",
    "{{ raise_exception('no') }}", "{% generation %}", "{% endgeneration %}", "{% set ns = namespace(n=0) %}",
    "{{ messages[0] }}",
    "{{ messages[9].content }}", "{{ undefined.x }}", "{{ 1 / 0 }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", "{{ 'a' * 999999999 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 9 ** 9 ** 9 }}", "{{ messages | tojson }}", "{{ strftime_now('%Y') }}", "{% include 'x' %}",
    "{% import 'os' as o %}", "{{ m.x.y }}",
    "{%- break %}", "{{ '%s' % m }}", "{{ messages | map(attribute='content') | join }}", "{{", "%}", "{#", "{% if %}",
    "é\0",
)  # fmt: skip


class Templates(Kind):
    """Chat templates: the turns of a conversation are rendered, or the template is refused by name."""

    share = 1.0

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        names = ("CHATML", "LLAMA3", "GENERATION", "THINKING", "UNPROMPTED", "VICUNA", "STRICT", "FORGETFUL")
        self.samples = [getattr(templates, name) for name in names]
        chat.RENDER_SECONDS = 0.5  # the many that do not end are to cost less

    def run(self, rng: random.Random, folder: Path) -> bool:
        parts = list(PIECES)
        if rng.random() < 0.3:
            template = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 8)))
        else:
            template = rng.choice(self.samples)
            for _ in range(rng.choice([1, 1, 2, 4])):
                start = rng.randrange(len(template) + 1)
                end = min(len(template), start + rng.choice([0, 0, 1, 4, 20]))
                template = template[:start] + rng.choice([*parts, *SNIPPETS]) + template[end:]
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in (ROWS[1], ROWS[3])))
        target: TargetTokenizer = templates.tokenizer(template)
        try:
            renderer = Renderer(target)
        finally:
            (folder / "template.jinja").write_text(template, errors="replace")
        return prepared(folder / "rows.jsonl", renderer, folder)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "settings": Settings,
    "prompts": Prompts,
    "rows": Rows,
    "answers": Answers,
    "documents": Documents,
    "results": Results,
    "tokenizer": Tokenizers,
    "template": Templates,
}
