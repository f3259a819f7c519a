"""Install labkit from this folder, without a network: python3 install.py [FOLDER]"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent


def check() -> None:
    """Raises SystemExit on a machine that these wheels are not for."""
    made_for = json.loads((HERE / "made_for.json").read_text(encoding="utf-8"))
    here = {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": ".".join(map(str, sys.version_info[:2])),
    }
    if here != made_for:
        want, got = (f"{m['system']} on {m['machine']} with Python {m['python']}" for m in (made_for, here))
        raise SystemExit(f"These wheels are for {want}; this is {got}. Ask for a folder that was made for it.")


def install(target: Path, *pip_options: str) -> Path:
    """A virtual environment in ``target`` with labkit from the wheels, and the notebooks beside it; its Python."""
    venv.create(target / ".venv", with_pip=True)
    python = target / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [str(python), "-m", "pip", "install", "--no-index", "--find-links", str(HERE / "wheels"), "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *pip_options, "labkit[jupyter]"], check=True)
    shutil.copytree(HERE / "notebooks", target / "notebooks", dirs_exist_ok=True)
    return python


def prepare_command(python: Path) -> list[str]:
    """What brings the model and compiles the kernels for this processor."""
    (model,) = (HERE / "model").iterdir()
    return [str(python), "-m", "labkit.cli", "prepare", "--from", str(model)]


def main() -> None:
    check()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path.home() / "labkit").absolute()
    print(f"Installing into {target} (some minutes; nothing is fetched)")
    python = install(target)
    subprocess.run(prepare_command(python), check=True)
    print(f"Done. To start:  cd {target}  and then  {python.relative_to(target)} -m labkit.cli lab")


if __name__ == "__main__":
    main()
