"""Stands in for pip: behaves as FAKE_PIP says, so that no test needs a network.

FAKE_PIP: a file to deliver, "offline", "full", "broken", or "slow" (writes a little, then hangs).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--dest") + 1])
behaviour = os.environ["FAKE_PIP"]
with open(os.environ["FAKE_PIP_CALLS"], "a") as calls:
    calls.write(f"{os.getpid()}\n")
if behaviour == "offline":
    print("WARNING: Retrying after connection broken by 'NewConnectionError(...)'")
    sys.exit("ERROR: No matching distribution found")
if behaviour == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if behaviour == "broken":
    sys.exit("ERROR: something else")
if behaviour == "slow":
    (folder / "half.tmp").write_bytes(bytes(1000))
    time.sleep(60)
shutil.copy(behaviour, folder)
