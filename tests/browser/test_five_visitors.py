"""Five people open the demo at once: each gets a page, a kernel and an answer of their own."""

from __future__ import annotations

from tests.browser.board_page import Board

N_VISITORS = 5


def test_five_visitors_at_once_all_get_their_answer(new_page, voila, strays):
    pages = [new_page() for _ in range(N_VISITORS)]
    for page in pages:
        page.goto(voila.url("demo_pipeline.ipynb"), wait_until="commit")
    boards = []
    for page in pages:
        page.locator(".lk-panel").wait_for()
        boards.append(Board(page, 0))
    for board in boards:
        board.rest()
        board.run()
    texts = [board.wait("done", "error")["text"] for board in boards]
    assert texts[0]
    assert set(texts) == {texts[0]}, "the same prompt, greedy: the same answer for everybody"
    assert strays == []
    for page in pages:
        page.context.close()
