"""Where this lab is published: one setting, from which every badge, link and set-up cell is made.

`make badges REPO=owner/name` writes it here, into the notebooks and into the README. While it is empty no page shows a
link that would lead nowhere.
"""

from __future__ import annotations

REPOSITORY = ""
"""owner/name on GitHub; "" while it is not published."""


def colab_url(notebook: str, repository: str = REPOSITORY) -> str:
    """Opens ``notebook`` ("06_kv_cache.ipynb") in Colab; "" while the lab is not published."""
    return f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{notebook}" if repository else ""


def binder_url(notebook: str, repository: str = REPOSITORY) -> str:
    """Opens ``notebook`` in JupyterLab on Binder; "" while the lab is not published."""
    return f"https://mybinder.org/v2/gh/{repository}/main?urlpath=lab/tree/notebooks/{notebook}" if repository else ""


def setup_lines(repository: str = REPOSITORY) -> str:
    """How every notebook begins: labkit is installed only where it is missing, and PyTorch never (pip keeps the one it
    finds). Not published yet: a missing labkit says what to do."""
    if not repository:
        return (
            "import importlib.util\n"
            "\n"
            'if importlib.util.find_spec("labkit") is None:\n'
            '    raise ModuleNotFoundError("labkit is not in this kernel. In a terminal, in its folder: make lab")\n'
        )
    return (
        "import importlib.util\n"
        "import subprocess\n"
        "import sys\n"
        "\n"
        'if importlib.util.find_spec("labkit") is None:  # on Colab: once a session; its PyTorch stays as it is\n'
        f'    source = "labkit[lab] @ git+https://github.com/{repository}"\n'
        '    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)\n'
    )
