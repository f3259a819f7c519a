"""A class without a network: wheels, model and notebooks in one folder, to be copied to a stick (make offline-bundle).

The wheels are for this operating system, processor and Python: run it once for each kind of machine in the class.
What is given on the command line goes to pip, such as the line that pytorch.org gives for a CPU-only torch.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labkit.checkpoint.fetch import fetch_default  # noqa: E402

BUNDLE = ROOT / "dist" / "labkit-offline"
READ_ME = """labkit without a network

    python3 install.py             makes the folder "labkit" in your home folder (about 3 GB) and installs into it
    python3 install.py FOLDER      makes FOLDER instead

It needs {system} on {machine}, and Python {python}. Nothing is fetched: wheels/ holds every package, model/ the model.
The last line that it prints says how to start.
"""


def build(folder: Path, pip_options: list[str]) -> None:
    """Fill ``folder``, which is emptied first. Raises CalledProcessError where pip cannot get a wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(folder / "wheels"), "-c", "constraints.txt"]
    subprocess.run([*pip, *pip_options, ".[jupyter]"], cwd=ROOT, check=True)
    shutil.copy(fetch_default(verify=True), folder / "model")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    shutil.copy(ROOT / ".ci" / "offline_install.py", folder / "install.py")
    made_for = {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": ".".join(map(str, sys.version_info[:2])),
    }
    (folder / "made_for.json").write_text(json.dumps(made_for), encoding="utf-8")
    (folder / "README.txt").write_text(READ_ME.format(**made_for), encoding="utf-8")


if __name__ == "__main__":
    build(BUNDLE, sys.argv[1:])
    n_bytes = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    print(f"{BUNDLE}: {n_bytes / 1e9:.2f} GB. Copy the folder to a stick; README.txt in it says what to do there.")
