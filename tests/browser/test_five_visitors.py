"""Five visitors at once on one Voila: each asks the one engine and gets its answer, and a sixth is told kindly."""

from __future__ import annotations

import re

import pytest

from labkit import launch
from labkit.serving.remote import ENGINE_VARIABLE
from tests.browser.board_page import WIDE
from tests.browser.jupyter_servers import TOKEN, serve
from tests.serving.conftest import _one_thread, _reading, model  # noqa: F401 - fixtures
from tests.serving.test_http import KEY, service, url  # noqa: F401 - fixtures

N_VISITORS = 5


@pytest.fixture
def hall(tmp_path, url, monkeypatch):  # noqa: F811
    """A Voila with room for five, beside an engine that takes two at a time."""
    monkeypatch.setenv(ENGINE_VARIABLE, url)
    monkeypatch.setenv("LABKIT_API_KEY", KEY)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    demo = launch.notebook_path(launch.SHARED_DEMO)
    (folder / demo.name).write_text(demo.read_text(encoding="utf-8"), encoding="utf-8")
    command = launch.voila_command(folder, open_browser=False, max_visitors=N_VISITORS)
    with serve("voila", [*command, f"--Voila.token={TOKEN}"], tmp_path) as server:
        yield server


def test_five_visitors_share_one_engine_and_a_sixth_is_refused_politely(new_page, hall, service, model, strays):  # noqa: F811
    address = hall.url(launch.SHARED_DEMO)
    pages = [new_page(WIDE) for _ in range(N_VISITORS)]
    for page in pages:  # all of them are on their way before the first is there
        page.goto(address, wait_until="commit")
    for page in pages:
        page.locator(".lk-panel").wait_for()
    kernels = {re.findall('"kernelId": "([^"]+)"', page.content())[0] for page in pages}
    assert len(kernels) == N_VISITORS

    sixth = new_page(WIDE)
    answer = sixth.goto(address)
    assert answer.status == 503
    assert "This demo is full" in f"{answer.status_text} {sixth.content()}"
    sixth.context.close()

    n_before = len(service.requests)
    for n, page in enumerate(pages):
        page.get_by_label("Your question").fill(f"I am visitor {n}")
        page.get_by_label("Your question").blur()
        page.get_by_role("button", name="Run", exact=True).click()
    for page in pages:
        page.locator(".labkit-status[data-state=done], .labkit-status[data-state=error]").wait_for()
        said = page.locator(".lk-panel").inner_text()
        assert page.locator(".labkit-status").get_attribute("data-state") == "done", said
        assert "The first came after" in said
    asked = list(service.requests)[n_before:]
    read = "".join(model.tokenizer.decode(each.sequence.ids[: each.sequence.n_prompt]) for each in asked)
    assert sorted(n for n in range(N_VISITORS) if f"I am visitor {n}" in read) == list(range(N_VISITORS))
    for page in pages:
        page.context.close()
    assert strays == [], "not even the refusal asks another machine"
