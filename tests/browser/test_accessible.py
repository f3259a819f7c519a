"""axe-core on the pages: no finding that it calls serious or critical, light and dark. Loaded from disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

AXE = Path(__file__).resolve().parent / "node_modules/axe-core/axe.min.js"
AXE_SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
"""Of version 4.10.3, which package.json pins."""
SERIOUS = {"serious", "critical"}

FINDINGS = """async where => (await axe.run(where, {resultTypes: ['violations']})).violations.map(
  found => ({impact: found.impact, rule: found.id, help: found.help,
             where: found.nodes.slice(0, 3).map(node => node.html.slice(0, 160))}))"""


@pytest.fixture(scope="session")
def axe() -> str:
    if not AXE.is_file():
        message = f"{AXE} is missing: `make browser` fetches it with npm"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    code = AXE.read_bytes()
    assert hashlib.sha256(code).hexdigest() == AXE_SHA256
    return code.decode()


def serious_findings(page, axe, where):
    page.evaluate(axe)
    return [found for found in page.evaluate(FINDINGS, where) if found["impact"] in SERIOUS]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("notebook", ["demo_pipeline.ipynb", "small_panels.ipynb"])
def test_a_page_has_no_serious_finding(new_page, voila, axe, notebook, dark):
    page = new_page(dark=dark)
    page.goto(voila.url(notebook))
    page.locator(".lk-panel").last.wait_for()
    page.locator(".noUi-handle[aria-label]").first.wait_for()
    assert page.evaluate("() => document.body.dataset.jpThemeLight") == ("false" if dark else "true"), (
        "as the system is"
    )
    assert serious_findings(page, axe, "#rendered_cells") == []
    page.context.close()


def titles(page) -> list[str]:
    return [link.inner_text().split("\n")[0] for link in page.get_by_role("main").get_by_role("link").all()]


def test_the_page_of_demos(new_page, voila, axe):
    page = new_page(dark=True)
    page.goto(f"http://127.0.0.1:{voila.port}/?{voila.url('x').split('?')[1]}")
    assert titles(page) == ["Switchboard"], "what is not in the folder is not listed, and nothing but demos is"
    assert serious_findings(page, axe, "body") == []
    page.get_by_role("link", name="简体中文").click()
    assert titles(page) == ["开关面板"]
    page.get_by_role("main").get_by_role("link").first.click()
    page.locator(".lk-panel").wait_for()
    page.get_by_role("button", name="运行", exact=True).first.wait_for()
    page.context.close()
