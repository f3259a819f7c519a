"""Lesson 11, paging and batching: the same real requests under two schedulers, as a Gantt that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.kvcache import Paged
from labkit.perf.busy import BusyWatch
from labkit.serving import Continuous, Service, Static
from labkit.serving.figures import figures_of, gantt
from labkit.serving.paper import n_steps
from labkit.serving.request import Request
from labkit.ui import findings, theme
from labkit.ui.compare import Comparison
from labkit.ui.controls import slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result
from labkit.ui.words import say, sentences

STATIC, CONTINUOUS = "static", "continuous"
SUBJECTS = ("The sea", "A clock", "The old bridge", "Winter", "A letter", "The market", "My neighbour", "A small boat")
KINDS = {
    "queue": ("waits", theme.GREY, "\\"),
    "prefill": ("prefill", theme.BLUE, "."),
    "decode": ("decode", theme.ORANGE, ""),
    "recompute": ("computed again", theme.PURPLE, "/"),
}


def lengths(n_requests: int, longest: int) -> list[int]:
    """How many tokens each request generates: one long answer in four, the others short."""
    return [longest if n % 4 == 0 else max(2, longest // 6) for n in range(n_requests)]


# --- static against continuous


def serve_all(lab: Any, scheduler: Any, asked: Sequence[tuple[str, int]], watch: Any = None) -> list[Request]:
    """Real requests, all there from the start, served to the end; ``watch(requests, service)`` looks on."""
    longest = max(n for _, n in asked) + 64
    cache = Paged(prefix_sharing=False)
    with Service(lab.model, scheduler=scheduler, kv_cache=cache, capacity_tokens=longest, start=False) as to:
        requests = [to.submit(prompt, max_new_tokens=n, ignore_eos=True) for prompt, n in asked]
        to.start()
        for request in requests:
            while not request.sequence.ended.wait(0.1):
                if watch is not None:
                    watch(requests, to)
            if request.sequence.error is not None:
                raise request.sequence.error
    return requests


def measure(lab: Any, job: Any, *, n_requests: int, longest: int, together: int, turns: int) -> Result:
    """The same requests, static and continuous in turn, each drawn while it runs."""
    asked = [(f"{SUBJECTS[n % len(SUBJECTS)]} was", tokens) for n, tokens in enumerate(lengths(n_requests, longest))]
    policies = {STATIC: Static(max_requests=together), CONTINUOUS: Continuous(max_requests=together)}
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    shown: dict[str, list[dict[str, Any]]] = {}
    served: dict[str, list[Request]] = {}
    job.progress(0.0, say("warming up"))
    serve_all(lab, policies[CONTINUOUS], [("The", 3)] * together)
    with BusyWatch() as busy:
        for turn in range(turns):
            for idx, (name, scheduler) in enumerate(policies.items()):

                def watch(requests: list[Request], to: Service, name: str = name, at: int = 2 * turn + idx) -> None:
                    done = sum(request.sequence.ended.is_set() for request in requests) / len(requests)
                    where = {"turn": at // 2 + 1, "turns": turns, "policy": name}
                    job.progress((at + done) / (2 * turns), say("turn {turn} of {turns}: {policy}", **where))
                    job.show(Result(gantt_figure({**shown, name: _so_far(requests, to.timer.now_s())})))

                served[name] = serve_all(lab, scheduler, asked, watch)
                shown[name] = gantt(served[name])
                seconds[name].append(figures_of(served[name]).wall_s)
    figures = {name: figures_of(requests) for name, requests in served.items()}
    rows = [
        {
            "policy": name,
            "tokens/s": found.tokens_per_s,
            "all done after, s": found.wall_s,
            "TTFT p50, s": found.ttft_s["p50"],
            "TTFT p95, s": found.ttft_s["p95"],
            "TPOT p50, ms": found.tpot_s["p50"] * 1e3,
            "waited in the queue p50, s": found.queue_s["p50"],
        }
        for name, found in figures.items()
    ]
    result = served_result({"seconds": seconds, "busy_share": busy.share, "rows": rows, "shown": shown})
    result.data |= {
        "token_ids": {name: [request.sequence.token_ids for request in served[name]] for name in served},
        "asked": asked,
    }
    return result


def served_result(raw: dict[str, Any]) -> Result:
    """Both policies as Gantts and a table: of requests just served, or of some that were recorded."""
    comparison = Comparison(raw["seconds"], "s", raw["busy_share"])
    data = {"comparison": comparison, "ratio": comparison.medians[0] / comparison.medians[1], "rows": raw["rows"]}
    caption = "The last turn of each, by the requests' own clocks"
    return Result(gantt_figure(raw["shown"]), raw["rows"], comparison.words(), caption, data=data, raw=raw)


def _so_far(requests: Sequence[Request], now_s: float) -> list[dict[str, Any]]:
    """The Gantt of requests under way: who has nothing yet has waited until now."""
    origin = requests[0].arrived_s
    waiting = [
        {"request": r.request_id, "kind": "queue", "start_s": r.arrived_s - origin, "end_s": now_s - origin}
        for r in requests
        if not r.slices
    ]
    return gantt(requests) + waiting


def gantt_figure(shown: dict[str, list[dict[str, Any]]]) -> Any:
    """One lane a request, one picture a policy, above each other on one clock."""
    names = list(shown)
    figure = make_subplots(len(names), 1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=names)
    legend: set[str] = set()
    for row, name in enumerate(names, 1):
        first = min((piece["request"] for piece in shown[name]), default=0)
        for kind, (label, color, pattern) in KINDS.items():
            pieces = [piece for piece in shown[name] if piece["kind"] == kind]
            if not pieces:
                continue
            bar = go.Bar(
                orientation="h",
                name=say(label),
                legendgroup=kind,
                showlegend=kind not in legend,
                y=[piece["request"] - first + 1 for piece in pieces],
                x=[piece["end_s"] - piece["start_s"] for piece in pieces],
                base=[piece["start_s"] for piece in pieces],
                marker={
                    "color": color,
                    "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#16161a", "fgopacity": 0.6},
                    "line": {"width": 0},
                },
                hovertemplate=say("request %{{y}}: {what} %{{x:.2f}} s", what=say(label)) + "<extra></extra>",
            )
            figure.add_trace(bar, row, 1)
            legend.add(kind)
    theme.figure_layout(figure, height=90 + 210 * len(names))
    look = {name: figure.layout.xaxis[name] for name in ("gridcolor", "linecolor", "zerolinecolor", "ticks")}  # type: ignore[attr-defined]
    figure.update_xaxes(**look, automargin=True)
    figure.update_yaxes(**look, automargin=True, autorange="reversed", title_text=say("request"), dtick=2)
    figure.update_xaxes(title_text=say("seconds since they came"), row=len(names), col=1)
    figure.update_layout(barmode="overlay", bargap=0.25, legend={"y": 1.06})
    return figure


def panel(lab: Any, guess: Any = None) -> Experiment:
    def run(job: Any, **values: Any) -> Result:
        return measure(lab, job, **values)

    fields = {
        "n_requests": slider("Requests", 4, 32, 12, step=4),
        "longest": slider("Longest answer", 12, 96, 24, step=6),
        "together": slider("Batch at most", 1, 8, 4, step=1),
        "turns": slider("Turns", 1, 5, 3, step=1),
    }
    return Experiment(
        "When does each request get its turn?",
        run,
        fields,
        guess=guess,
        recorded=("batching", served_result),
        confounders=("n_requests", "longest", "together"),
        note="The same requests, all there at second 0, one in four with a long answer. Both policies run in turn.",
    )


def demo(lab: Any = None) -> Experiment:
    """The panel alone, full page."""
    from labkit.ui.lesson import setup

    return panel(setup() if lab is None else lab)


def same_alone(lab: Any, run: dict[str, Any]) -> str:
    """Whether the first requests got in the batch what each gets alone, in words."""
    said = []
    for n, (prompt, n_tokens) in enumerate(run["asked"][:2]):
        alone = lab.pipeline().generate(prompt, max_new_tokens=n_tokens, ignore_eos=True)
        names = say("request {n} in the batch", n=n + 1), say("alone")
        said.append(findings.same_text(run["token_ids"][CONTINUOUS][n], alone.token_ids, names))
    return sentences(*said)


# --- how far the weights' one reading goes


def by_batch(lab: Any, sizes: Sequence[int] = (1, 2, 4, 8), n_tokens: int = 10) -> list[dict[str, Any]]:
    """Decode steps of 1 to 8 requests: milliseconds a step, and tokens a second for all together."""
    rows = []
    for size in sizes:
        scheduler = Continuous(max_requests=size)
        with Service(lab.model, scheduler=scheduler, capacity_tokens=64, start=False) as service:
            requests = [
                service.submit(f"{SUBJECTS[n]} was", max_new_tokens=n_tokens, ignore_eos=True) for n in range(size)
            ]
            service.start()
            for request in requests:
                request.sequence.ended.wait(120)
            steps = sorted(m.end_s - m.start_s for m in service.moments if m.n_tokens == m.n_requests == size)
        took = steps[len(steps) // 2]
        row = {"requests together": size, "ms a step (median)": took * 1e3, "tokens/s, all together": size / took}
        rows.append(row)
    return rows


# --- the exercise and the questions

STEPS = Exercise(
    "decode steps of static batches",
    cases=[([4, 4, 4, 4], 4), ([30, 5, 5, 5, 30, 5, 5, 5], 4), ([1, 9, 1, 9, 1], 2), ([7], 8)],
    oracle=lambda tokens, together: n_steps(Static(max_requests=together), tokens),
    hints=(
        "Cut the list into batches of `together`, in their order. When has a batch ended?",
        "A batch takes as many steps as its longest answer has tokens.",
        "`sum(max(tokens[i : i + together]) for i in range(0, len(tokens), together))`",
    ),
)

QUIZ = (
    (
        "Why can eight requests decode together in far less than eight times the time of one?",
        {
            "The weights are read once for all": "Right: reading them is most of a step, and it serves every request.",
            "Each gets an eighth of the model": "Every request passes through the whole model; they share the reading.",
        },
        "The weights are read once for all",
    ),
    (
        "What does the block table buy?",
        {
            "Faster attention": "It costs attention a look-up. What it buys is room: no place is reserved in vain.",
            "Room for more requests": "Right: blocks are taken as texts grow, and equal beginnings are stored once.",
        },
        "Room for more requests",
    ),
    (
        "A request is preempted when the blocks run out. What happens to its answer?",
        {
            "It begins anew": "The tokens it has are kept; only their keys and values are computed again, in one pass.",
            "It goes on where it was": "Right: its tokens are fed once more, as a prompt, and it continues the same.",
        },
        "It goes on where it was",
    ),
)
