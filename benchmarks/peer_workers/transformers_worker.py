# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Hugging Face transformers: ``generate`` with its default (dynamic) cache, greedy."""

import time

from protocol import mean_gap, serve


class Stamps:
    """A streamer that only looks at the clock; the first call is the prompt's."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def load(options):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["n_threads"])
    model = AutoModelForCausalLM.from_pretrained(options["folder"], dtype=getattr(torch, options["dtype"]))
    model.generation_config.eos_token_id = None

    def generate(prompt_ids, n_new):
        stamps, ids = Stamps(), torch.tensor([prompt_ids])
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                min_new_tokens=n_new,
                do_sample=False,
                streamer=stamps,
            )
        times = stamps.times[1:]
        return {"ttft_s": times[0] - began, "itl_s": mean_gap(times)}

    return generate


if __name__ == "__main__":
    serve(load)
