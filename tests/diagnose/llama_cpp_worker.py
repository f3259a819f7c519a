"""llama.cpp's HTTP server on a free loopback port: prints ``listening URL``, ends when its standard input does."""

import socket
import sys

import xllamacpp


def main(model: str, n_threads: int = 1, n_parallel: int = 2, n_ctx: int = 2048) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_ctx = n_ctx
    params.n_parallel = n_parallel
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = n_threads  # its threads spin while they wait: more than there are cores stand still
    params.cpuparams_batch.n_threads = n_threads
    params.endpoint_metrics = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(f"listening {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
