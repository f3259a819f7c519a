"""A switchboard as its reader sees it: found by role and words, read from the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RUN_S = 180
SCREENSHOTS = Path(__file__).resolve().parent / "screenshots"
WIDE, NARROW = {"width": 1400, "height": 1200}, {"width": 480, "height": 1000}

LOOK = """panel => ({
  state: panel.querySelector('.labkit-status').dataset.state,
  status: panel.querySelector('.lk-status-text').textContent,
  text: panel.querySelector('.lk-answer').textContent,
  tiles: [...panel.querySelectorAll('.lk-value')].map(node => node.textContent),
  bars: [...panel.querySelectorAll('.lk-bar')].map(
    bar => [...bar.children].map(piece => [piece.dataset.key, Math.round(piece.getBoundingClientRect().width)])),
  labels: [...panel.querySelectorAll('.lk-bar')].map(bar => bar.getAttribute('aria-label')),
})"""

WATCH = f"""(panel, limit) => new Promise((resolve, reject) => {{
  const look = {LOOK}, seen = new Map(), start = performance.now();
  const watch = () => {{
    const now = look(panel);
    if (['done', 'stopped', 'error'].includes(now.state)) return resolve([...seen.values()]);
    if (performance.now() - start > limit) return reject(new Error('still ' + now.state + ': ' + now.status));
    if (now.state === 'running' && now.bars[1]) seen.set(JSON.stringify([now.bars, now.tiles, now.text]), now);
    setTimeout(watch, 20);
  }};
  watch();
}})"""

STOP = """panel => new Promise((resolve, reject) => {
  const status = panel.querySelector('.labkit-status');
  const stop = [...panel.querySelectorAll('button')].find(button => button.textContent.trim() === 'Stop');
  const start = performance.now();
  const look = () => {
    if (status.dataset.state === 'stopped') resolve(performance.now() - start);
    else if (performance.now() - start > 20000) reject(new Error('still ' + status.dataset.state));
    else requestAnimationFrame(look);
  };
  stop.click();
  look();
})"""


class Board:
    def __init__(self, page: Any, idx: int) -> None:
        self.page = page
        self.panel = page.locator(".lk-panel").nth(idx)

    def button(self, words: str) -> Any:
        return self.panel.get_by_role("button", name=words, exact=True)

    def look(self) -> dict[str, Any]:
        """What the panel shows at this moment, read in one go."""
        return self.panel.evaluate(LOOK)

    def run(self) -> None:
        """Press Run and see it taken up."""
        before = self.look()["status"]
        self.button("Run").click()
        deadline = time.monotonic() + 20
        while (seen := self.look())["state"] not in ("running", "loading") and seen["status"] == before:
            assert time.monotonic() < deadline, f"Run does nothing: {seen['status']}"
            self.page.wait_for_timeout(20)

    def stop_ms(self) -> float:
        """Press Stop; milliseconds in the page from the click to the word 'stopped'."""
        return self.panel.evaluate(STOP)

    def wait(self, *states: str, timeout_s: float = RUN_S) -> dict[str, Any]:
        """Until the status is one of ``states``."""
        deadline = time.monotonic() + timeout_s
        while (seen := self.look())["state"] not in states:
            assert time.monotonic() < deadline, f"still {seen['state']!r} ({seen['status']}) after {timeout_s} s"
            self.page.wait_for_timeout(50)
        return seen

    def wait_for_tokens(self) -> dict[str, Any]:
        """Until the run is decoding and has written something."""
        deadline = time.monotonic() + RUN_S
        while not (seen := self.look())["status"].startswith("Decoding") or not seen["text"]:
            assert seen["state"] in ("idle", "loading", "running"), seen
            assert time.monotonic() < deadline, f"no token after {RUN_S} s: {seen}"
            self.page.wait_for_timeout(50)
        return seen

    def rest(self) -> None:
        """Stop what runs and wait until nothing moves."""
        if self.look()["state"] == "running":
            self.button("Stop").click()
        self.wait("idle", "done", "stopped", "error")

    def watch(self) -> list[dict[str, Any]]:
        """Watch from within the page until the run ends; the distinct pictures seen while it ran."""
        return self.panel.evaluate(WATCH, RUN_S * 1000)


def run_all(page: Any) -> None:
    """JupyterLab: wait for the notebook of the page's address and run all its cells."""
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    name = urlsplit(page.url).path.rsplit("/", 1)[-1]
    page.wait_for_function("name => window.jupyterapp?.shell.currentWidget?.context?.path.endsWith(name)", arg=name)
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.sessionContext?.session?.kernel != null")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
