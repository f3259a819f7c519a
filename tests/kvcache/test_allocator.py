"""No block lost, none shared wrongly: Hypothesis drives the allocator and a whole paged cache against a plain model."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from labkit.kvcache import CacheFull, Paged
from labkit.kvcache.allocator import BlockAllocator, OutOfBlocks, content_key
from labkit.kvcache.paged import PagedCache
from tests.kvcache.drive import layer

N_BLOCKS = 12


class AllocatorMachine(RuleBasedStateMachine):
    """The model: how often each block is referred to, and which key each published block has."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(N_BLOCKS)
        self.references = [0] * N_BLOCKS
        self.keys: dict[int, int] = {}

    def in_use(self) -> list[int]:
        return [block for block, n in enumerate(self.references) if n]

    @rule()
    def allocate(self) -> None:
        if all(self.references):
            with pytest.raises(OutOfBlocks, match="12 blocks"):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        assert self.references[block] == 0, "a block in use was handed out"
        unpublished = [b for b, n in enumerate(self.references) if not n and b not in self.keys]
        assert not unpublished or block in unpublished, "a findable block was taken while a worthless one was free"
        self.references[block] = 1
        self.keys.pop(block, None)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def release(self, data) -> None:
        block = data.draw(st.sampled_from(self.in_use()))
        self.allocator.release(block)
        self.references[block] -= 1

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def share(self, data) -> None:
        block = data.draw(st.sampled_from(self.in_use()))
        self.allocator.share(block)
        self.references[block] += 1

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), key=st.integers(0, 20))
    def publish(self, data, key) -> None:
        block = data.draw(st.sampled_from(self.in_use()))
        self.allocator.publish(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @rule(key=st.integers(0, 20))
    def find_and_share(self, key) -> None:
        block = self.allocator.find(key)
        assert block == next((b for b, k in self.keys.items() if k == key), None)
        if block is not None:
            self.allocator.share(block)
            self.references[block] += 1

    @rule(block=st.integers(0, N_BLOCKS - 1))
    def misuse(self, block) -> None:
        if not self.references[block]:
            with pytest.raises(ValueError, match="released twice"):
                self.allocator.release(block)
            with pytest.raises(ValueError, match="only a block in use"):
                self.allocator.publish(block, "key")
            if block not in self.keys:
                with pytest.raises(ValueError, match="nothing to share"):
                    self.allocator.share(block)

    @invariant()
    def nothing_lost_nothing_shared_wrongly(self) -> None:
        used = self.in_use()
        assert self.allocator.n_used == len(used)
        assert self.allocator.n_free == N_BLOCKS - len(used)
        assert [self.allocator.references(block) for block in range(N_BLOCKS)] == self.references


class CacheMachine(RuleBasedStateMachine):
    """A paged cache whose keys spell out which token stands where; the model is a list of tokens a sequence."""

    CAPACITY, SEQUENCES, SIZE = 40, 4, 8

    def __init__(self) -> None:
        super().__init__()
        config = Paged(block_size=self.SIZE, n_blocks=14)
        sizes = {"capacity_tokens": self.CAPACITY, "n_sequences": self.SEQUENCES}
        self.cache = PagedCache([layer(1, 2)], config=config, **sizes)
        self.texts: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}

    def stored(self, tokens: list[int], first: int) -> torch.Tensor:
        """A key depends on the token, its position and everything before it."""
        rows = [[float(hash(tuple(tokens[: p + 1])) % 65521), float(p)] for p in range(first, len(tokens))]
        return torch.tensor(rows).reshape(-1, 1, 2)

    def write(self, counts: dict[int, list[int]], commit: bool = True) -> bool:
        try:
            self.cache.begin({s: len(new) for s, new in counts.items()})
        except CacheFull:
            return False
        rows = [self.stored(self.texts.get(s, []) + new, len(self.texts.get(s, []))) for s, new in counts.items()]
        self.cache.append(0, k=torch.cat(rows), v=-torch.cat(rows))
        if commit:
            self.cache.commit()
            for s, new in counts.items():
                self.texts[s] = self.texts.get(s, []) + new
        return True

    sequence = st.integers(0, SEQUENCES - 1)
    text = st.lists(st.integers(0, 1), min_size=1, max_size=20)

    @rule(counts=st.dictionaries(sequence, text, min_size=1, max_size=3), commit=st.booleans())
    def step(self, counts, commit) -> None:
        self.write(counts, commit)

    @rule(owner=sequence, text=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def adopt(self, owner, text) -> None:
        if owner in self.texts:
            with pytest.raises(ValueError, match="already has"):
                self.cache.adopt(text, owner)
            return
        n = self.cache.adopt(text, owner)
        assert n < len(text)
        assert n % self.SIZE == 0
        self.texts[owner] = text[:n]
        if not self.write({owner: text[n:]}):
            self.cache.free(owner)
            del self.texts[owner]

    @rule(source=sequence, owner=sequence)
    def fork(self, source, owner) -> None:
        if source in self.texts and owner not in self.texts:
            self.cache.fork(source, owner)
            self.texts[owner] = list(self.texts[source])

    @rule(owner=sequence, share=st.floats(0, 1))
    def truncate(self, owner, share) -> None:
        if owner in self.texts:
            n = int(share * len(self.texts[owner]))
            self.cache.truncate(n, owner)
            del self.texts[owner][n:]

    @rule(owner=sequence)
    def free(self, owner) -> None:
        self.cache.free(owner)
        self.texts.pop(owner, None)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        from labkit.kvcache import Segment

        assert {s: self.cache.n_tokens(s) for s in range(self.SEQUENCES)} == {
            s: len(self.texts.get(s, [])) for s in range(self.SEQUENCES)
        }
        for s, tokens in self.texts.items():
            if tokens:
                k, v, _ = self.cache.dense(0, Segment(s, 0, 0, len(tokens)))
                expected = self.stored(tokens, 0)[:, 0]
                assert torch.equal(k[0], expected)
                assert torch.equal(v[0], -expected)

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        held = [block for s in range(self.SEQUENCES) for block in self.cache.block_ids(s)]
        allocator = self.cache.allocator
        assert [allocator.references(b) for b in range(allocator.n_blocks)] == [
            held.count(b) for b in range(allocator.n_blocks)
        ]
        assert allocator.n_free == allocator.n_blocks - len(set(held))


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=100, **QUIET)  # 10,000 steps
TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=40, **QUIET)


def test_ten_thousand_steps_on_one_allocator():
    """One long life rather than many short ones."""
    rng = random.Random(0)
    allocator, owners = BlockAllocator(50), []
    for step in range(10_000):
        if owners and (rng.random() < 0.48 or not allocator.n_free):
            allocator.release(owners.pop(rng.randrange(len(owners))))
        elif owners and rng.random() < 0.3:
            block = rng.choice(owners)
            allocator.share(block)
            owners.append(block)
        else:
            block = allocator.allocate()
            assert block not in owners
            allocator.publish(block, key=step)
            owners.append(block)
        assert allocator.n_used == len(set(owners))
    for block in owners:
        allocator.release(block)
    assert allocator.n_free == 50


def test_a_key_names_the_tokens_and_all_before_them():
    first = content_key(b"", [1, 2, 3])
    assert content_key(first, [4]) != content_key(content_key(b"", [1, 2, 9]), [4])
    assert content_key(b"", [1, 23]) != content_key(b"", [12, 3])
    assert content_key(b"", [2**40]) == content_key(b"", [2**40])
