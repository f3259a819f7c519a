"""Tiny trained models that come with labkit, one for each kind of attention, to compare what they recall.

Their language is one of facts: a token says "drawer 7 holds a 3", a question token asks for drawer 7, and the answer is
the token for 3. Between the facts stands filler. A model that can look back at every token answers from any distance;
one that has folded many facts into one row must have kept them apart in it. It is a toy: it shows how recall falls as
memory does, and says nothing about how much a large model would lose. ``benchmarks/recall.py`` trains them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.assemble import assemble
from labkit.checkpoint.safetensors import read_tensors, tensor_shapes
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model.config import (
    CompressedAttention,
    DenseFFN,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelConfig,
    Rope,
    uniform,
)
from labkit.model.transformer import Transformer
from labkit.resources import data_path

N_KEYS, N_VALUES = 32, 8
N_CONTEXT_TOKENS, N_QUESTIONS = 64, 16
WINDOW = 8
SEEDS = (0, 1, 2)
_QUESTION, _FILLER = N_KEYS * N_VALUES, N_KEYS * N_VALUES + N_KEYS
_ANSWER = _FILLER + 1
VOCABULARY = _ANSWER + N_VALUES

_PAIRS = Rope(10_000.0, "interleaved", 8)
_V4: dict[str, Any] = {"n_heads": 4, "d_head": 32, "d_query": 48, "window": WINDOW, "n_groups": 2, "d_group": 32}
KINDS: dict[str, Any] = {
    "full": GroupedAttention(4, 4, 16, rope=Rope()),
    "sliding": GroupedAttention(4, 4, 16, rope=Rope(), window=WINDOW),
    "mla": LatentAttention(4, 16, 8, 16, 24, rope=Rope(10_000.0, "interleaved")),
    "csa": CompressedAttention(**_V4, rope=_PAIRS, rate=4, overlap=True, indexer=Indexer(4, 16, 4)),
    "hca": CompressedAttention(**_V4, rope=_PAIRS, rate=16),
}
"""One layer each. CSA sees 4 rows of 16, HCA all of its 4; both see the latest 8 tokens as they are."""


def config(kind: str) -> ModelConfig:
    """The toy of one kind. Raises KeyError for a kind that has none."""
    layers = uniform(1, KINDS[kind], DenseFFN(128))
    n_tokens = N_CONTEXT_TOKENS + N_QUESTIONS
    return ModelConfig("recall", VOCABULARY, 64, n_tokens, layers, tied_embeddings=False)


def facts(n_facts: int, n_sequences: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (B, T) of ``n_facts`` facts among filler and then questions, and the answers (B, N_QUESTIONS).

    Drawers differ within a sequence. Raises ValueError unless 1 <= ``n_facts`` <= N_KEYS.
    """
    if not 1 <= n_facts <= N_KEYS:
        raise ValueError(f"n_facts={n_facts}: there are {N_KEYS} drawers, so 1 to {N_KEYS} facts.")
    shape = n_sequences, n_facts
    keys = torch.rand(n_sequences, N_KEYS, generator=generator).argsort(1)[:, :n_facts]
    values = torch.randint(N_VALUES, shape, generator=generator)
    places = torch.rand(n_sequences, N_CONTEXT_TOKENS, generator=generator).argsort(1)[:, :n_facts]
    context = torch.full((n_sequences, N_CONTEXT_TOKENS), _FILLER).scatter_(1, places, keys * N_VALUES + values)
    asked = torch.randint(n_facts, (n_sequences, N_QUESTIONS), generator=generator)
    questions = _QUESTION + keys.gather(1, asked)
    return torch.cat((context, questions), dim=1), _ANSWER + values.gather(1, asked)


def seeds(kind: str) -> list[int]:
    """The training runs of one kind that lie in data/recall."""
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in data_path("recall").glob(f"{kind}-*.safetensors"))


def load(kind: str, seed: int) -> Transformer:
    """The trained toy of one kind and one training run, float32. Raises FileNotFoundError when it is not there."""
    path = data_path("recall") / f"{kind}-{seed}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: train it with `python benchmarks/recall.py --kinds {kind}`.")
    n_stored = sum(torch.Size(shape).numel() for shape in tensor_shapes([path]).values())
    return assemble(
        config(kind),
        read_tensors([path]),
        device=torch.device("cpu"),
        dtype=torch.float32,
        name=path.name,
        n_stored=n_stored,
        borrowed=True,
    )


def new_cache(model: Transformer, n_sequences: int, dtype: torch.dtype = torch.float32) -> ContiguousCache:
    """A cache for whole sequences of the task."""
    n_tokens = N_CONTEXT_TOKENS + N_QUESTIONS
    return ContiguousCache(model.cache_entries, capacity_tokens=n_tokens, n_sequences=n_sequences, dtype=dtype)


@torch.inference_mode()
def recall(model: Transformer, n_facts: int, *, n_sequences: int = 16, seed: int = 1234) -> float:
    """Share of questions answered rightly, the context read first and the questions asked after it: 0 to 1."""
    tokens, answers = facts(n_facts, n_sequences, torch.Generator().manual_seed(seed))
    cache = new_cache(model, n_sequences)
    model(tokens[:, :N_CONTEXT_TOKENS].flatten(), cache, counts=dict.fromkeys(range(n_sequences), N_CONTEXT_TOKENS))
    logits = model(tokens[:, N_CONTEXT_TOKENS:].flatten(), cache, counts=dict.fromkeys(range(n_sequences), N_QUESTIONS))
    return float((logits.argmax(-1) == answers.flatten()).float().mean())
