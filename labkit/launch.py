"""The command lines that start JupyterLab and Voila: loopback only, token-protected, no calls home."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from labkit.resources import cache_folder

FIRST_NOTEBOOK = "00_start_here.ipynb"
DEMO_NOTEBOOK = "demo_pipeline.ipynb"
"""The switchboard, the first of the demos."""
SHARED_DEMO = "demo_together.ipynb"
"""The demo that needs an engine beside it (``labkit demo --engine``)."""
CLONE = Path(__file__).resolve().parent.parent
VOILA_TEMPLATES = Path(__file__).resolve().parent / "ui" / "static" / "jupyter"
LAB_SETTINGS = Path(__file__).resolve().parent / "ui" / "static" / "lab_settings"

GONE_S, LOOK_S = 20, 5
"""A Voila kernel whose page has gone is ended after this long, looked at this often: browsers do not always say that a
page was closed. An open page keeps its own, however long it is left alone; on a busy machine it may lose its line for
some seconds, and that is no goodbye."""
UNSEEN_S = 300
"""The same for a kernel that no page was ever connected to: on a busy machine a page takes its time."""
VISITORS_VARIABLE = "LABKIT_MAX_VISITORS"
VISITOR_BYTES = 500_000_000
"""What one visitor's kernel takes with the default model."""
CELL_OUTPUT_S = 90
"""How long Voila waits for what a cell prints. nbclient's 4 s leave pages blank when several are opened at once."""


def notebook_path(name: str) -> Path:
    """``notebooks/<name>`` of the clone labkit runs from, or below the current folder.

    Raises FileNotFoundError that says where it looked.
    """
    roots = (Path.cwd(), Path(__file__).resolve().parent.parent)
    for root in roots:
        path = root / "notebooks" / name
        if path.is_file():
            return path
    looked = " and ".join(str(root / "notebooks") for root in dict.fromkeys(roots))
    raise FileNotFoundError(
        f"the notebook {name} is not in {looked}. The notebooks come with labkit's repository: clone it and run there."
    )


def demos_folder(*, with_engine: bool = False) -> Path:
    """A folder that holds the demos and nothing else, fresh from the clone: what Voila may list and run. The one whose
    visitors share an engine only ``with_engine``.

    Raises FileNotFoundError where there are no notebooks.
    """
    source = notebook_path(DEMO_NOTEBOOK).parent
    folder = cache_folder() / "demos"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(source.glob("demo_*.ipynb")):
        if path.name == SHARED_DEMO and not with_engine:
            continue
        shutil.copyfile(path, folder / path.name)
    return folder


def lab_command(notebook: Path, *, port: int | None = None, open_browser: bool = True) -> list[str]:
    """JupyterLab on ``notebook``, rooted at the folder above ``notebooks/``."""
    _need("jupyterlab")
    command = [
        *(sys.executable, "-m", "jupyterlab", str(notebook)),
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={notebook.parent.parent}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.news_url=None",
        f"--LabApp.app_settings_dir={LAB_SETTINGS}",  # without the question about news
    ]
    if _is_root():
        command.append("--allow-root")  # in a container there may be no other user; the server listens on loopback
    return command + _common(port, open_browser)


def voila_command(
    notebook: Path, *, port: int | None = None, open_browser: bool = True, max_visitors: int = 0
) -> list[str]:
    """Voila on ``notebook``, or on the page of demos for a folder of them: widgets alone, no source, no template from
    the notebook, a kernel for each page while it is open, at most ``max_visitors`` (0: as many as free memory holds).
    """
    _need("voila")
    # Voila's own lab template asks a CDN for two style sheets; labkit's leaves them out, so a page works offline.
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (str(VOILA_TEMPLATES), os.environ.get("JUPYTER_PATH"))))
    if (CLONE / "pyproject.toml").is_file():  # Voila loads ``visitors`` by its name: this clone's
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CLONE), os.environ.get("PYTHONPATH"))))
    os.environ[VISITORS_VARIABLE] = str(max_visitors)
    command = [
        *(sys.executable, "-m", "voila", str(notebook)),
        "--Voila.ip=127.0.0.1",
        "--Voila.auto_token=True",
        "--template=labkit",
        "--progressive_rendering=True",
        "--strip_sources=True",
        "--VoilaConfiguration.allow_template_override=NO",
        "--VoilaConfiguration.file_denylist=.*",  # what lies beside the notebook would be served without the token
        "--VoilaConfiguration.multi_kernel_manager_class=labkit.visitors.VisitorKernels",
        f"--VoilaExecutor.iopub_timeout={CELL_OUTPUT_S}",
        f"--MappingKernelManager.cull_idle_timeout={UNSEEN_S}",
        f"--MappingKernelManager.cull_interval={LOOK_S}",
    ]
    return command + _common(port, open_browser)


def become(command: list[str]) -> int:
    """Run ``command`` in this process's place, so that Ctrl-C reaches it and nothing else; on Windows, wait for it."""
    if os.name == "posix":
        sys.stdout.flush()
        os.execv(command[0], command)
    process = subprocess.Popen(command)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the server got it too, and asks whether to shut down


def _common(port: int | None, open_browser: bool) -> list[str]:
    return ([f"--port={port}"] if port else []) + ([] if open_browser else ["--no-browser"])


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise FileNotFoundError(
            f"{module} is not installed in {sys.prefix}. Run `make lab` in a clone, or pip install 'labkit[jupyter]'."
        )
