"""Take the pictures that the README and the lessons' first pages show.

    python -m tests.browser.docs_pictures switchboard    # three runs (with a cache, without, with one again)
    python -m tests.browser.docs_pictures recorded       # what panels show before the first run; nothing is run

Take the first on a machine that does nothing else: the figures in it are real. The second shows ``data/recorded`` as it
is, each with its machine and date.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from labkit import launch
from tests.browser.board_page import Board
from tests.browser.conftest import FLAGS, NAMES
from tests.browser.jupyter_servers import TOKEN, serve, write_notebook

ROOT = Path(__file__).resolve().parents[2]
DOCS, PICTURES_FOLDER, TRANSLATED = ROOT / "docs", ROOT / "notebooks" / "pictures", ROOT / "notebooks" / "zh-CN"
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


RECORDED = """
from IPython.display import display
from labkit.ui import lesson
from labkit.ui.panels import batching, cache_toggle, roofline
from labkit.ui.panels.switchboard import Switchboard

lab = lesson.setup(weights="plain")
boards = [Switchboard(prompt=prompt, preload=False) for prompt in ("first", "story")]
display(*boards, cache_toggle.TogglePanel(lab), roofline.panel(lab), batching.panel(lab))
"""
PICTURES = ("00_start_here", "04_pipeline_timed", "06_kv_cache", "07_prefill_vs_decode", "11_paging_and_batching")
"""In the panels' order: the lesson that shows each."""
SHOWN = ".lk-note.is-recorded, .lk-run, .lk-figure"
WIDTH_PX, HEIGHT_PX, EDGE_PX = 1000, 6000, 12


def take_recorded(browser: Any, url: str) -> None:
    """Of each panel the part that says where it was recorded, and its figure."""
    page = browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX})
    page.set_default_timeout(LOAD_MS)
    page.goto(url)
    panels = page.locator(".lk-panel")
    panels.nth(len(PICTURES) - 1).locator(".lk-figure .main-svg").first.wait_for()
    page.wait_for_timeout(3000)
    PICTURES_FOLDER.mkdir(exist_ok=True)
    for at, name in enumerate(PICTURES):
        boxes = [box for each in panels.nth(at).locator(SHOWN).all() if (box := each.bounding_box())]
        left, top = (min(box[side] for box in boxes) - EDGE_PX for side in ("x", "y"))
        right = max(box["x"] + box["width"] for box in boxes) + EDGE_PX
        bottom = max(box["y"] + box["height"] for box in boxes) + EDGE_PX
        clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        picture = PICTURES_FOLDER / f"{name}.png"
        page.screenshot(path=picture, clip=clip)
        print(f"{picture} ({picture.stat().st_size / 1e3:.0f} kB)")
        if (TRANSLATED / f"{name}.ipynb").is_file():  # Jupyter looks beside the notebook, Voila in the root's folder
            shutil.copy(picture, TRANSLATED / "pictures")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["switchboard", "recorded"])
    what = parser.parse_args().what
    chromium = next(filter(None, map(shutil.which, NAMES)))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_notebook(root / "notebooks" / "board.ipynb", BOARD if what == "switchboard" else RECORDED.strip())
        command = [*launch.voila_command(root / "notebooks", open_browser=False), f"--Voila.token={TOKEN}"]
        with serve("voila", command, root) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
            url = server.url("board.ipynb", theme="light")
            take(browser, url, DOCS / "switchboard.png") if what == "switchboard" else take_recorded(browser, url)
            browser.close()


if __name__ == "__main__":
    main()
