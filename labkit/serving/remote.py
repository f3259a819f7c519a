"""A server in the place of a pipeline: the same ``run`` and ``generate``, timed from here, with what it reveals.

    remote = labkit.Remote("http://127.0.0.1:8000")
    print(remote.generate("The capital of France is", max_new_tokens=8).trace.summary())

Any server that ``labkit.diagnose`` can speak to: vLLM (one machine or a cluster behind Ray), SGLang, TensorRT-LLM,
llama.cpp, TGI, Triton, ``labkit serve``. A trace's ``meta["timed_by"]`` says that the clock was the client's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from labkit.decoding import StopStrings
from labkit.diagnose.client import Client, Limits, Live
from labkit.diagnose.dialects import Ask
from labkit.diagnose.endpoint import Endpoint, ServerError, find_endpoint
from labkit.diagnose.stream import Stream, read_stream
from labkit.perf.timer import PHASES, StepRecord
from labkit.perf.trace import Trace
from labkit.pipeline import as_sampling
from labkit.run import Completion, Run
from labkit.sequence import check_max_new_tokens

ENGINE_VARIABLE = "LABKIT_ENGINE"
"""The address of an engine that all visitors of a demo share."""
FINISH = {"stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "abort": "cancelled"}


class Remote:
    """``url``: a server's address, its ``/v1``, or the full path of a stream. ``model``: for a server with several.

    Raises ValueError for what is no address, ``diagnose.ServerError`` when nobody there speaks a known dialect."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        sampling: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.endpoint = find_endpoint(url, model=model, api_key=api_key)
        self.sampling, self.timeout_s = as_sampling(sampling), timeout_s

    def run(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Run:
        """Ask the server; iterate the returned ``Run`` for text as it comes. As ``Pipeline.run``. ``ignore_eos`` is
        dropped where a server refuses it."""
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("the prompt is empty: give the model at least one character to continue.")
        check_max_new_tokens(max_new_tokens)
        StopStrings(stop)
        endpoint = self._endpoint_for(chat)
        extra: dict[str, Any] = {}
        if endpoint.dialect.startswith("openai"):
            extra = {"seed": seed, **({"stop": list(stop)} if stop else {}), **self._shape()}
        elif stop:
            raise ValueError(f"stop strings are sent in OpenAI's dialect; this server speaks {endpoint.dialect}.")
        ask = Ask(prompt, max_new_tokens, temperature=self.sampling.temperature, extra=extra, ignore_eos=ignore_eos)
        client = Client(endpoint, limits=Limits(max_s=self.timeout_s, idle_s=self.timeout_s))
        answer = _Answer(client, client.stream(ask), endpoint)
        threading.Thread(target=answer.read, name="labkit-remote", daemon=True).start()
        return Run(answer, trace=answer.trace)

    def generate(self, prompt: str, **options: Any) -> Completion:
        """The same, waiting for the end. Raises ``diagnose.ServerError`` when the server did not answer."""
        return self.run(prompt, **options).result()

    def _endpoint_for(self, chat: bool) -> Endpoint:
        """Text goes to /completions, a chat to /chat/completions, where the server has both."""
        found = self.endpoint
        if not found.dialect.startswith("openai"):
            return found
        stem = found.url.removesuffix("/completions").removesuffix("/chat")
        path, dialect = ("/chat/completions", "openai-chat") if chat else ("/completions", "openai-completions")
        return replace(found, url=stem + path, dialect=dialect)

    def _shape(self) -> dict[str, Any]:
        """What of the sampling differs from the protocol's defaults; vLLM's names for what OpenAI has none for."""
        named = {name: getattr(self.sampling, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
        defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        return {name: value for name, value in named.items() if value != defaults[name]}


class _Stop(threading.Event):
    """Wakes the thread that waits for the server, too."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def set(self) -> None:
        super().set()
        self._live.stop()


class _Answer:
    """One answer on its way: what ``Run`` reads."""

    def __init__(self, client: Client, live: Live, endpoint: Endpoint) -> None:
        self._client, self._live, self._endpoint = client, live, endpoint
        self.stop_event: threading.Event = _Stop(live)
        self.ended = threading.Event()
        self.pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.text: list[str] = []
        self.completion: Completion | None = None
        self.error: BaseException | None = None

    def read(self) -> None:
        try:
            for delta in self._live:
                if piece := delta.reasoning + delta.text:
                    self.text.append(piece)
                    self.pieces.put(piece)
            self._conclude(read_stream(self._live.recording))
        except BaseException as error:  # noqa: BLE001 - re-raised to whoever reads the run
            self.error = error
        finally:
            self._client.close()
            self.ended.set()
            self.pieces.put(None)

    def _conclude(self, stream: Stream) -> None:
        stopped = self.stop_event.is_set()
        if stream.error and not stopped:
            raise ServerError(stream.error)
        said = str(stream.finish_reason or "")
        reason = "cancelled" if stopped else FINISH.get(said, "length" if said == "length" else said or "stop")
        trace = trace_of(stream, self._endpoint, finish_reason=reason)
        self.completion = Completion("".join(self.text), [], reason, trace)

    def trace(self) -> Trace:
        """The trace so far."""
        return trace_of(read_stream(self._live.recording), self._endpoint)


def trace_of(stream: Stream, endpoint: Endpoint, **meta: Any) -> Trace:
    """A recorded stream as a run's trace, on the client's clock.

    Phases are what the server says (``prefill_attention_ms`` and so on, from ``labkit serve``); where it gives a whole
    stage only, the time stays in no phase. Decode's are shared out over its tokens by the time that each took."""
    token_s = [token.made_s for token in stream.tokens]
    timings, usage = stream.timings, stream.usage
    n_prompt = usage.prompt_tokens
    if n_prompt is None:
        n_prompt = int(timings.get("prompt_n", 0) + timings.get("cache_n", 0))
    phases: dict[str, dict[str, float]] = {
        stage: {name: timings[f"{stage}_{name}_ms"] / 1e3 for name in PHASES if timings.get(f"{stage}_{name}_ms")}
        for stage in ("prefill", "decode")
    }
    end_s = stream.recording.end_s
    first_s = token_s[0] if token_s else end_s
    steps = [StepRecord("prefill", 0.0, first_s, n_prompt, phases["prefill"])]
    streamed_s = (token_s[-1] - token_s[0]) if token_s else 0.0
    for before, after in pairwise(token_s):
        share = (after - before) / streamed_s if streamed_s else 0.0
        spread = {name: seconds * share for name, seconds in phases["decode"].items()}
        steps.append(StepRecord("decode", before, after, 1, spread))
    about = {
        "model": endpoint.model or "",
        "server": endpoint.server,
        "url": endpoint.url,
        "dialect": endpoint.dialect,
        "timed_by": "the client",
        "tokens_counted_by": stream.counted_by,
        "server_timings": timings,
    }
    return Trace(tuple(steps), tuple(token_s), end_s, n_prompt, about | meta)
