"""Record the runs that pages show before the reader's own: ``data/recorded/*.json``, with machine, date and load.

python benchmarks/recorded.py                    # all of them; some minutes
python benchmarks/recorded.py race batching      # these only

Each is a real run of the very panel that shows it, with its controls as they come. Record them on a machine that does
nothing else; on a busy one they say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.perf.busy import BusyWatch
from labkit.ui import lesson
from labkit.ui.experiment import Experiment
from labkit.ui.panels import batching, cache_toggle, race, roofline
from labkit.ui.panels.switchboard import Switchboard, said_before
from labkit.ui.recorded import completion_data, keep

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recorded"
LIMIT_S = 600


def experiment(panel: Experiment) -> dict[str, Any]:
    """What the panel drew its figure from."""
    panel.run_button.click()
    result = panel.wait(LIMIT_S)
    assert result is not None, "the run was stopped"
    assert result.raw is not None, "this panel keeps nothing to draw from"
    return result.raw


def board(prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """One run of the switchboard, the second: the first wakes what sleeps."""
    panel = Switchboard(prompt=prompt, max_new_tokens=max_new_tokens)
    for _ in range(2):
        panel.run_button.click()
        completion = panel.wait(LIMIT_S)
    return {"prompt": said_before(panel.switches.read()), "run": completion_data(completion)}


RECORDED: dict[str, Callable[[], dict[str, Any]]] = {
    "switchboard-first": lambda: board("first", 96),
    "switchboard-story": lambda: board("story", 32),
    "cache-toggle": lambda: experiment(cache_toggle.TogglePanel(lesson.setup(weights="plain"))),
    "race": lambda: experiment(race.panel()),
    "roofline": lambda: experiment(roofline.panel(lesson.setup())),
    "roofline-plain": lambda: experiment(roofline.panel(lesson.setup(weights="plain"))),
    "batching": lambda: experiment(batching.panel(lesson.setup())),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RECORDED, []], help="which; without a name all of them")
    for name in parser.parse_args().names or RECORDED:
        with BusyWatch() as watch:
            data = RECORDED[name]()
        path = keep(FOLDER, name, data, busy_share=watch.share)
        print(f"{name}: {path.stat().st_size / 1e3:.0f} kB, others took {watch.share:.0%} of the cores")


if __name__ == "__main__":
    main()
