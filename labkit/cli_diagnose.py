"""``labkit diagnose``: an address, or a recording, to a verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def diagnose(
    target: Annotated[
        str,
        typer.Argument(help="A server's address; or a recording: a file, or - for what is pasted on standard input."),
    ],
    model: Annotated[str | None, typer.Option(help="Which of the server's models; its first one otherwise.")] = None,
    dialect: Annotated[
        str, typer.Option(help="auto, openai-chat, openai-completions, tgi, triton or sglang.")
    ] = "auto",
    api_key: Annotated[str | None, typer.Option(envvar="LABKIT_API_KEY", help="Sent as a bearer token.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Take any TLS certificate.")] = False,
    prompt_tokens: Annotated[int, typer.Option(help="The prompt that matters to you, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="The answer that matters to you, in tokens.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Users at once.")] = 4,
    ttft_ms: Annotated[float, typer.Option(help="Longer to the first token is too long.")] = 450.0,
    tpot_ms: Annotated[float, typer.Option(help="Longer for each token after it is too long.")] = 40.0,
    budget: Annotated[str, typer.Option(help="How much is sent: small, normal or thorough.")] = "normal",
    save: Annotated[
        list[Path] | None,
        typer.Option(help="Write the report here: .html for people, .json for a replay. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before sending to another machine.")] = False,
) -> None:
    """Say what makes a server slow: to start, or to stream, and what would help."""
    from labkit.diagnose import Targets, Workload, probe, replay
    from labkit.diagnose.probes import plan

    targets = Targets(ttft_ms / 1e3, tpot_ms / 1e3)
    for path in save or []:
        if not path.parent.is_dir() or path.is_dir():
            raise FileNotFoundError(f"cannot write {path}: {path.parent} is not a folder to write a file in.")
    if "://" not in target:
        text = sys.stdin.read() if target == "-" else None
        report = replay(text if text is not None else _file(target), targets=targets)
        return _show(report, save or [], as_json)
    workload = Workload(prompt_tokens, new_tokens, concurrency)
    load = plan(workload, budget=budget).describe(target)
    if dry_run:
        print(load)
        return None
    if not yes and not _agreed(target, load):
        raise typer.Exit(1)
    report = probe(
        target,
        model=model,
        dialect=dialect,
        api_key=api_key,
        verify=not insecure,
        workload=workload,
        targets=targets,
        budget=budget,
        announce=lambda words: print(words, file=sys.stderr),
        progress=_progress,
    )
    return _show(report, save or [], as_json)


def _file(target: str) -> Path:
    path = Path(target)
    if not path.is_file():
        raise FileNotFoundError(
            f"{target!r} is neither an address (http://127.0.0.1:8000) nor a file with a recording: check it."
        )
    return path


def _agreed(url: str, load: str) -> bool:
    """Ask a person before another machine is loaded; this machine and scripts are not asked."""
    from labkit.diagnose.endpoint import is_loopback

    if is_loopback(url) or not sys.stdin.isatty():
        return True
    return typer.confirm(f"{load} Send them?", err=True)


def _progress(fraction: float, words: str) -> None:
    print(f"{fraction:4.0%}  {words}", file=sys.stderr)


def _show(report: Any, save: list[Path], as_json: bool) -> None:
    print(report.to_json() if as_json else report)
    for path in save:
        print(f"Written to {report.save(path)}.", file=sys.stderr)
