"""Stage 2: train the draft head on what stage 1 wrote, and tell what it reaches.

    python training/draft_head.py --minutes 60 [--data FOLDER] [--out FOLDER]

It goes on from ``checkpoint.safetensors`` in the out folder when there is one, reads shards that were added meanwhile,
and writes a checkpoint, the curve of the loss (``curve.csv``) and the record every few minutes. At the end (or with
``--minutes 0``, at once) it measures greedy acceptance for each kind of text that was held out and writes the head
where ``TrainedHead()`` finds it.

The loss, on the positions whose next token the target chose itself or read as plain text:

    cross-entropy to the target's distribution over the draft's ids  +  0.2 smooth-L1 to the target's hidden state

with a little noise on the hidden states, and every second batch some of them replaced by the head's own guesses, which
is what it must go on from when it drafts several tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import labkit
from labkit.decoding.draft_head import DraftHead, embeddings, fingerprint, save
from labkit.decoding.trained_head import HEAD_FILE
from labkit.kvcache.none import NoCache
from labkit.resources import cache_folder

N_IDS = 6000
BATCH_TOKENS = 1024
PEAK_RATE, WARM_STEPS = 1.5e-3, 40
NOISE = 0.05
"""Of the hidden states' root mean square."""
CHECKPOINT_S = 240
DEPTH = 4


class Sequence(NamedTuple):
    """Ids (T,), the target's normed hidden state after each (T, M), and where the head begins: a chat's prompt is
    not its business, a text's is."""

    kind: str
    ids: Tensor
    hidden: Tensor
    n_prompt: int

    @property
    def first(self) -> int:
        return self.n_prompt - 1 if self.kind.split(":")[0] in ("chat", "copy") or "code-chat" in self.kind else 0


def read(folder: Path, name: str, known: set[str]) -> list[Sequence]:
    """Sequences of the shards that are not ``known`` yet."""
    out = []
    for path in sorted(folder.glob(f"{name}-*.safetensors")):
        if path.name in known:
            continue
        known.add(path.name)
        with safe_open(path, "pt") as file:
            ids, hidden = file.get_tensor("ids").long(), file.get_tensor("hidden")
            at = 0
            for entry in json.loads(file.metadata()["sequences"]):
                end = at + entry["n_tokens"]
                if entry["n_tokens"] - entry["n_prompt"] >= 2:
                    out.append(Sequence(entry["kind"], ids[at:end], hidden[at:end], entry["n_prompt"]))
                at = end
    return out


def frequent_ids(sequences: list[Sequence]) -> Tensor:
    """The ids that the target uses most, sorted; ids that it never used fill up in the order of its vocabulary, which
    is the order in which merges were learned: frequent ones first."""
    counts = Counter(i for s in sequences for i in s.ids.tolist())
    ids = [i for i, _ in counts.most_common(N_IDS)]
    seen = set(ids)
    ids += [i for i in range(4 * N_IDS) if i not in seen][: N_IDS - len(ids)]
    return torch.tensor(sorted(ids))


class Batch(NamedTuple):
    hidden: Tensor
    """(N, M) what goes in."""
    embeddings: Tensor
    goal: Tensor
    """(N, M) the states after the tokens that went in."""
    counts: dict[int, int]


class Trainer:
    def __init__(self, model: labkit.Model, head: DraftHead) -> None:
        self.table = model.transformer.embedding.weight.float()
        self.head, self.words = head, self.table[head.token_ids]
        head.trunk.embedding.weight.data.copy_(self.words)
        names = [name for name, _ in head.named_parameters() if name != "trunk.embedding.weight"]
        self.parameters = [dict(head.named_parameters())[name].requires_grad_(True) for name in names]
        rates = {"lr": PEAK_RATE, "betas": (0.9, 0.95), "weight_decay": 0.01}
        self.optimizer = torch.optim.AdamW(self.parameters, **rates)

    @torch.no_grad()
    def begin(self, sequences: list[Sequence], *, n_tokens: int = 40_000, ridge: float = 10.0) -> None:
        """Start from the best that ``fuse`` can do alone: least squares from what it is given to the next state. The
        layer begins as nothing (its outputs are zero) and learns what is left."""
        for parameter in self.head.parameters():
            if parameter is not self.head.trunk.embedding.weight:
                torch.nn.init.ones_(parameter) if parameter.ndim == 1 else torch.nn.init.normal_(parameter, std=0.03)
        block: Any = self.head.trunk.layers[0]
        torch.nn.init.zeros_(block.attention.o_proj.weight)
        torch.nn.init.zeros_(block.ffn.down_proj.weight)
        width = self.head.fuse.weight.shape[1]
        products, wanted, n, size = torch.zeros(width, width), torch.zeros(width, width // 2), 0, 0.0
        for at in range(0, len(sequences), 8):
            batch = self.batch(sequences[at : at + 8])
            x = self.head.beside(batch.hidden, batch.embeddings)
            size += batch.goal.square().mean(-1).sqrt().sum().item()
            goal = batch.goal / batch.goal.square().mean(-1, keepdim=True).sqrt()
            products += x.T @ x
            wanted += x.T @ goal
            n += len(x)
            if n >= n_tokens:
                break
        self.head.fuse.weight.data.copy_(torch.linalg.solve(products + ridge * torch.eye(width), wanted).T)
        self.head.trunk.final_norm.weight.data.fill_(size / n)

    def batch(self, sequences: list[Sequence]) -> Batch:
        parts = [
            (s.hidden[s.first : -1].float(), s.ids[s.first + 1 :], s.hidden[s.first + 1 :].float()) for s in sequences
        ]
        hidden, ids, goal = (torch.cat(column) for column in zip(*parts, strict=True))
        return Batch(hidden, self.table[ids], goal, {i: len(part[1]) for i, part in enumerate(parts)})

    def guess(self, hidden: Tensor, batch: Batch) -> Tensor:
        longest = max(batch.counts.values())
        trunk = self.head.trunk
        cache = NoCache(trunk.cache_entries, capacity_tokens=longest, n_sequences=len(batch.counts))
        return self.head(hidden, batch.embeddings, cache, counts=batch.counts)

    def step(self, batch: Batch, rate: float, *, own: bool) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        hidden = batch.hidden
        if own:
            with torch.no_grad():
                guessed = self.guess(hidden, batch)
            shifted = torch.cat((hidden[:1], guessed[:-1]))
            starts = torch.zeros(len(hidden), dtype=torch.bool)
            starts[torch.tensor([0, *batch.counts.values()]).cumsum(0)[:-1]] = True
            chosen = (torch.rand(len(hidden)) < 0.4) & ~starts
            hidden = torch.where(chosen[:, None], shifted, hidden)
        size = batch.hidden.square().mean().sqrt()
        guessed = self.guess(hidden + torch.randn_like(hidden) * NOISE * size, batch)
        with torch.no_grad():
            wanted = (batch.goal @ self.words.T).softmax(-1)
        loss = F.cross_entropy(guessed @ self.words.T, wanted) + 0.2 * F.smooth_l1_loss(guessed, batch.goal)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.item()


@torch.no_grad()
def acceptance(trainer: Trainer, sequences: list[Sequence], *, stride: int = 5) -> dict[str, list[float]]:
    """Kind -> chance that the guess is the target's own token at depths 1 to DEPTH, those before it being right."""
    hits: dict[str, list[list[int]]] = {}
    head, table, words = trainer.head, trainer.table, trainer.words
    for s in sequences:
        counted = hits.setdefault(s.kind, [[0, 0] for _ in range(DEPTH)])
        hidden, ids = s.hidden.float(), s.ids
        trunk = head.trunk
        cache = labkit_cache(trunk, len(ids) + DEPTH)
        begin = s.n_prompt - 1  # as it is used: it meets the first token after the prompt
        done = begin
        for t in range(s.n_prompt, len(ids) - DEPTH, stride):
            state = head(hidden[done:t], table[ids[done + 1 : t + 1]], cache)[-1:]
            done = t
            for depth in range(DEPTH):
                guess = int(head.token_ids[(state @ words.T).argmax()])
                counted[depth][1] += 1
                if guess != int(ids[t + 1 + depth]):
                    break
                counted[depth][0] += 1
                state = head(state, table[torch.tensor([guess])], cache)
            cache.truncate(done - begin)
    return {kind: [hit / max(n, 1) for hit, n in counted] for kind, counted in sorted(hits.items())}


def labkit_cache(trunk: Any, capacity: int) -> Any:
    from labkit.kvcache.contiguous import ContiguousCache

    return ContiguousCache(trunk.cache_entries, capacity_tokens=capacity)


def grouped(by_kind: dict[str, list[float]]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for kind, depths in by_kind.items():
        groups.setdefault(kind.split(":")[0], []).append(depths[0])
    return {group: sum(values) / len(values) for group, values in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Stage 2: train the draft head.")
    parser.add_argument("--data", type=Path, default=cache_folder() / "draft" / "answers")
    parser.add_argument("--out", type=Path, default=cache_folder() / "draft")
    parser.add_argument("--minutes", type=float, default=60, help="how long; the learning rate falls towards its end")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = random.Random(0)
    model = labkit.load(dtype="fp32", weights="plain", backend="reference")
    known: set[str] = set()
    train, held_out = read(options.data, "train", known), read(options.data, "held-out", set())
    path = options.out / "checkpoint.safetensors"
    state: dict[str, Any] = {"steps": 0, "tokens": 0, "seconds": 0.0}
    if path.is_file():
        saved = load_file(path)
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
        token_ids = saved["head.token_ids"]
    else:
        saved, token_ids = None, frequent_ids(train)
    head = DraftHead(model.config, token_ids)
    trainer = Trainer(model, head)
    if saved is None:
        trainer.begin(train)
    if saved is not None:
        head.load_state_dict({n.removeprefix("head."): t for n, t in saved.items() if n.startswith("head.")})
        for i, parameter in enumerate(trainer.parameters):
            moments = {key: saved[f"adam.{i}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            trainer.optimizer.state[parameter] = moments
    own_words = {i for s in train for i in s.ids[s.n_prompt :].tolist()}
    print(
        f"{len(train)} sequences, {sum(len(s.ids) for s in train):,} tokens, {len(own_words)} ids in answers",
        flush=True,
    )

    def keep() -> None:
        moments = {
            f"adam.{i}.{key}": trainer.optimizer.state[p][key]
            for i, p in enumerate(trainer.parameters)
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        tensors = {f"head.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()} | moments
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"state": json.dumps(state)})
        part.replace(path)

    began = last = time.monotonic()
    queue: list[Sequence] = []
    recent: list[float] = []
    while time.monotonic() - began < 60 * options.minutes:
        if not queue:
            train += read(options.data, "train", known)
            queue = rng.sample(train, len(train))
        chosen: list[Sequence] = []
        while queue and sum(len(s.ids) - s.first for s in chosen) < BATCH_TOKENS:
            chosen.append(queue.pop())
        batch = trainer.batch(chosen)
        left = 1 - (time.monotonic() - began) / (60 * options.minutes)
        rate = PEAK_RATE * min(1.0, (state["steps"] + 1) / WARM_STEPS) * max(0.05, min(1.0, 1.4 * left))
        recent.append(trainer.step(batch, rate, own=state["steps"] % 2 == 1 and state["steps"] > 200))
        state["steps"] += 1
        state["tokens"] += len(batch.hidden)
        if state["steps"] % 20 == 0:
            seconds = state["seconds"] + time.monotonic() - began
            with (options.out / "curve.csv").open("a", newline="") as file:
                csv.writer(file).writerow(
                    [state["steps"], state["tokens"], f"{sum(recent) / len(recent):.4f}", f"{seconds:.0f}"]
                )
            print(f"step {state['steps']}: loss {sum(recent) / len(recent):.4f}, {seconds:.0f} s", flush=True)
            recent = []
        if time.monotonic() - last > CHECKPOINT_S:
            last = time.monotonic()
            keep()
    state["seconds"] += time.monotonic() - began
    if options.minutes:
        keep()
    by_kind = acceptance(trainer, held_out)
    trained_on = Counter(s.kind for s in train)
    record = {
        "tokens_of_answers": sum(len(s.ids) - s.n_prompt for s in train),
        "tokens": sum(len(s.ids) for s in train),
        "sequences_by_kind": dict(sorted(trained_on.items())),
        "tokens_trained_on": state["tokens"],
        "steps": state["steps"],
        "seconds": round(state["seconds"]),
        "held_out_acceptance_by_depth": {k: [round(x, 3) for x in v] for k, v in by_kind.items()},
        "held_out_acceptance": {k: round(v, 3) for k, v in grouped(by_kind).items()},
    }
    print(json.dumps(record, indent=1), flush=True)
    (options.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    target = {
        "name": model.name,
        "d_model": model.config.d_model,
        "fingerprint": fingerprint(embeddings(model.transformer, None)),
    }
    save(head, options.out / HEAD_FILE, record, target)


if __name__ == "__main__":
    main()
