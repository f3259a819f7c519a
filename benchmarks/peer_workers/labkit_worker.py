"""labkit itself, through its public Pipeline with the timer on."""

import json

from protocol import serve


def read_ids(text, **_):
    """In the tokenizer's place: the prompt is the same tokens for every peer. The answer is still made text."""
    return json.loads(text)


def load(options):
    import torch

    torch.set_num_threads(options["n_threads"])
    import labkit
    from labkit import backends

    model = labkit.load(options["model"], dtype=options.get("dtype", "auto"), weights=options.get("weights"))
    model.tokenizer.encode_prompt = read_ids
    pipeline = labkit.Pipeline(model, backend=options.get("backend", "auto"))
    backends.prepare("fused")

    def generate(prompt_ids, n_new):
        done = pipeline.generate(json.dumps(prompt_ids), max_new_tokens=n_new, ignore_eos=True)
        trace = done.trace
        return {"ttft_s": trace.ttft_s, "itl_s": sum(trace.itl_s) / len(trace.itl_s), "coverage": trace.coverage}

    return generate


if __name__ == "__main__":
    serve(load)
