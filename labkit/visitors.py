"""Visitors of a Voila page: a kernel each, refused politely beyond what the machine holds, ended when nobody looks.

Voila asks the browser to say goodbye when a page closes, and many browsers do not, or are not let. An open page holds a
connection, and that is what counts here: a kernel that has lost its last one is ended after ``GONE_S``. Loaded by Voila
by this class's name (``launch.voila_command``).
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.web import HTTPError

from labkit.launch import GONE_S, VISITOR_BYTES, VISITORS_VARIABLE

GROWING_S = 60.0
"""How long a new kernel may take to load a model, and with it the memory that it was let in for."""


class VisitorKernels(AsyncMappingKernelManager):
    """Voila's kernels, no more than fit, for as long as somebody looks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.max_visitors = int(os.environ.get(VISITORS_VARIABLE, "0"))
        """Most kernels at once; 0: as many as free memory holds."""
        self._came_s: list[float] = []
        """When the last visitors came."""
        self._n_coming = 0
        """Those whose kernel is being started, and not listed yet."""
        self._left_s: dict[str, float] = {}
        """When a kernel lost its last connection."""

    async def start_kernel(self, **options: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A kernel for one more page. Raises HTTPError 503, with a sentence for the visitor, when there is no room."""
        now_s = time.monotonic()
        self._came_s = [came_s for came_s in self._came_s if now_s - came_s < GROWING_S]
        n_here = len(self.list_kernel_ids()) + self._n_coming
        free = psutil.virtual_memory().available - VISITOR_BYTES * len(self._came_s)  # which these have yet to take
        if (self.max_visitors and n_here >= self.max_visitors) or (not self.max_visitors and free < VISITOR_BYTES):
            raise HTTPError(
                503,
                log_message=f"{n_here} visitors, {free / 1e6:.0f} MB free: one more was refused",
                reason=f"This demo is full ({n_here} of {n_here} places taken). Please come back in a minute",
            )
        self._came_s.append(now_s)
        self._n_coming += 1
        try:
            return await super().start_kernel(**options)
        finally:
            self._n_coming -= 1

    def notify_disconnect(self, kernel_id: str) -> None:
        """A page has closed, was loaded again, or lost its network."""
        super().notify_disconnect(kernel_id)
        self._left_s[kernel_id] = time.monotonic()

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """End a kernel whose visitor has gone, busy or not; one that nobody has seen yet only after a long while."""
        alone_s = time.monotonic() - self._left_s.get(kernel_id, time.monotonic())
        if alone_s > GONE_S and not self._kernel_connections.get(kernel_id, 0):
            self._left_s.pop(kernel_id, None)
            await self.shutdown_kernel(kernel_id)
        else:
            await super().cull_kernel_if_idle(kernel_id)
