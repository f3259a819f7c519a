"""Drafts by a second model: a small one of the same vocabulary, the target's own weights in fewer bits, or its first
layers.

It reads the text as the target does and keeps a cache of its own; a round costs it one step a guess. Whether that pays
is arithmetic: with acceptance a, n guesses at a cost of c and a check at a cost of v (both in single steps of the
target), the speed-up is (1 - a^(n+1)) / (1 - a) / (v + n c).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit import backends, registry
from labkit.backends.unpacked import apart
from labkit.decoding.drafters import AUTOMATIC, LONGEST, Draft, Drafter, Drafting
from labkit.decoding.sampler import Sampler
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model.model import Model
from labkit.model.transformer import Transformer
from labkit.registry import option, register


@dataclass(frozen=True)
class DraftModel:
    """``model``: a ``Model``, or the name of one."""

    model: Any = None
    n_draft: int = option(AUTOMATIC, low=0, high=LONGEST, step=1, help="tokens a round; 0 chooses as it goes")


@dataclass(frozen=True)
class Rounded:
    weights: str = option("int4", choices=("int4", "int8"), help="how the guessing copy holds its weights")
    n_draft: int = option(AUTOMATIC, low=0, high=LONGEST, step=1, help="tokens a round; 0 chooses as it goes")


@dataclass(frozen=True)
class EarlyExit:
    share: float = option(0.5, low=0.1, high=0.9, step=0.1, help="of the layers, from the first on")
    n_draft: int = option(AUTOMATIC, low=0, high=LONGEST, step=1, help="tokens a round; 0 chooses as it goes")


class _Guessing:
    """One run's guesses by a transformer: its cache holds the text up to somewhere, and guesses behind it."""

    def __init__(self, drafter: ModelDrafter, capacity_tokens: int, backend: Any) -> None:
        transformer = drafter.transformer
        self.n_vocab, self.own_vocab = drafter.n_vocab, transformer.config.vocab_size
        self.device = transformer.device
        self.capacity_tokens = min(capacity_tokens, transformer.config.context_tokens)
        sizes: dict[str, Any] = {"device": transformer.device, "dtype": transformer.dtype}
        self.cache = ContiguousCache(transformer.cache_entries, capacity_tokens=self.capacity_tokens, **sizes)
        self.step = backends.bind(backend, transformer=transformer, cache=self.cache)[1]
        self.nbytes = self.cache.nbytes
        self._held: list[int] = []
        self._n_sure = 0

    def propose(self, token_ids: Sequence[int], n: int, sampler: Sampler, *, timer: Any, should_stop: Any) -> Draft:
        n = min(n, self.capacity_tokens - len(token_ids) + 1)
        if n < 1:
            return Draft([])  # the text has outgrown this model's context
        feed = self._behind(token_ids)
        guesses: list[int] = []
        chances: list[np.ndarray] | None = [] if sampler.draws else None
        how = {"timer": timer, "should_stop": should_stop}
        with sampler.aside():
            while True:
                if sampler.takes_largest and len(feed) == 1 and (choose := self._choose(feed[0], n, guesses, how)):
                    guesses.append(sampler.accept(choose()))
                else:
                    logits = self.step(torch.tensor(feed, device=self.device), **how)[0]
                    if chances is None:
                        guesses.append(sampler(self._fitted(logits)))
                    else:
                        token_id, drawn_from = sampler.draw(self._fitted(logits))
                        guesses.append(token_id)
                        chances.append(drawn_from)
                self._held += feed
                if len(guesses) == n:
                    return Draft(guesses, chances)
                feed = guesses[-1:]

    def _choose(self, token_id: int, n: int, guesses: list[int], how: dict[str, Any]) -> Any:
        """The step's own choice, where it makes one and cannot choose what the target does not know."""
        if self.own_vocab > self.n_vocab:
            return None
        return self.step.choose_next(token_id, more=len(guesses) + 1 < n, **how)

    def _behind(self, token_ids: Sequence[int]) -> list[int]:
        """The end of the text that the cache does not hold, at least one token; what it holds beyond is dropped."""
        held, n = self._held, self._n_sure
        while n < min(len(held), len(token_ids) - 1) and held[n] == token_ids[n]:
            n += 1
        self._n_sure = n
        if n < self.cache.n_tokens():
            self.cache.truncate(n)
        del self._held[n:]
        return list(token_ids[n:])

    def _fitted(self, logits: Tensor) -> Tensor:
        """As many logits as the target has: vocabularies of one tokenizer may be padded differently."""
        short = self.n_vocab - len(logits)
        return nn.functional.pad(logits, (0, short), value=float("-inf")) if short > 0 else logits[: self.n_vocab]

    def see(self, hidden: Tensor) -> None:
        raise AssertionError("a draft model reads no hidden states")


class ModelDrafter:
    wants_hidden = False

    def __init__(self, name: str, transformer: Transformer, *, n_draft: int, n_vocab: int, nbytes: int) -> None:
        self.name, self.transformer, self.n_vocab = name, transformer, n_vocab
        self.n_draft, self.nbytes = n_draft, nbytes

    def begin(self, *, capacity_tokens: int, backend: Any) -> Drafting:
        return _Guessing(self, capacity_tokens, backend)


@register("drafter", "draft-model", config=DraftModel, summary="A smaller model of the same vocabulary guesses")
def draft_model(config: DraftModel, *, target: Any) -> Drafter:
    model = config.model
    if isinstance(model, str):
        component, _ = registry.find("model", model)
        model = component.build(None, device=target.device, dtype=target.dtype)
    if not isinstance(model, Model):
        raise ValueError(
            "the draft-model drafter needs a model: drafter=DraftModel(model=labkit.load(NAME)), a small one that has "
            f"{target.name}'s vocabulary."
        )
    _check_vocabulary(model, target)
    sizes: dict[str, Any] = {"n_draft": config.n_draft, "n_vocab": target.config.vocab_size}
    return ModelDrafter("draft-model", model.transformer, nbytes=model.nbytes, **sizes)


@register("drafter", "early-exit", config=EarlyExit, summary="The target's own first layers guess, untrained")
def early_exit(config: EarlyExit, *, target: Any) -> Drafter:
    n_layers = target.config.n_layers
    n = max(1, round(config.share * n_layers))
    if n >= n_layers:
        raise ValueError(f"share={config.share} of {n_layers} layers leaves none out: there is no exit before the end.")
    shorter = first_layers(target.transformer, n)
    sizes: dict[str, Any] = {"n_draft": config.n_draft, "n_vocab": target.config.vocab_size}
    return ModelDrafter("early-exit", shorter, nbytes=0, **sizes)


@register("drafter", "rounded", config=Rounded, summary="The target's own weights guess, rounded to fewer bits")
def rounded(config: Rounded, *, target: Any) -> Drafter:
    """The same model, cheaper to read (QSpec, arXiv 2410.11305): it agrees often, and every guess still costs a pass
    over all of its weights. The check makes up for what the rounding loses."""
    import labkit.quant  # noqa: F401 (registers the packed forms)

    if target.weights is not None:
        raise ValueError(
            f"{target.name}'s weights are {target.weights} already: a copy in {config.weights} would cost much the "
            "same. The rounded drafter is for plain weights (fp32, bf16, fp16)."
        )
    component, form = registry.find("weights", config.weights)
    copied = component.build(form, transformer=apart(target.transformer))
    sizes: dict[str, Any] = {"n_draft": config.n_draft, "n_vocab": target.config.vocab_size}
    return ModelDrafter("rounded", copied, nbytes=copied.nbytes, **sizes)


def first_layers(transformer: Transformer, n: int) -> Transformer:
    """The same modules, the first ``n`` layers of them, then the final norm and the head: the logit lens, as a model.

    Nothing is copied. Models that were trained to exit early guess well so (LayerSkip, arXiv 2404.16710); others do
    not, since their layers have no reason to agree on what a half-finished state means."""
    shorter = copy.copy(transformer)
    shorter._modules = {**transformer._modules, "layers": nn.ModuleList(list(transformer.layers)[:n])}
    shorter.config = dataclasses.replace(transformer.config, layers=transformer.config.layers[:n])
    shorter.cache_entries = transformer.cache_entries[:n]
    return shorter


def _check_vocabulary(draft: Model, target: Any) -> None:
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is theirs:
        return
    for token_id in range(min(ours.vocab_size, theirs.vocab_size)):
        pair = _bytes(theirs, token_id), _bytes(ours, token_id)
        if pair[0] != pair[1]:
            raise ValueError(
                f"{draft.name} and {target.name} speak different vocabularies (token {token_id} is {pair[0]!r} to one "
                f"and {pair[1]!r} to the other): a guess is a token's id, so both must mean the same by it."
            )
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"{draft.name} has {theirs.vocab_size} tokens and {target.name} {ours.vocab_size}: a guess is a token's "
            "id, so both must have the same vocabulary."
        )


def _bytes(tokenizer: Any, token_id: int) -> bytes | None:
    try:
        return tokenizer.token_bytes(token_id)
    except (KeyError, IndexError, ValueError):
        return None
