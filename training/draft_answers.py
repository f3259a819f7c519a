"""Stage 1: the default model's own greedy answers, with the hidden states that a draft head learns to continue.

    python training/draft_answers.py --minutes 60 [--out FOLDER]

Answers run side by side, one token of each a step, so that the weights are read once for all. Between two steps a text
is read now and then: whole pages of prose and code, whose every position teaches too, at a fraction of an answer's
price. A shard is written every few minutes, and a later call goes on after the last one. A shard (safetensors) holds
``ids`` (N,) int32 and ``hidden`` (N, M) bf16, the final norm's output, of all its sequences one after the other;
``sequences`` in its header says where each begins, how many of its tokens are prompt, and its kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from draft_texts import Prompt, pages, prompts
from safetensors.torch import save_file
from torch import Tensor

import labkit
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.resources import cache_folder

N_SEQUENCES, LONGEST, N_ANSWER = 64, 288, 120
N_PAGES, PAGE_TOKENS, READ_EVERY = 5, 220, 12
SHARD_TOKENS = 6_000
HELD_OUT_TOKENS = 12_000


class SideBySide(ContiguousCache):
    """Contiguous, and where each of its sequences has one new token, they attend in one product instead of one each."""

    def open(self, counts: Any) -> None:
        super().open(counts)
        self._totals = torch.zeros(0)
        self._whole = False
        if [self.slot_of(s.sequence_id) for s in self.segments] == list(range(self.n_sequences)):
            self._whole = True
            self._totals = torch.tensor([s.n_total for s in self.segments])
            self._longest = int(self._totals.max())
            seen = torch.arange(self._longest)[None] < self._totals[:, None]
            self._mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None, None]

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        if not self._whole:
            return super().append(layer_idx, **entries)
        for name, new in entries.items():
            self.store[layer_idx][name][torch.arange(self.n_sequences), :, self._totals - 1] = new
        return None

    def attend(self, layer_idx: int, q: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        if not self._whole:
            return super().attend(layer_idx, q, scale=scale, softcap=softcap)
        k, v = (self.store[layer_idx][name][:, :, : self._longest] for name in ("k", "v"))  # (B, G, S, D)
        grouped = q.unflatten(1, (k.shape[1], -1))  # (B, G, H/G, D)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask, scale=scale).flatten(1, 2)


class Last:
    """A ``watch`` that keeps the last layer's output."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers

    def hidden(self, layer_idx: int, x: Tensor) -> None:
        if layer_idx == self.n_layers - 1:
            self.x = x

    def attention(self, layer_idx: int, q: Tensor, cache: Any, **_: Any) -> None:
        pass


class Answers:
    """Greedy answers to a stream of prompts, ``N_SEQUENCES`` at a time."""

    def __init__(self, model: labkit.Model, stream: Any) -> None:
        self.model, self.stream, self.transformer = model, stream, model.transformer
        sizes = {"capacity_tokens": LONGEST, "n_sequences": N_SEQUENCES}
        self.cache = SideBySide(self.transformer.cache_entries, **sizes)
        self.watch = Last(model.config.n_layers)
        self.running: dict[int, tuple[Prompt, list[int], list[Tensor], int]] = {}

    def step(self) -> list[tuple[Prompt, list[int], Tensor, int]]:
        """One token more for each; returns the sequences that have ended: prompt, ids, hidden, prompt tokens."""
        for slot in range(N_SEQUENCES):
            if slot not in self.running:
                self._start(slot)
        tokens = torch.tensor([self.running[slot][1][-1] for slot in range(N_SEQUENCES)])
        logits, states = self._forward(tokens, dict.fromkeys(range(N_SEQUENCES), 1))
        ended = []
        for slot, (token, state) in enumerate(zip(logits.argmax(-1).tolist(), states, strict=True)):
            prompt, ids, hidden, n_prompt = self.running[slot]
            hidden.append(state[None])
            ids.append(token)
            if token in self.model.tokenizer.eos_ids or len(ids) - n_prompt >= N_ANSWER or len(ids) >= LONGEST:
                ended.append((prompt, ids[:-1], torch.cat(hidden), n_prompt))
                del self.running[slot]
                self.cache.free(slot)
        return ended

    def unfinished(self) -> list[tuple[Prompt, list[int], Tensor, int]]:
        """What there is of the others: beginnings of answers teach as well."""
        return [(p, ids[:-1], torch.cat(hidden), n_prompt) for p, ids, hidden, n_prompt in self.running.values()]

    def _start(self, slot: int) -> None:
        tokenizer = self.model.tokenizer
        while True:
            prompt = next(self.stream)
            text = prompt.text
            if prompt.chat:
                text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
            ids = tokenizer.encode(text)
            if 3 < len(ids) < LONGEST - 60:
                break
        logits, states = self._forward(torch.tensor(ids), {slot: len(ids)})
        self.running[slot] = prompt, [*ids, int(logits[-1].argmax())], [states], len(ids)

    def _forward(self, tokens: Tensor, counts: dict[int, int]) -> tuple[Tensor, Tensor]:
        logits = self.transformer(tokens, self.cache, counts=counts, rows="last", watch=self.watch)
        return logits, self.transformer.final_norm(self.watch.x).bfloat16()


@torch.inference_mode()
def read(model: labkit.Model, pages: Iterator[Prompt]) -> list[tuple[Prompt, list[int], Tensor, int]]:
    """Some pages through the model together: each a sequence with a prompt of one token."""
    chosen = [next(pages) for _ in range(N_PAGES)]
    ids = [model.tokenizer.encode(page.text)[:PAGE_TOKENS] for page in chosen]
    counts = {i: len(page) for i, page in enumerate(ids)}
    transformer, watch = model.transformer, Last(model.config.n_layers)
    cache = NoCache(transformer.cache_entries, capacity_tokens=PAGE_TOKENS, n_sequences=N_PAGES)
    transformer(torch.tensor([i for page in ids for i in page]), cache, counts=counts, rows="last", watch=watch)
    states = transformer.final_norm(watch.x).bfloat16().split(list(counts.values()))
    return [(page, seq, hidden, 1) for page, seq, hidden in zip(chosen, ids, states, strict=True)]


def write(path: Path, sequences: list[tuple[Prompt, list[int], Tensor, int]]) -> None:
    ids = torch.tensor([i for _, seq, _, _ in sequences for i in seq], dtype=torch.int32)
    hidden = torch.cat([h for _, _, h, _ in sequences])
    table = [{"kind": p.kind, "n_prompt": n, "n_tokens": len(seq)} for p, seq, _, n in sequences]
    part = path.with_suffix(".part")
    save_file({"ids": ids, "hidden": hidden}, part, metadata={"sequences": json.dumps(table)})
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stage 1: greedy answers and what they were chosen from.")
    parser.add_argument("--out", type=Path, default=cache_folder() / "draft" / "answers")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    model = labkit.load(dtype="fp32", weights="plain", backend="reference")
    with torch.inference_mode():
        for name, limit in (("held-out", HELD_OUT_TOKENS), ("train", 1 << 60)):
            n_shards = len(list(options.out.glob(f"{name}-*.safetensors")))
            if name == "held-out" and n_shards:
                continue
            # A stream of its own for each call: going on means other prompts, not the same again.
            answers = Answers(model, prompts(1000 * n_shards + (name == "train"), held_out=name == "held-out"))
            texts = pages(2000 * n_shards)
            done: list[Any] = []
            began, n_made = time.monotonic(), 0
            for n_steps in itertools.count():
                if time.monotonic() >= until or n_made >= limit:
                    break
                done += answers.step()
                if name == "train" and n_steps % READ_EVERY == 0:
                    done += read(model, texts)
                if n_steps % 25 == 0:
                    print(f"{name}: step {n_steps}, {time.monotonic() - began:.0f} s", flush=True)
                if time.monotonic() >= until:
                    done += answers.unfinished()
                n_tokens = sum(len(ids) for _, ids, _, _ in done)
                if done and (n_tokens >= min(SHARD_TOKENS, limit - n_made) or time.monotonic() >= until):
                    write(options.out / f"{name}-{n_shards:04d}.safetensors", done)
                    n_shards, n_made, done = n_shards + 1, n_made + n_tokens, []
                    rate = n_made / (time.monotonic() - began)
                    print(f"{name}: {n_made:,} tokens in {n_shards} shards, {rate:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
