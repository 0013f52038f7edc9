"""The categories of prompts and samples: language, tools, thinking and length.

Which language a text is in is told roughly: by its script, and in the Latin script by the commonest words. That is
enough to keep a language in or out of training data and to tell slices of requests apart; it names the languages below
and no others. Codes are those of ISO 639-1, `und` for what shows none.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from draftkit.data.rows import TOOL_ROLES, Conversation, Row
from draftkit.data.samples import Sample

if TYPE_CHECKING:
    from draftkit.data.tokenizer import TargetTokenizer

UNKNOWN = "und"
# The first word of a letter's Unicode name → its language, where a script has one that is written far more than others.
SCRIPTS = {
    "CJK": "zh", "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CYRILLIC": "ru", "ARABIC": "ar", "HEBREW": "he",
    "DEVANAGARI": "hi", "BENGALI": "bn", "TAMIL": "ta", "THAI": "th", "GREEK": "el",
}  # fmt: skip
WORDS = {
    "en": "the of and to in is that for it with as on are this be by not from or what how you",
    "de": "der die und das ist nicht ein eine zu mit den von sich auf für wie dem im ich auch",
    "fr": "le la les et est des une du dans que pour pas qui sur au avec ce il je comment",
    "es": "el los las que una por con para está como del más pero sus cómo qué y es en se",
    "it": "il che di una per non sono con gli del della come più nel anche è questo alla",
    "pt": "o os uma que para com não do da em por mais como dos das ao é você seu são",
    "nl": "het een van en dat niet voor met op zijn te aan ook maar hoe wat bij naar",
    "sv": "och att det som en på är av för med den till inte om ett har jag hur",
    "da": "og at det som en på er af for med den til ikke et har jeg hvordan der",
    "pl": "nie jest się na że do jak to czy ale przez dla po jego i w z co",
    "tr": "bir ve bu için ile da de ne çok gibi olarak nasıl daha var mi olan",
}
LANGUAGES = tuple(sorted({*SCRIPTS.values(), *WORDS, UNKNOWN}))
SHARE = 0.2  # the share of letters from which on a script other than the Latin decides
LETTERS_READ = 2000  # how many letters of the beginning of a text are read
# A thought with something in it, as the templates of this year's models mark it.
THOUGHT = re.compile(r"<think>(?!\s*</think>)|<\|channel\|?>\s*(analysis|thought)")
LENGTHS = ((256, "short"), (1024, "medium"))  # numbers of tokens below which a sample is called short or medium
LONG = "long"

_of_word: dict[str, list[str]] = {}  # word → the languages that have it
for _language, _words in WORDS.items():
    for _word in _words.split():
        _of_word.setdefault(_word, []).append(_language)


def language_of(text: str) -> str:
    """The code of the text's language, one of `LANGUAGES`."""
    text = text[:LETTERS_READ].lower()
    letters = [letter for letter in text if letter.isalpha()]
    scripts = Counter(unicodedata.name(letter, "").split(" ", 1)[0] for letter in letters)
    found = Counter(dict.fromkeys(SCRIPTS.values(), 0))
    for script, count in scripts.items():
        if script in SCRIPTS:
            found[SCRIPTS[script]] += count
    language, count = found.most_common(1)[0]
    if count and count >= SHARE * len(letters):
        return "ja" if language == "zh" and found["ja"] else language  # Japanese is written in both
    votes: Counter[str] = Counter()
    for word in re.findall(r"[^\W\d_]+", text):
        for language in _of_word.get(word, ()):
            votes[language] += 1
    return max(WORDS, key=lambda code: votes[code]) if votes else UNKNOWN


def words_of(text: str) -> list[str]:
    """The words by which two texts are compared, whatever their case, spaces and punctuation; in languages that do not
    set words apart, the letters."""
    unspaced = language_of(text) in ("zh", "ja", "th")
    return re.findall(r"\w" if unspaced else r"\w+", text.casefold())


def category_of(row: Row) -> str:
    """The category of a request: its language, and whether it has tools."""
    if not isinstance(row.content, Conversation):
        return f"language={language_of(str(row.content))} tools=no"
    said = " ".join(str(m.get("content") or "") for m in row.content.messages if m["role"] == "user")
    called = any(m["role"] in TOOL_ROLES or m.get("tool_calls") for m in row.content.messages)
    return f"language={language_of(said)} tools={'yes' if row.content.tools or called else 'no'}"


def sliced(sample: Sample, target: TargetTokenizer) -> Sample:
    """The sample with all its slices in its category: those of its row, whether it thinks, and its length."""
    thinks = THOUGHT.search(target.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False))
    length = next((name for limit, name in LENGTHS if len(sample) < limit), LONG)
    return replace(sample, category=f"{sample.category} thinking={'yes' if thinks else 'no'} length={length}")
