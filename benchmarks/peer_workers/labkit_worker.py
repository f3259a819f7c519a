"""labkit itself, through its public Pipeline with the timer on."""

import json

from protocol import serve


class Ids:
    """A tokenizer whose text is the list of ids: the prompt is the same tokens for every peer."""

    eos_ids = frozenset()

    def encode(self, text):
        return json.loads(text)

    def stream(self):
        return self

    def push(self, token_id):
        return ""

    def flush(self):
        return ""


def load(options):
    import torch

    torch.set_num_threads(options["n_threads"])
    import labkit
    from labkit import backends

    model = labkit.load(options["model"], dtype=options.get("dtype", "auto"), weights=options.get("weights"))
    model.tokenizer = Ids()
    pipeline = labkit.Pipeline(model, backend=options.get("backend", "auto"))
    backends.prepare("fused")

    def generate(prompt_ids, n_new):
        done = pipeline.generate(json.dumps(prompt_ids), max_new_tokens=n_new, ignore_eos=True)
        trace = done.trace
        return {"ttft_s": trace.ttft_s, "itl_s": sum(trace.itl_s) / len(trace.itl_s), "coverage": trace.coverage}

    return generate


if __name__ == "__main__":
    serve(load)
