"""Light and dark, wide and narrow: readable, nothing sticks out; the pictures are kept for people to look at."""

from __future__ import annotations

import pytest

from tests.browser.board_page import NARROW, SCREENSHOTS, WIDE, Board, run_all

MIN_CONTRAST = 4.5

CONTRAST = """panel => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = css => (css.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const rgba = parse(getComputedStyle(node).backgroundColor);
      if (rgba.length === 3 || rgba[3] > 0.99) return rgba;
    }
    return [255, 255, 255];
  };
  const texts = '.lk-title, .lk-sub, .lk-eyebrow, .widget-label, .lk-value, .lk-unit, .lk-tile-note, .lk-answer,' +
    '.lk-stage-name, .lk-stage-note, .lk-stage-total, .lk-status-text, .lk-key span, select, textarea, td, th';
  const found = {};
  panel.querySelectorAll(texts).forEach(node => {
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = node.className || node.tagName;
    found[name] = Math.min(found[name] || 99, ratio);
  });
  return found;
}"""

STICKS_OUT = """panel => {
  const edge = panel.getBoundingClientRect().right + 1;
  return [...panel.querySelectorAll('*')].filter(node => !node.closest('.lk-scroll') && node.checkVisibility()
    && node.getBoundingClientRect().right > edge).map(node => node.className || node.tagName);
}"""

CUT_OFF = """figure => {
  const box = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('text')].filter(text => {
    const at = text.getBoundingClientRect();
    return at.width && (at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1);
  }).map(text => text.textContent);
}"""
PHONE = {"width": 320, "height": 800}


def check_look(page, name):
    """Both widths: contrast, nothing outside the panel, a picture."""
    for viewport, width in ((WIDE, "wide"), (NARROW, "narrow")):
        page.set_viewport_size(viewport)
        page.wait_for_timeout(400)
        panel = page.locator(".lk-panel").first
        tall = {**viewport, "height": int(panel.bounding_box()["height"]) + 240}
        page.set_viewport_size(tall)
        page.wait_for_timeout(400)
        panel.scroll_into_view_if_needed()
        poor = {what: ratio for what, ratio in panel.evaluate(CONTRAST).items() if ratio < MIN_CONTRAST}
        assert not poor, f"{name}, {width}: too little contrast: {poor}"
        assert panel.evaluate(STICKS_OUT) == [], f"{name}, {width}"
        panel.screenshot(path=SCREENSHOTS / f"{name}-{width}.png")
    page.set_viewport_size(WIDE)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_voila(new_page, voila, strays, theme):
    page = new_page(dark=theme == "dark")
    page.goto(voila.url("demo_pipeline.ipynb", theme=theme))
    page.locator(".lk-panel").wait_for()
    board = Board(page, 0)
    board.rest()
    board.run()
    board.wait("done")
    is_light = page.evaluate("() => document.body.dataset.jpThemeLight")
    assert is_light == ("true" if theme == "light" else "false")
    check_look(page, f"voila-{theme}")
    assert not page.get_by_text("Switchboard(prompt").count(), "Voila shows no source"
    assert strays == []
    page.context.close()


def test_jupyterlab_follows_its_theme(new_page, lab, strays):
    page = new_page()
    page.goto(lab.url("demo_pipeline.ipynb"))
    run_all(page)
    page.locator(".lk-panel").wait_for()
    page.evaluate("() => { window.jupyterapp.shell.collapseLeft(); window.jupyterapp.shell.collapseRight(); }")
    board = Board(page, 0)
    board.rest()
    board.run()
    board.wait("done")
    check_look(page, "lab-light")
    page.evaluate(
        "async () => { await window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'}); }"
    )
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    check_look(page, "lab-dark")
    assert strays == []
    page.context.close()


OVERFLOWS = """() => [...document.querySelectorAll('.jp-RenderedHTMLCommon')].filter(
  node => node.querySelector(':scope > .labkit') && node.scrollWidth > node.clientWidth).length"""


def test_cards_keep_their_right_edge_in_jupyterlab(new_page, lab):
    page = new_page()
    page.goto(lab.url("small_panels.ipynb"))
    run_all(page)
    page.locator(".lk-table").first.wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate(OVERFLOWS) == 0, "wider than its output: cut off at the right"
    page.context.close()


def test_a_figure_stays_whole_when_the_page_changes_its_width(new_page, voila, strays):
    page = new_page()
    page.goto(voila.url("figure.ipynb"))
    lines = page.locator(".lk-figure .scatterlayer")
    lines.wait_for()
    for viewport in (NARROW, WIDE, NARROW, PHONE):
        page.set_viewport_size(viewport)
        page.wait_for_timeout(1500)
        box, below = (
            page.locator(".lk-figure .svg-container").bounding_box(),
            page.get_by_text("A line.").bounding_box(),
        )
        assert box["height"] >= 300
        assert box["width"] <= viewport["width"]
        assert below["y"] >= box["y"] + box["height"] - 1, "the sentence stands over the figure"
        assert page.locator(".lk-figure .svg-container").evaluate(CUT_OFF) == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert strays == []
    page.context.close()
