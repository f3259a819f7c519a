"""``labkit.diagnose.probe(url)``: find the server, say what is sent, send it, judge. ``replay`` needs no server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.diagnose import pasted, server_side
from labkit.diagnose.client import Client, Limits
from labkit.diagnose.endpoint import Endpoint, ServerError, find_endpoint, without_chat
from labkit.diagnose.measured import measure, measure_alone
from labkit.diagnose.probes import Plan, Progress, Run, Target, Workload, carry_out, plan
from labkit.diagnose.recording import Recording
from labkit.diagnose.report import Report
from labkit.diagnose.stream import read_stream
from labkit.diagnose.verdict import Targets, judge


def probe(
    url: str,
    *,
    model: str | None = None,
    dialect: str = "auto",
    api_key: str | None = None,
    verify: bool = True,
    workload: Workload | None = None,
    targets: Targets | None = None,
    budget: str = "normal",
    announce: Callable[[str], None] = print,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Measure the server at ``url`` and say what makes it slow. Print the result.

    workload   the prompt, answer and number of users that the verdict is about
    targets    when a wait is too long
    budget     small, normal or thorough: how much is sent; ``announce`` gets the sentence before anything is

    Sends only to ``url``. Raises ValueError for a bad address or budget, ServerError (a ConnectionError) when no
    server answers there. What a server does wrong while it is measured becomes part of the verdict.
    """
    planned = plan(workload, budget=budget)
    endpoint = find_endpoint(url, dialect=dialect, model=model, api_key=api_key, verify=verify)
    limits = Limits(max_s=planned.budget.max_s, idle_s=min(60.0, planned.budget.max_s))
    before = server_side.read(endpoint)

    def sent(endpoint: Endpoint) -> Run:
        announce(planned.describe(endpoint.url))
        with Client(endpoint, limits=limits) as client:
            return carry_out(client, planned, progress=progress, should_stop=should_stop)

    run = sent(endpoint)
    if dialect == "auto" and _has_no_chat(run) and (plain := without_chat(url, endpoint)):
        announce(f"{endpoint.url} has no chat: its model has no chat template. Asked again without one.")
        endpoint = plain
        run = sent(endpoint)
        run.notes.append("Measured by /v1/completions, since the server's model has no chat template.")
    if not run.streams:
        raise ServerError("nothing was sent: it was stopped before the first request.")
    if run.streams[0].error and not any(stream.tokens for stream in run.streams):
        raise ServerError(str(run.streams[0].error))
    server = server_side.between(before, server_side.read(endpoint)) if before else {}
    return conclude(run, planned, targets, where=endpoint.url, server=server, who=_who(endpoint))


def _has_no_chat(run: Run) -> bool:
    """Whether the first answer says that the model has no chat template (as vLLM does, with 400)."""
    first = run.streams[0] if run.streams else None
    return first is not None and not first.tokens and "chat template" in (first.error or "").lower()


def probe_target(
    target: Target,
    *,
    workload: Workload | None = None,
    targets: Targets | None = None,
    budget: str = "normal",
    seed: int | None = None,
    where: str = "a simulated server",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """The same for anything that can be asked, such as ``SimulatedServer``."""
    planned = plan(workload, budget=budget, seed=seed)
    run = carry_out(target, planned, progress=progress, should_stop=should_stop)
    return conclude(run, planned, targets, where=where)


def conclude(
    run: Run,
    planned: Plan,
    targets: Targets | None,
    *,
    where: str,
    server: dict[str, float] | None = None,
    who: str = "",
) -> Report:
    seen, targets = measure(run, planned.workload), targets or Targets()
    findings = judge(seen, targets)
    return Report(
        where, who, findings, seen, targets, tuple(run.streams), tuple(run.notes), planned.describe(where), server or {}
    )


def replay(recordings: str | Path | Sequence[Recording], *, targets: Targets | None = None) -> Report:
    """A verdict from recordings, without any network: a file, a pasted text, or recordings at hand.

    Recordings that ``labkit diagnose --save`` wrote are judged as the probes they were; any others as they are.
    Raises ValueError when there is no stream in them.
    """
    if isinstance(recordings, Path):
        recordings = pasted.read_file(recordings)
    elif isinstance(recordings, str):
        recordings = pasted.read_text(recordings)
    streams = [read_stream(recording) for recording in recordings]
    where = streams[0].recording.url if streams else ""
    run = Run(streams)
    probes = {stream.recording.meta.get("probe") for stream in streams if stream.tokens}
    if "length" in probes:
        workload = _workload_of(run)
        seen = measure(run, workload)
    else:
        seen = measure_alone(streams)
    targets = targets or Targets()
    notes = tuple(note for stream in streams for note in stream.notes)
    return Report(where or "a recording", "", judge(seen, targets), seen, targets, tuple(streams), notes, "")


def _workload_of(run: Run) -> Workload:
    """What the probes of a saved run were planned for."""
    first, loads = run.of("first") or run.of("stream"), run.of("load")
    n_words = first[0].recording.meta["n_words"] if first else Workload().n_prompt_tokens
    levels = sorted({s.recording.meta["concurrency"] for s in loads})
    return Workload(int(n_words), concurrency=int(levels[len(levels) // 2]) if levels else 1)


def _who(endpoint: Endpoint) -> str:
    return " · ".join(part for part in (endpoint.server, endpoint.model or "", endpoint.dialect) if part)
