"""Write the repository's address wherever it belongs: make badges REPO=owner/name (REPO= takes it out again)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labkit.ui.repository import REPOSITORY, binder_url, colab_url, setup_lines  # noqa: E402

START, END = "<!-- badges: make badges REPO=owner/name -->", "<!-- end of badges -->"
FIRST = "00_start_here.ipynb"


def main(repository: str) -> None:
    """Raises SystemExit for an address that is none."""
    if repository and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+", repository):
        raise SystemExit(f"REPO={repository!r} is no address on GitHub: give owner/name, such as REPO=ada/labkit.")
    setting = ROOT / "labkit" / "ui" / "repository.py"
    text = setting.read_text(encoding="utf-8")
    setting.write_text(re.sub(r'^REPOSITORY = ".*"$', f'REPOSITORY = "{repository}"', text, flags=re.M), "utf-8")
    for name in ("README.md", "README.zh-CN.md"):
        if (ROOT / name).is_file():
            _readme(ROOT / name, repository)
    for path in sorted((ROOT / "notebooks").rglob("[!.]*.ipynb")):
        _notebook(path, repository)
    print(f"Badges and set-up cells now say {repository or 'nothing: not published'}.")


def _readme(path: Path, repository: str) -> None:
    badges = ""
    if repository:
        badges = (
            f"[![Launch on Binder](https://mybinder.org/badge_logo.svg)]({binder_url(FIRST, repository)})\n"
            "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
            f"({colab_url(FIRST, repository)})\n"
        )
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(f"{START}.*?{END}", f"{START}\n{badges}{END}", text, flags=re.S), encoding="utf-8")


def _notebook(path: Path, repository: str) -> None:
    """The first code cell begins with the set-up lines, whichever stood there before."""
    book = json.loads(path.read_text(encoding="utf-8"))
    cell = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    code = "".join(cell["source"])
    before = re.match(r"import importlib\.util\n.*?\n    (?:raise|subprocess)[^\n]*\n", code, flags=re.S)
    rest = code[before.end() :].lstrip("\n") if before else code
    cell["source"] = f"{setup_lines(repository)}\n{rest}".splitlines(keepends=True)
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY)
