"""vLLM's CPU build, bf16, eager engine in this process, greedy."""

import os
import time

from protocol import serve


def load(options):
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(options["folder"], dtype=options["dtype"], max_model_len=options["context"], enable_prefix_caching=False)

    def timed(prompt_ids, n_new):
        sampling = SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True)
        began = time.perf_counter()
        llm.generate([TokensPrompt(prompt_token_ids=prompt_ids)], sampling, use_tqdm=False)
        return time.perf_counter() - began

    def generate(prompt_ids, n_new):
        first = timed(prompt_ids, 1)
        return {"ttft_s": first, "itl_s": (timed(prompt_ids, n_new) - first) / (n_new - 1)}

    return generate


if __name__ == "__main__":
    serve(load)
