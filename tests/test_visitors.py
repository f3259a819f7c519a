"""A Voila demo with visitors: six at once are all shown, one too many is told so, and who leaves frees a kernel."""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import launch

sys.path.insert(0, str(Path(__file__).parent / "browser"))
from jupyter_servers import TOKEN, serve, write_notebook

LIMIT = 6
CODE = "import time\ntime.sleep(0.1)\nprint('shown' + '-to-all')"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("voila", reason="Voila is an extra (labkit[jupyter])")
    folder = tmp_path_factory.mktemp("voila")
    write_notebook(folder / "notebooks" / "small.ipynb", CODE)
    (folder / "notebooks" / "private.png").write_bytes(b"private")
    command = launch.voila_command(folder / "notebooks", open_browser=False, max_visitors=LIMIT)
    own = [f"--Voila.token={TOKEN}", "--progressive_rendering=False"]  # so that outputs stand in the page
    with serve("voila", [*(part for part in command if "progressive" not in part), *own], folder) as server:
        yield server


def visit(server) -> tuple[int, str]:
    """A page as a browser gets it, without the connection that an open one keeps: the visitor has left."""
    try:
        with urllib.request.urlopen(server.url("small.ipynb"), timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, f"{error.reason} {error.read().decode()}"


def test_six_at_once_one_too_many_and_all_gone(server):
    with ThreadPoolExecutor(LIMIT) as visitors:
        pages = list(visitors.map(visit, [server] * LIMIT))
    assert [status for status, _ in pages] == [200] * LIMIT
    assert all("shown-to-all" in page for _, page in pages)
    status, page = visit(server)
    assert status == 503
    assert "This demo is full" in page
    ids = [re.findall('"kernelId": "([^"]+)"', page)[0] for _, page in pages]
    assert len(set(ids)) == LIMIT
    open_pages = [connect(server, kernel_id) for kernel_id in ids]
    for page in open_pages[1:]:
        page.close()  # without a word to Voila: what a browser does whose farewell is refused
    deadline = time.monotonic() + 240
    while ended(server, ids) != set(ids[1:]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert ended(server, ids) == set(ids[1:])  # an open page keeps its kernel
    open_pages[0].close()


def ended(server, ids) -> set[str]:
    log = server.log.read_text(encoding="utf-8")
    return {kernel_id for kernel_id in ids if f"Kernel shutdown: {kernel_id}" in log}


def connect(server, kernel_id: str):
    """The connection that an open page holds."""
    import websocket  # jupyter_server's own dependency

    address = f"ws://127.0.0.1:{server.port}/api/kernels/{kernel_id}/channels?token={TOKEN}"
    return websocket.create_connection(address, timeout=60)


@pytest.mark.parametrize("token", ["", f"?token={TOKEN}"])
def test_files_beside_the_notebook_are_not_served(server, token):
    for path in ("voila/files/private.png", "voila/files/small.ipynb"):
        with pytest.raises(urllib.error.HTTPError, match=r"40[34]"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{path}{token}", timeout=60)


def test_without_the_token_no_kernel_is_reached(server):
    from websocket import WebSocketBadStatusException, create_connection

    with pytest.raises(WebSocketBadStatusException, match="403"):
        create_connection(f"ws://127.0.0.1:{server.port}/api/kernels/{uuid.uuid4()}/channels", timeout=60)


@pytest.mark.parametrize(("limit", "free", "n_let_in"), [(6, 1, 6), (0, 3.5, 3)])
def test_those_who_come_at_the_same_moment_are_counted(monkeypatch, limit, free, n_let_in):
    visitors = pytest.importorskip("labkit.visitors", reason="Voila is an extra (labkit[jupyter])")

    async def start(manager, **options):
        await asyncio.sleep(0.01)
        return "a kernel"

    async def all_at_once(manager):
        return await asyncio.gather(*(manager.start_kernel() for _ in range(7)), return_exceptions=True)

    memory = SimpleNamespace(available=int(free * visitors.VISITOR_BYTES))
    monkeypatch.setattr(visitors.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(visitors.AsyncMappingKernelManager, "start_kernel", start)
    monkeypatch.setenv(launch.VISITORS_VARIABLE, str(limit))
    assert asyncio.run(all_at_once(visitors.VisitorKernels())).count("a kernel") == n_let_in


def test_no_more_than_free_memory_holds(monkeypatch):
    visitors = pytest.importorskip("labkit.visitors", reason="Voila is an extra (labkit[jupyter])")
    from tornado.web import HTTPError

    monkeypatch.setenv(launch.VISITORS_VARIABLE, "0")  # another test may have set it for a server of its own
    manager = visitors.VisitorKernels()
    monkeypatch.setattr(visitors, "VISITOR_BYTES", 1 << 60)
    with pytest.raises(HTTPError, match="one more was refused"):
        asyncio.run(manager.start_kernel())
