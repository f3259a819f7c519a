"""Who waits, who runs, and how much room there is: what a scheduler sees and may change. No tensors here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from labkit.serving.request import Request


class Room(Protocol):
    """What the queues ask of an engine: its cache, and how a request's place in it is opened and given up."""

    cache: Any

    def open(self, sequence: Any) -> int: ...

    def release(self, sequence: Any) -> None: ...


class Queues:
    """``waiting`` and ``running`` requests of one engine, whose cache has room for ``max_running`` of them."""

    def __init__(self, engine: Room, max_running: int) -> None:
        self.engine, self.max_running = engine, max_running
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.served_tokens: dict[str, int] = defaultdict(int)
        """By user: what a fair order goes by (a virtual token counter, arXiv 2401.00588)."""
        self.n_preemptions = 0

    # --- what there is --------------------------------------------------------------------------------

    @property
    def n_free_places(self) -> int:
        return self.max_running - len(self.running)

    @property
    def n_free_blocks(self) -> int | None:
        """None where the cache has no blocks: every place then has room for a sequence at its longest."""
        allocator = getattr(self.engine.cache, "allocator", None)
        return None if allocator is None else allocator.n_free

    def n_unseen(self, request: Request) -> int:
        """Tokens of a running request that the cache lacks: 1 while it decodes."""
        return len(request.sequence.ids) - self.engine.cache.n_tokens(request.request_id)

    def n_blocks_for(self, request: Request, n_tokens: int) -> int:
        """Blocks that ``n_tokens`` more of a request would take."""
        cache = self.engine.cache
        if self.n_free_blocks is None:
            return 0
        total = cache.n_tokens(request.request_id) + n_tokens
        return max(0, -(-total // cache.block_size) - len(cache.block_ids(request.request_id)))

    def fits(self, n_blocks: int) -> bool:
        free = self.n_free_blocks
        return free is None or n_blocks <= free

    # --- what a scheduler may do ----------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Give a waiting request a place, and what the cache holds of its beginning already."""
        self.waiting.remove(request)
        n_shared = self.engine.open(request.sequence)
        if not request.n_preempted:
            request.n_shared = n_shared
        request.state = "running"
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's place and blocks away. It goes back to the queue and is computed again later, its
        answer so far included (recompute: cheaper than to keep, since a prompt goes through the model at once)."""
        self.engine.release(request.sequence)
        self.running.remove(request)
        request.state = "waiting"
        request.n_preempted += 1
        self.n_preemptions += 1
        self.waiting.append(request)

    def put(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request has ended, wherever it was: its blocks are free again."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.engine.release(request.sequence)
        request.state = "finished"

    def order(self, key: Callable[[Request], Any] | None = None) -> list[Request]:
        """The waiting ones, next first."""
        return sorted(self.waiting, key=key or (lambda request: request.rank))

    def fair_key(self, request: Request) -> tuple[Any, ...]:
        """Among equal priorities, the user who was served least is next."""
        priority, arrived_s, request_id = request.rank
        return priority, self.served_tokens[request.user], arrived_s, request_id

    def count_served(self, request: Request, n_tokens: int) -> None:
        self.served_tokens[request.user] += n_tokens
