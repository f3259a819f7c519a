"""llama.cpp through the xllamacpp wheel, on the GGUF file as it is, its own timings."""

import json
from typing import Any

from protocol import serve


def load(options):
    import xllamacpp

    xlc: Any = xllamacpp

    params = xlc.CommonParams()
    params.model.path = options["gguf"]
    params.n_ctx = options["context"]
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["n_threads"]
    params.warmup = False
    server = xlc.Server(params)

    def generate(prompt_ids, n_new):
        request = {
            "prompt": prompt_ids,
            "n_predict": n_new,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        timings = answer["timings"]
        return {"ttft_s": timings["prompt_ms"] / 1e3, "itl_s": timings["predicted_per_token_ms"] / 1e3}

    return generate


if __name__ == "__main__":
    serve(load)
