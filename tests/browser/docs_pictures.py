"""Take the picture of the switchboard that the README shows: ``python -m tests.browser.docs_pictures``.

Voila serves the switchboard alone; three runs (with a cache, without, with one again).
Take it on a machine that does nothing else: the figures in it are real.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from labkit import launch
from tests.browser.board_page import Board
from tests.browser.conftest import FLAGS, NAMES
from tests.browser.jupyter_servers import TOKEN, serve, write_notebook

DOCS = Path(__file__).resolve().parents[2] / "docs"
BOARD = "from labkit.ui.panels.switchboard import Switchboard\n\nSwitchboard(max_new_tokens=64)"
CACHES = ("contiguous", "none", "contiguous")
LOAD_MS = 180_000


def take(browser: Any, url: str, picture: Path) -> None:
    page = browser.new_page(viewport={"width": 1320, "height": 1300})
    page.set_default_timeout(LOAD_MS)
    page.goto(url)
    page.locator(".lk-panel").wait_for()
    board = Board(page, 0)
    board.rest()
    for n_runs, cache in enumerate(CACHES, 1):
        board.panel.get_by_label("KV cache", exact=True).select_option(cache)
        board.run()
        board.wait("done")
        board.panel.locator(f".lk-history tbody tr:nth-child({n_runs})").wait_for()
    board.panel.screenshot(path=picture)
    page.close()
    print(f"{picture} ({picture.stat().st_size / 1e3:.0f} kB)")


def main() -> None:
    chromium = next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_notebook(root / "notebooks" / "board.ipynb", BOARD)
        command = [*launch.voila_command(root / "notebooks", open_browser=False), f"--Voila.token={TOKEN}"]
        with serve("voila", command, root) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
            take(browser, server.url("board.ipynb", theme="light"), DOCS / "switchboard.png")
            browser.close()


if __name__ == "__main__":
    main()
