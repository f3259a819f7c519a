"""OpenVINO GenAI: LLMPipeline on the CPU, greedy, its own performance counters."""

from protocol import serve


def load(options):
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(options["folder"], "CPU", INFERENCE_NUM_THREADS=options["n_threads"])

    def generate(prompt_ids, n_new):
        ids = ov.Tensor(np.array([prompt_ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(prompt_ids)), dtype=np.int64))
        config = genai.GenerationConfig(max_new_tokens=n_new, min_new_tokens=n_new, ignore_eos=True, do_sample=False)
        metrics = pipeline.generate(genai.TokenizedInputs(ids, mask), config).perf_metrics
        return {"ttft_s": metrics.get_ttft().mean / 1e3, "itl_s": metrics.get_tpot().mean / 1e3}

    return generate


if __name__ == "__main__":
    serve(load)
