"""The lab's face: widgets, figures, lessons. The only room that imports ipywidgets, plotly or anywidget.

**For a lesson** everything comes from ``labkit.ui.lesson`` (its first page lists the calls in a lesson's order).
What a lesson *does* is a function in ``labkit/ui/panels/<lesson>.py``; the notebook's cells are one-liners::

    # labkit/ui/panels/kv_cache.py
    def measure(job, *, n_tokens, cache):                 # runs in the background
        for n in range(n_tokens):
            job.progress(n / n_tokens, f"token {n}")      # also where Stop takes effect
        figure = theme.figure_layout(go.Figure(...), x="tokens so far", y="ms a token")
        return Result(figure, rows=[{"tokens": 1, "ms": 2.0}], summary="What the figure says.", data=...)

    def panel(lab, guess=None):
        fields = {"n_tokens": slider("Tokens", 16, 256, 64), "cache": component("kv_cache", "Cache")}
        return Experiment("Does the time per token climb?", measure, fields, guess=guess)

    # the notebook
    panel = kv_cache.panel(lab, guess); panel             # shows it
    panel.run_button.click(); result = panel.wait()       # what a reader does, for CI: re-raises what went wrong
    assert result.data["token_ids"] == ...                # ids, shapes, bytes; never times

**Rules that keep panels well-behaved**: never loop in a button handler (``Runner`` owns the thread); publish
state, not events (one tick is 100 ms); escape every text that is not ours (``html.prose``, ``html.table``);
wrap callbacks in ``errors.guarded``; give a figure its summary and its table; colour plus pattern or dash
(``theme.series``, ``theme.PHASES``); ipywidgets 7.7.1 API only, because Colab has that.

    theme     colours, patterns, ``figure_layout``, the style sheet      runner   background work, Stop, ticks
    html      escaped HTML: tables, figures, prose                       errors   friendly boxes, ``guarded``
    controls  captions + inputs that look alike                          status   the status line
    session   one model a process                                        panels/  the panels
"""
