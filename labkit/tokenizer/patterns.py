r"""The regular expressions that published tokenizers split text with, and the names GGUF files give them.

A pre-tokenizer decides where a merge may never reach across. Leave it out and 9 % of SmolLM2's tokens of English prose
change, 16 % of those of Python code (benchmarks/tokenizer.py --no-split), so labkit runs the exact one or refuses the
file. Sources: each model's own ``tokenizer.json``, `tiktoken`'s ``tiktoken_ext/openai_public.py``, and the name table
in llama.cpp's ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from labkit.tokenizer import translate

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
QWEN35 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL

# SmolLM splits every digit off first and runs GPT2 on what lies between. In one expression: a digit ends the text for
# the whitespace rule, and is a word of its own. "Digit" means Unicode 17 here (see unicode16.NUMBERS_OF_UNICODE_17).
_NUMBER = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
SMOLLM = (
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|[{_NUMBER}]| ?[^\s\p{{L}}{_NUMBER}]+|\s+(?![^\s{_NUMBER}])|\s+"
)  # fmt: skip

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
O200K = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_WORD}{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _TAIL

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    _ASCII_PUNCTUATION
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# Patterns that match every character of any text, so that nothing lies between two matches.
COVERS_EVERYTHING = {GPT2, SMOLLM, LLAMA3, QWEN2, QWEN35, CL100K, O200K, TEKKEN}

translate._POSSESSIVE_IS_GREEDY.add(CL100K)

DIGIT = r"[\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}]"

# Patterns that were read, and match any text in time that grows with its length. Any other is a stranger's program.
KNOWN = frozenset((*COVERS_EVERYTHING, *DEEPSEEK3, DIGIT, DIGIT + "+"))

# tokenizer.ggml.pre -> the splits to run, in order. Several names share one rule; a name that is not here is refused.
GGUF_PRE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "roberta-bpe"), (GPT2,)),
    **dict.fromkeys(("mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (SMOLLM,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2"), (LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), (QWEN2,)),
    "qwen35": (QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (O200K,)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
}

# Names under which a word that is itself a token is taken whole, without running its merges (Llama-3's
# `ignore_merges`).
GGUF_IGNORE_MERGES = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "tekken", "gpt-4o", "llama4")
)

TIKTOKEN = {
    "gpt2": GPT2,
    "r50k_base": GPT2,
    "p50k_base": GPT2,
    "cl100k_base": CL100K,
    "o200k_base": O200K,
    "llama3": LLAMA3,
}
