"""JupyterLab around a panel: keys stay in the panel; a kernel that was restarted is not waited for in silence."""

from __future__ import annotations

import pytest

from tests.browser.board_page import run_all

CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"


@pytest.fixture(scope="module")
def small(new_page, lab):
    page = new_page()
    page.goto(lab.url("small_panels.ipynb"))
    run_all(page)
    page.locator(".lk-panel").nth(2).wait_for()
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
    )
    yield page
    page.context.close()


def test_arrow_keys_and_letters_belong_to_the_control(small):
    before = small.evaluate(CELLS)
    radios = small.locator(".lk-panel").first.locator("input[type=radio]")
    radios.first.check()
    small.keyboard.press("ArrowDown")
    assert radios.nth(1).is_checked()
    menu = small.locator(".lk-panel select").first
    menu.focus()
    small.keyboard.press("ArrowDown")
    assert menu.input_value() == "20"
    small.keyboard.press("d")
    small.keyboard.press("d")  # twice d deletes a cell, outside
    small.keyboard.press("b")  # a new cell below
    assert small.evaluate(CELLS) == before
    assert menu.evaluate("menu => document.activeElement === menu")


def test_after_a_restart_in_mid_run_the_panel_says_what_to_do(small):
    panel = small.locator(".lk-panel").nth(1)
    panel.get_by_role("button", name="Run", exact=True).click()
    panel.get_by_text("counting").wait_for()
    small.evaluate("() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }")
    panel.get_by_text("run the page's cells again, from the top").wait_for()
