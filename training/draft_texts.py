"""What the draft in the box learns from: prompts of many kinds, for the default model to answer or to continue.

The texts are of three sources: templates and passages written here, the manual and docstrings of Python's standard
library, and its source code. Each prompt belongs to a *kind*, and the kinds of ``HELD_OUT`` are never trained on: what
is accepted on those is what a reader's own prompts may expect.
"""

from __future__ import annotations

import ast
import importlib.util
import pydoc_data.topics
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """``kind`` e.g. "chat:explain"; its first word is the group that acceptance is told by. ``chat``: wrapped in the
    model's chat template."""

    kind: str
    text: str
    chat: bool

    @property
    def held_out(self) -> bool:
        return self.kind in HELD_OUT


SUBJECTS = """rain|winter|music|bread|rivers|bicycles|stars|trains|cats|chess|gardens|volcanoes|libraries|bridges|honey
glass
sleep|money|islands|clocks|mirrors|whales|paper|salt|maps|wolves|tea|robots|forests|deserts|the moon|gravity
photosynthesis|electricity|the heart|vaccines|the ocean|coral reefs|earthquakes|the internet|batteries
steam engines|democracy|inflation|trade|taxes|museums|opera|painting|poetry|theatre|football|swimming|marathons
yoga|cooking|cheese|coffee|chocolate|rice|apples|tomatoes|vegetables|vegetarian food|street markets|airports
ships|submarines|satellites|telescopes|microscopes|computers|programming|databases|encryption|passwords
search engines|video games|photography|cameras|radio|television|newspapers|dictionaries|grammar|translation
accents|memory|dreams|habits|patience|friendship|honesty|courage|teamwork|leadership|meetings|emails|deadlines
job interviews|resumes|exams|homework|teachers|schools|universities|bees|ants|butterflies|spiders|snakes
elephants|penguins|dogs|horses|owls|dinosaurs|fossils|mountains|glaciers|caves|lakes|waterfalls|clouds
thunderstorms|rainbows|sunrise|seasons|autumn|spring cleaning|houseplants|recycling|solar power|wind turbines
nuclear energy|oil|gold|diamonds|steel|concrete|wood|cotton|wool|shoes|hats|umbrellas|furniture|lighthouses
castles|pyramids|ancient Rome|the Silk Road|the printing press|the Renaissance|pirates|knights|fractions
prime numbers|triangles|probability|statistics|infinity|logic|atoms|molecules|acids|magnets|light|sound|heat
friction|planets|comets|black holes|evolution|cells|DNA|bacteria|viruses|bones|muscles|the brain|eyes|teeth
exercise|breakfast|soup|pancakes|pizza|salads|camping|hiking|fishing|sailing|skiing|dancing|the guitar|the piano
drums|choirs""".replace("\n", "|").split("|")

CHAT = {
    "explain": [
        "Explain in three sentences why {} matter.",
        "Explain {} to a ten-year-old.",
        "What is the simplest way to understand {}?",
        "Why are {} important?",
        "How do {} work?",
        "Explain the difference between {} and {}.",
    ],
    "question": [
        "What are {}?",
        "Where do {} come from?",
        "Who invented {}?",
        "When did people first learn about {}?",
        "Is it true that {} are older than {}?",
        "Tell me something surprising about {}.",
        "How are {} made?",
    ],
    "list": [
        "List five facts about {}.",
        "Give me ten words that describe {}.",
        "Name three advantages and three disadvantages of {}.",
        "List seven things that I need to learn about {}. Number them.",
        "Give me a checklist for {}.",
    ],
    "story": [
        "Write a short story about {}.",
        "Write a story that begins with {} and ends with {}.",
        "Tell a fable about {} and {}.",
        "Write the first paragraph of a novel about {}.",
    ],
    "howto": [
        "What is the best way to learn about {}?",
        "Describe step by step how to start with {}.",
        "How can I get better at {}?",
        "I know nothing about {}. Where should I begin?",
        "Give me a plan for one week to study {}.",
    ],
    "compare": ["Compare {} and {}.", "Which is more useful, {} or {}?", "What do {} and {} have in common?"],
    "letter": [
        "Write a letter to a friend about {}.",
        "Write a short email to my manager about {}.",
        "Write an invitation to an evening about {}.",
        "Write a polite complaint to a shop that sells {}.",
    ],
    "poem": ["Write a poem about {}.", "Write four lines that rhyme about {}.", "Write a song about {} and {}."],
    "opinion": [
        "Argue for and against {}.",
        "Write a paragraph that defends {}.",
        "What would a critic say about {}?",
        "Should children learn about {}? Give reasons.",
    ],
    "define": ["Define {} in one sentence.", "What does the word '{}' mean? Use it in a sentence.", "Summarize {}."],
    "dialogue": [
        "Write a conversation between two people about {}.",
        "Write a dialogue in which a teacher asks a pupil about {}.",
    ],
    "advice": [
        "I am worried about {}. What should I do?",
        "What mistakes do beginners make with {}?",
        "Give me advice about {} and {}.",
    ],
    "title": ["Suggest five titles for a book about {}.", "Write a headline and a first sentence about {}."],
    "code-chat": [
        "Write a Python function that counts {} in a list.",
        "Write a Python function that {task}.",
        "Write a Python function that {task}, and explain how it works.",
        "Show me an example of {topic} in Python.",
        "Explain {topic} in Python with a short example.",
        "Write a Python class that represents {}.",
    ],
    # held out:
    "review": ["Write a product review of {}.", "Write a review of a restaurant that is famous for {}."],
    "travel": ["Plan a trip for somebody who loves {} and {}.", "Describe a place where one can see {}."],
    "quiz": ["Write three quiz questions about {}, with answers.", "Test my knowledge of {}."],
    "speech": ["Write a short speech about {}.", "Write a toast at a wedding of two people who love {}."],
    "javascript": [
        "Write a JavaScript function that {task}.",
        "Write an SQL query that finds all {} in a table.",
        "Write a shell script that {task}.",
    ],
}
TASKS = """reverses a string|sorts a list of numbers|finds the largest number in a list
checks whether a word is a palindrome|counts the vowels in a text|computes the factorial of a number
returns the n-th Fibonacci number|removes duplicates from a list|merges two dictionaries
reads a file and prints its lines|converts Celsius to Fahrenheit|checks whether a number is prime
finds the median of a list|flattens a nested list|counts how often each word occurs|rounds a price to two digits
splits a text into sentences|computes the distance between two points|parses a date|validates an email address
generates a random password|writes rows to a CSV file|computes the average of a list
finds the common elements of two lists|transposes a matrix|multiplies two matrices|searches a sorted list
returns the digits of a number|capitalizes each word|downloads a page and saves it
groups names by their first letter|finds the longest word|swaps two variables""".replace("\n", "|").split("|")
TOPICS = """list comprehensions|decorators|generators|a for loop|a while loop|exceptions|classes|inheritance
dictionaries
sets|tuples|string formatting|regular expressions|lambda functions|recursion|file handling|modules|type hints
dataclasses|unit tests|context managers|iterators|sorting with a key|slicing|default arguments|keyword arguments
threads|JSON""".replace("\n", "|").split("|")

COPY = {
    "repeat": ["Repeat the following text exactly:\n\n{}", "Copy this text without any change:\n\n{}"],
    "correct": ["Correct the mistakes in this text and write it out in full:\n\n{}"],
    "summarize": ["Summarize this text in one sentence:\n\n{}", "What is this text about?\n\n{}"],
    "rewrite": ["Rewrite this text in simpler words:\n\n{}", "Rewrite this as a list of points:\n\n{}"],
    "explain-code": ["Explain what this code does:\n\n{code}", "Add comments to this code:\n\n{code}"],
    # held out:
    "rename": ["Write this code again with better variable names:\n\n{code}"],
    "quote": ["Quote the two most important sentences of this text, then explain them:\n\n{}"],
}

HELD_OUT = frozenset(
    [f"chat:{kind}" for kind in ("review", "travel", "quiz", "speech")]
    + [
        "code:javascript",
        "code:held-out-modules",
        "copy:rename",
        "copy:quote",
        "prose:held-out-docstrings",
        "prose:own",
    ]
)

MODULES = """
abc argparse ast asyncio.base_events asyncio.events base64 bdb bisect bz2 calendar cgi cmd code codecs
collections colorsys compileall concurrent.futures._base configparser contextlib copy csv datetime decimal
difflib dis doctest email.message enum filecmp fileinput fnmatch fractions ftplib functools getopt getpass
gettext glob graphlib gzip hashlib heapq hmac html.parser http.client http.cookies http.server imaplib
importlib.abc inspect io ipaddress json.decoder json.encoder keyword linecache locale logging logging.handlers
lzma mailbox mimetypes multiprocessing.pool multiprocessing.queues netrc nntplib numbers operator optparse os
pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile
pyclbr pydoc queue quopri random reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal
site smtplib socket socketserver sqlite3.dbapi2 ssl stat string subprocess symtable sysconfig tabnanny tarfile
telnetlib tempfile threading timeit tokenize trace traceback tracemalloc tty types typing unittest.case
unittest.mock urllib.parse urllib.request uuid venv warnings wave weakref webbrowser xml.dom.minidom
xml.etree.ElementTree xmlrpc.client xmlrpc.server zipapp zipfile
"""

HELD_OUT_MODULES = "statistics textwrap dataclasses cProfile zoneinfo._zoneinfo turtle nturl2path sre_parse"


def prompts(seed: int, *, held_out: bool) -> Iterator[Prompt]:
    """Endless prompts of the kinds that are, or are not, held out: the same for the same seed."""
    rng = random.Random(seed)
    modules = (HELD_OUT_MODULES if held_out else MODULES).split()
    sources = [s for s in map(_source, modules) if s]
    docs = [d for s in sources for d in _docstrings(s)]
    manual = [p for text in pydoc_data.topics.topics.values() for p in _paragraphs(text)]
    passages = [p for p in (manual if not held_out else docs) if len(p) < 420]
    own = _own_prose()
    chat = {kind: forms for kind, forms in CHAT.items() if (_chat_kind(kind) in HELD_OUT) == held_out}
    copy = {kind: forms for kind, forms in COPY.items() if (f"copy:{kind}" in HELD_OUT) == held_out}

    def fill(form: str) -> str:
        text = form.replace("{task}", rng.choice(TASKS)).replace("{topic}", rng.choice(TOPICS))
        while "{}" in text:
            text = text.replace("{}", rng.choice(SUBJECTS), 1)
        return text

    while True:
        draw = rng.random()
        if draw < 0.45:
            kind = rng.choice(sorted(chat))
            yield Prompt(_chat_kind(kind), fill(rng.choice(chat[kind])), chat=True)
        elif draw < 0.55:
            kind = rng.choice(sorted(copy))
            form = rng.choice(copy[kind])
            code = _piece(rng, rng.choice(sources), n_lines=(4, 12))
            yield Prompt(f"copy:{kind}", form.replace("{code}", code).replace("{}", rng.choice(passages)), chat=True)
        elif draw < 0.80:
            if held_out:
                kind, text = rng.choice([("held-out-docstrings", rng.choice(docs)), ("own", rng.choice(own))])
            else:
                kind, text = rng.choice([("manual", rng.choice(manual)), ("docstrings", rng.choice(docs))])
            yield Prompt(f"prose:{kind}", _beginning(rng, text), chat=False)
        else:
            kind = "held-out-modules" if held_out else "library"
            yield Prompt(f"code:{kind}", _piece(rng, rng.choice(sources), n_lines=(6, 16)), chat=False)


def pages(seed: int) -> Iterator[Prompt]:
    """Endless pages to read, of the sources that are not held out: the manual and docstrings, and code."""
    rng = random.Random(seed)
    sources = [s for s in map(_source, MODULES.split()) if s]
    docs = [d for s in sources for d in _docstrings(s)]
    manual = [p for text in pydoc_data.topics.topics.values() for p in _paragraphs(text)]
    while True:
        if rng.random() < 0.6:
            paragraphs = rng.choice([manual, docs])
            start = rng.randrange(len(paragraphs))
            yield Prompt("prose:read", "\n\n".join(paragraphs[start : start + 6]), chat=False)
        else:
            yield Prompt("code:read", _piece(rng, rng.choice(sources), n_lines=(20, 30)), chat=False)


def _chat_kind(kind: str) -> str:
    return f"code:{kind}" if kind in ("code-chat", "javascript") else f"chat:{kind}"


def _source(module: str) -> str | None:
    """A module's source; None where this Python lacks it."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).read_text("utf-8", errors="replace")


def _docstrings(source: str) -> list[str]:
    """Paragraphs of a module's docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [p for node in nodes if (text := ast.get_docstring(node)) for p in _paragraphs(text)]


def _paragraphs(text: str) -> list[str]:
    """Runs of prose: one line each, without tables, code and headings."""
    whole = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text))
    return [p for p in whole if 80 < len(p) < 900 and sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p)]


def _own_prose() -> list[str]:
    """Prose of this repository, which no model has been trained to continue."""
    root = Path(__file__).resolve().parent.parent
    files = ["README.md", "docs/design.md", "docs/decisions.md", "CONTRIBUTING.md"]
    texts = [(root / name).read_text("utf-8") for name in files if (root / name).is_file()]
    return [p for text in texts for p in _paragraphs(text)]


def _beginning(rng: random.Random, text: str) -> str:
    """The first words of a paragraph."""
    words = text.split()
    return " ".join(words[: rng.randint(8, max(9, min(45, len(words) - 1)))])


def _piece(rng: random.Random, source: str, *, n_lines: tuple[int, int]) -> str:
    """Some lines of code that lie together."""
    lines = [line for line in source.splitlines() if line.strip()]
    start = rng.randrange(max(1, len(lines) - n_lines[1]))
    return "\n".join(lines[start : start + rng.randint(*n_lines)])
