"""The folded solutions of all notebooks pass their own checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
FOLDED = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


def solutions() -> list:
    found = []
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                blocks = FOLDED.findall("".join(cell["source"]))
                found += [pytest.param(code, id=f"{path.stem}-{at}") for at, code in enumerate(blocks)]
    return found


@pytest.mark.parametrize("code", solutions())
def test_the_solution_passes(code, monkeypatch):
    assert "lesson.check(" in code, "a solution ends by checking itself"
    monkeypatch.setenv("LABKIT_TEST", "solution")
    exec(compile(code, "<solution>", "exec"), {"__name__": "solution"})
