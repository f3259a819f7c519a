"""One browser for the session, a JupyterLab and a Voila; no page gets anywhere but to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from labkit import launch
from tests.browser.board_page import SCREENSHOTS, WIDE, Board, run_all
from tests.browser.jupyter_servers import TOKEN, Server, serve, write_notebooks

HERE = Path(__file__).resolve().parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
LOAD_MS = 400_000
"""A cold kernel imports torch and loads a model; on a busy machine that takes its time."""


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).is_file():
            fetch_browser()
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield chromium
        chromium.close()


def fetch_browser():
    """Playwright's own Chromium, into the user's cache folder: it needs no root. Skips, or fails in CI, when it cannot
    be had."""
    fetched = subprocess.run(
        [sys.executable, "-m", "playwright", "install", "chromium"], capture_output=True, text=True
    )
    if fetched.returncode:
        lines = fetched.stderr.strip().splitlines() or ["no reason given"]
        said = next((line for line in lines if "Error" in line), lines[-1])
        message = (
            f"no Chromium here (looked for {', '.join(NAMES)}; CHROMIUM=/path/to/it names another), and "
            f"`playwright install chromium` failed: {said}"
        )
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    write_notebooks(root / "notebooks", launch.notebook_path(launch.DEMO_NOTEBOOK))
    SCREENSHOTS.mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def lab(folder) -> Iterator[Server]:
    command = launch.lab_command(folder / "notebooks" / "two_panels.ipynb", open_browser=False)
    own = [f"--IdentityProvider.token={TOKEN}", "--LabApp.expose_app_in_browser=True"]
    with serve("lab", [*command, *own], folder) as server:
        yield server


@pytest.fixture(scope="session")
def voila(folder) -> Iterator[Server]:
    command = launch.voila_command(folder / "notebooks", open_browser=False)
    with serve("voila", [*command, f"--Voila.token={TOKEN}"], folder) as server:
        yield server


@pytest.fixture(scope="session")
def strays() -> list[str]:
    """Every request that would have left this machine."""
    return []


@pytest.fixture(scope="session")
def new_page(browser, strays):
    """A fresh page that reaches loopback only."""

    def guard(route):
        if urlsplit(route.request.url).hostname in ("127.0.0.1", "localhost"):
            route.continue_()
        else:
            strays.append(route.request.url)
            route.abort()

    def make(viewport=WIDE, dark=False):
        context = browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light")
        context.route("**/*", guard)
        page = context.new_page()
        page.set_default_timeout(LOAD_MS)
        return page

    return make


@pytest.fixture(scope="module", params=["lab", "voila"])
def page(request, new_page):
    """The two-panel notebook, run, in each of the two front ends."""
    server = request.getfixturevalue(request.param)
    page = new_page()
    page.goto(server.url("two_panels.ipynb"))
    if request.param == "lab":
        run_all(page)
    page.locator(".lk-panel").nth(1).wait_for()
    yield page
    page.context.close()


@pytest.fixture
def boards(page) -> tuple[Board, Board]:
    """The page's two panels, at rest."""
    both = Board(page, 0), Board(page, 1)
    for board in both:
        board.rest()
    return both
