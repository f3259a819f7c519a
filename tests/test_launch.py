"""The servers that ``labkit lab`` and ``labkit demo`` start: what they are told, and that the settings exist."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from labkit import launch

ROOT = Path(__file__).resolve().parent.parent


def traits_of(class_name: str) -> set[str]:
    """The settings that a class of Jupyter's really has: the oracle for our command lines."""
    modules = {
        "ServerApp": "jupyter_server.serverapp",
        "LabApp": "jupyterlab.labapp",
        "Voila": "voila.app",
        "VoilaConfiguration": "voila.configuration",
        "VoilaExecutor": "voila.execute",
        "MappingKernelManager": "jupyter_server.services.kernels.kernelmanager",
    }
    return set(getattr(import_module(modules[class_name]), class_name).class_trait_names())


@pytest.mark.parametrize("build", [launch.lab_command, launch.voila_command])
def test_servers_listen_on_loopback_with_settings_that_exist(build):
    command = build(ROOT / "notebooks" / "demo_pipeline.ipynb", port=8899, open_browser=False)
    assert command[0] == sys.executable
    assert any(option.endswith(".ip=127.0.0.1") for option in command)
    assert not any("token=" in option.lower() and option.endswith("=") for option in command), "never without a token"
    assert {"--port=8899", "--no-browser"} <= set(command)
    for option in command:
        name = option.removeprefix("--").split("=")[0]
        if "." in name and option.startswith("--"):
            owner, setting = name.split(".")
            assert setting in traits_of(owner), option


def test_voila_is_locked_down():
    command = launch.voila_command(ROOT / "notebooks" / "demo_pipeline.ipynb")
    assert "--VoilaConfiguration.allow_template_override=NO" in command
    assert "--Voila.auto_token=True" in command
    assert "--strip_sources=True" in command
    assert any(option.startswith("--MappingKernelManager.cull_idle_timeout=") for option in command)


def test_the_page_of_demos_holds_the_demos_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    folder = launch.demos_folder()
    (folder / "demo_old.ipynb").write_text("{}")
    shown = {path.name for path in launch.demos_folder().iterdir()}
    there = {path.name for path in (ROOT / "notebooks").glob("demo_*.ipynb")}
    assert shown == there - {launch.SHARED_DEMO}
    assert {path.name for path in launch.demos_folder(with_engine=True).iterdir()} == there
    listing = (launch.VOILA_TEMPLATES / "voila/templates/labkit/tree-lab.html").read_text(encoding="utf-8")
    assert all(f'"{name}"' in listing for name in there), "a demo without a title is not on the page"


@pytest.mark.skipif(os.name != "posix", reason="exec replaces the process on POSIX only")
def test_become_replaces_the_process():
    code = (
        "import sys; from labkit.launch import become; become([sys.executable, '-c', 'import os; print(os.getpid())'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    out, _ = process.communicate(timeout=60)
    assert int(out) == process.pid
