"""Diagnose: what an unknown server does, from outside.

    print(labkit.diagnose.probe("http://127.0.0.1:8000"))      measure a server
    print(labkit.diagnose.replay(Path("recording.json")))      judge what was recorded, without any network

Read ``wire`` (bytes to events), ``stream`` (events to tokens), ``client``, ``probes``, then ``verdict``; ``quirks`` is
the mock server whose truth is known.
"""

from labkit.diagnose.examine import probe, probe_target, replay
from labkit.diagnose.probes import Workload
from labkit.diagnose.report import Report
from labkit.diagnose.verdict import Targets

__all__ = ["Report", "Targets", "Workload", "probe", "probe_target", "replay"]
