"""A kernel interrupt in the middle of a run: the run stops, the next one works."""

from __future__ import annotations

import time

import pytest
from jupyter_client.manager import KernelManager

BEGIN = """
from labkit.ui.panels.switchboard import Switchboard
board = Switchboard(prompt="story", max_new_tokens=500)
"""
NEXT = """
board.switches.length.value = 3
board.run_button.click()
print("reason:", board.wait(200).finish_reason, board.status.state)
"""


@pytest.fixture
def kernel():
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def printed(client, code: str) -> str:
    texts = []
    reply = client.execute_interactive(
        code, timeout=240, output_hook=lambda message: texts.append(message["content"].get("text", ""))
    )
    assert reply["content"]["status"] == "ok", reply["content"].get("traceback", "")[-3:]
    return "".join(texts)


def test_an_interrupted_run_leaves_the_next_one_intact(kernel):
    manager, client = kernel
    printed(client, BEGIN)
    request = client.execute("board.run_button.click()\nboard.wait(240)")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:  # until the page has been told of some text: the run is under way
        message = client.get_iopub_msg(timeout=120)
        state = message["content"].get("data", {}).get("state", {}) if message["msg_type"] == "comm_msg" else {}
        if state.get("state", {}) and isinstance(state["state"], dict) and state["state"].get("text"):
            break
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != request:
        pass
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert "reason: length done" in printed(client, NEXT)
