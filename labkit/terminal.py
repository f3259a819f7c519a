"""What a run looks like in a terminal: the text as it comes, then where its time went."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from labkit.doctor import Finding
    from labkit.kernels.cpu.compilation import Compilation
    from labkit.perf.trace import Trace
    from labkit.pipeline import Run

BAR_WIDTH = 14
STAGES = ("prefill", "decode")


def stream_text(run: Run, out: TextIO) -> bool:
    """Write a run's text as it comes. Returns False when the reader interrupted it (Ctrl-C); the run then stops."""
    finished = True
    try:
        for piece in run:
            out.write(piece)
            out.flush()
    except KeyboardInterrupt:
        run.stop()
        finished = False
    out.write("\n")
    out.flush()
    return finished


def wait_for(fast: Compilation) -> None:
    """Until the fast path is compiled, with a bar where somebody may be watching."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if fast.ready(timeout_s=0.5):
        return
    text = TextColumn("Compiling for this processor (once, a minute)")
    with Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console(stderr=True)) as bar:
        task = bar.add_task("", total=fast.n_functions)
        while fast.state == "compiling":
            fast.ready(timeout_s=0.2)
            bar.update(task, completed=fast.n_compiled)


def phase_table(trace: Trace) -> Table:
    """One row a phase: its milliseconds in prefill and in decode, and its share of the wall clock as a bar.

    The last rows are what no phase was charged with, and the sum, which is the wall clock.
    """
    from rich import box
    from rich.table import Table

    total = trace.phases
    stages = {stage: trace.stage_phases(stage) for stage in STAGES}
    table = Table(title="Where the time went", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("phase", no_wrap=True)
    for name in (*STAGES, "total"):
        table.add_column(f"{name} ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR_WIDTH)

    def row(name: str, values_s: list[float], style: str = "") -> None:
        share = values_s[-1] / trace.wall_s if trace.wall_s else 0.0
        bar = "█" * round(share * BAR_WIDTH)
        table.add_row(name, *(f"{value * 1e3:,.1f}" for value in values_s), f"{share:.1%}", bar, style=style)

    for name, seconds in total.items():
        row(name, [*(stages[stage].get(name, 0.0) for stage in STAGES), seconds])
    rest = [trace.stage_s(stage) - sum(stages[stage].values()) for stage in STAGES]
    row("(in no phase)", [*rest, trace.wall_s - sum(total.values())], style="dim")
    table.add_section()
    row("wall clock", [*(trace.stage_s(stage) for stage in STAGES), trace.wall_s])
    return table


def summary_line(trace: Trace, finish_reason: str) -> str:
    """Tokens, TTFT, ITL and rates in one line; what does not exist (no token came) is left out.

    >>> from labkit.perf.trace import Trace
    >>> summary_line(Trace((), (), 0.5, n_prompt_tokens=3), "cancelled")
    '3 prompt tokens, 0 generated (cancelled)'
    """
    figures = trace.summary()
    parts = [f"{trace.n_prompt_tokens} prompt tokens, {trace.n_tokens} generated ({finish_reason})"]
    if figures["ttft_ms"] is not None:
        parts.append(f"TTFT {figures['ttft_ms']:.0f} ms")
    if figures["itl_median_ms"] is not None:
        parts.append(f"ITL median {figures['itl_median_ms']:.1f} ms, p95 {figures['itl_p95_ms']:.1f} ms")
        if (figures["tokens_per_round"] or 1.0) > 1.0:
            parts.append(f"{figures['tokens_per_round']:.2f} tokens every {figures['round_median_ms']:.1f} ms")
        if figures["decode_tok_s"] is not None:
            parts.append(f"decode {figures['decode_tok_s']:.1f} tok/s")
    return " · ".join(parts)


def components_table(kind: str, infos: list[Any]) -> Table:
    """The components of one kind: name, summary, options with their ranges, and why one cannot be chosen here."""
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = f"[bold]{kind}[/]", "left"
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for info in infos:
        lines = [escape(info.summary), *(f"[dim]{escape(_option_text(option))}[/]" for option in info.options)]
        if info.unavailable is not None:
            lines.append(f"[yellow]not available here: {escape(info.unavailable)}[/]")
        table.add_row(escape(info.name), "\n".join(lines))
    return table


def findings_table(findings: list[Finding]) -> Table:
    """``labkit doctor``'s report: each check, its state in a word and a colour, what was found and the remedy."""
    from rich.markup import escape
    from rich.table import Table

    words = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]fail[/]"}
    table = Table(title=f"labkit {metadata.version('labkit')} on {platform.platform(terse=True)}", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do about it", overflow="fold")
    for finding in findings:
        text = escape(finding.found) + (f"\n[bold]→[/] {escape(finding.remedy)}" if finding.remedy else "")
        table.add_row(finding.check, words[finding.status], text)
    return table


def console(*, stderr: bool = False) -> Console:
    """A rich console; on stderr for what is not the command's result: `labkit generate ... > file` keeps the text."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _option_text(option: Any) -> str:
    text = f"{option.name}={option.default}"
    if option.choices:
        text += f" ({', '.join(map(str, option.choices))})"
    elif option.low is not None or option.high is not None:
        text += f" ({'' if option.low is None else option.low} to {'' if option.high is None else option.high})"
    return f"{text}: {option.help}" if option.help else text
