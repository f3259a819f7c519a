"""JupyterLab and Voila for the tests: the very command lines that labkit uses, on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

TOKEN = "labkit-browser-test"
START_S = 300
BOARDS = """
from IPython.display import display
from labkit.ui.panels.switchboard import Switchboard

first = Switchboard(prompt="first", max_new_tokens=160)
second = Switchboard(prompt="story", max_new_tokens=400)
display(first, second)
"""
"""Both in one cell: JupyterLab takes cells that are out of sight off the page."""
SMALL = """
from IPython.display import display
from labkit.ui import lesson

def count(job, n, by):
    for i in range(n * 10):
        job.progress(i / (n * 10), "counting")
        job.stop_event.wait(0.1)
    return lesson.Result(rows=[{"n": n, "what": "a sentence that is long enough to be given room in its table"}])

answers = ["not far", "as far as the words of an answer go that needs two lines", "far"]
guess = lesson.predict("How far?", choices=answers)
panel = lesson.Experiment("Count", count, {"n": lesson.choice("To", [10, 20, 60]), "by": lesson.slider("By", 1, 9, 1)})
questions = [("Which?", {"this": "Yes.", "that": "No."}, "this")] * 3
display(guess, panel, lesson.quiz(*questions))
display(lesson.table([{"a": 1, "b": "two"}], "A table"), lesson.note("A note with `code`."))
lesson.show_source("labkit.ui.html.size")
"""
"""Every kind of thing that a lesson shows, and no model."""

FIGURE = """
import plotly.graph_objects as go
from labkit.ui import lesson, theme

def draw(job):
    lines = go.Scatter(y=[1, 3, 2], name="predicted: what a formula of many words says of it", showlegend=True)
    bars = go.Bar(y=["a name of several words"], x=[2], orientation="h", name="counted: another long name than that")
    words = "per cent of what is allowed (striped: too much)"
    figure = theme.figure_layout(go.Figure([lines, bars]), x=words, y="per cent")
    return lesson.Result(figure=figure, summary="A line.")

panel = lesson.Experiment("Draw", draw)
display(panel)
panel.run_button.click()
"""
"""A panel with its figure drawn, its words as long as a lesson's."""


@dataclass
class Server:
    kind: str
    port: int
    log: Path

    def url(self, notebook: str, **query: str) -> str:
        page = f"lab/tree/notebooks/{notebook}" if self.kind == "lab" else f"voila/render/{notebook}"
        query |= {"reset": ""} if self.kind == "lab" else {}  # else JupyterLab brings back the notebooks of other tests
        more = "".join(f"&{key.replace('_', '-')}={value}" for key, value in query.items())
        return f"http://127.0.0.1:{self.port}/{page}?token={TOKEN}{more}"


def write_notebook(path: Path, code: str) -> None:
    """A notebook of one code cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path)


def write_notebooks(folder: Path, demo: Path) -> None:
    """Two panels on one page, and a copy of the demo: the browser may save what it likes here."""
    write_notebook(folder / "two_panels.ipynb", BOARDS.strip())
    write_notebook(folder / "small_panels.ipynb", SMALL.strip())
    write_notebook(folder / "figure.ipynb", FIGURE.strip())
    (folder / demo.name).write_text(demo.read_text(encoding="utf-8"), encoding="utf-8")


@contextlib.contextmanager
def serve(kind: str, command: list[str], folder: Path) -> Iterator[Server]:
    """Start ``command``, wait until it answers, and end exactly this process."""
    port = free_port()
    log = folder / f"{kind}.log"
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "LABKIT_TEST": "0",
    }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, f"--port={port}", "--ServerApp.port_retries=0"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
        try:
            wait_until_it_answers(process, port, kind, log)
            yield Server(kind, port, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def wait_until_it_answers(process: subprocess.Popen[bytes], port: int, kind: str, log: Path) -> None:
    path = f"api/status?token={TOKEN}" if kind == "lab" else f"?token={TOKEN}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{kind} ended at once:\n{log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{kind} does not answer after {START_S} s:\n{log.read_text()[-3000:]}")


def n_kernels(server: Server) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/api/kernels?token={TOKEN}", timeout=10) as answer:
        return len(json.load(answer))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
