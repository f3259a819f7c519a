"""``labkit serve``: one model behind OpenAI's HTTP API, for any client that speaks it."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

import typer


def serve(
    model: Annotated[str, typer.Option(help="A name, a Hugging Face id, a folder, or a .gguf file.")] = (
        "smollm2-135m-instruct"
    ),
    host: Annotated[str, typer.Option(help="Where to listen; any other than this machine needs an API key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port.")] = 8000,
    scheduler: Annotated[str, typer.Option(help="See labkit components scheduler.")] = "chunked-prefill",
    max_requests: Annotated[int, typer.Option(help="Requests that run together.")] = 8,
    token_budget: Annotated[int, typer.Option(help="Tokens in one step (chunked-prefill).")] = 128,
    max_slowdown: Annotated[
        float, typer.Option(help="How much longer a step with prompts may take (chunked-prefill); 0: by the budget.")
    ] = 0.0,
    cache: Annotated[str, typer.Option(help="How keys and values are kept: see labkit components kv_cache.")] = "paged",
    block_size: Annotated[
        int, typer.Option(help="Tokens in a block (paged): 8 wastes least on short texts, 32 reads fastest.")
    ] = 16,
    capacity: Annotated[int, typer.Option(help="Tokens that prompt and answer may come to together.")] = 2048,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused with 429.")] = 100,
    weights: Annotated[str | None, typer.Option(help="How weights are held: see labkit components weights.")] = None,
    dtype: Annotated[str, typer.Option(help="What the model computes in: auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    backend: Annotated[str, typer.Option(help="Whose kernels run: see labkit components backend.")] = "auto",
    api_key: Annotated[
        str | None, typer.Option(envvar="LABKIT_API_KEY", help="What clients must send as their API key.")
    ] = None,
) -> None:
    """Serve a model to any client of OpenAI's API: /v1/completions, /v1/chat/completions, /metrics."""
    if not _stays_here(host) and not api_key:
        raise ValueError(
            f"--host {host} lets other machines in, and there is no API key: set LABKIT_API_KEY, or leave --host out."
        )
    try:
        import uvicorn

        from labkit.serving.http import build_app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install 'labkit[serve]' installs what the server needs") from error
    import labkit
    from labkit import registry
    from labkit.serving import Service

    labkit.components("scheduler")  # so that all of them are registered
    component, _ = registry.find("scheduler", scheduler)
    kind, _ = registry.find("kv_cache", cache)
    blocks = kind.config(block_size=block_size) if kind.name == "paged" and kind.config is not None else cache
    registry.find("kv_cache", blocks)
    settings: dict[str, Any] = {"max_requests": max_requests}
    names = {option.name for option in component.info.options}
    if "token_budget" in names:
        settings |= {"token_budget": token_budget, "max_slowdown": max_slowdown}
    assert component.config is not None
    loaded = labkit.load(model, dtype=dtype, device=device, weights=weights, backend=backend)
    with Service(
        loaded,
        scheduler=component.config(**settings),
        kv_cache=blocks,
        capacity_tokens=capacity,
        max_waiting=max_waiting,
    ) as service:
        print(f"{loaded} at http://{host}:{port}/v1 as {loaded.name!r}, {scheduler} (Ctrl-C ends it)", flush=True)
        app = build_app(service, model_name=loaded.name, api_key=api_key)
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2)


def _stays_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
