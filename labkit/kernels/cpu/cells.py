"""Cells of the integers that Python and the compiled functions share. An address stands where an array would.

team     a team's block of memory            FUNCTION ...   a job: what to run, on what
sizes    of a step, a job's SIZES            phases         where rank 0 leaves the times of a step, a job's PHASES
held     what a step's caches lie at, HELD   product        a job that is one product
experts  a layer's own linears
"""

from __future__ import annotations

LINE = 8
"""int64 cells in a cache line: counters that threads fight over lie apart."""
SEQUENCE, ARRIVED, GENERATION, JOB, PARKED = (LINE * i for i in range(5))
"""team: JOB holds the job's address, PARKED is one line a thread."""
EACH = 1024
"""A job's number in the SEQUENCE is a multiple of this, plus how many threads it is for: both are read at once."""

FUNCTION, CLOCK, GIVE_WAY, N_THREADS, LINEARS, LAYERS, FLOATS, SIZES, WORK, X, LOGITS, PHASES, TABLE, TOKEN, HIDDEN = (
    range(15)
)
N_CELLS = 15
"""job. TABLE: the embedding that the token is looked up in (``tokens``); 0: X holds its row. TOKEN: address of the
token, which the most likely next one replaces; 0: nobody asks for it. HIDDEN: where the hidden states of few tokens
go (of more, X has them); 0: nowhere."""

LINEAR_AT, INPUT, INPUT_STRIDE, OUTPUT, OUTPUT_STRIDE, N_INPUTS, SCRATCH = range(4, 11)
"""product: the linear's row of the plan, tokens in and out with their strides in bytes, how many, working memory."""

N_SIZES = 13
(
    N_LAYERS, D_MODEL, N_NEW, LAYER_NORM, FINAL_W, FINAL_B, WIDEST, EPS_BITS, CAP_BITS, OWN, N_PARTS, HELD, PIECES,
) = range(N_SIZES)  # fmt: skip
"""sizes. OWN: float32 numbers of a thread's own memory for attention. N_PARTS: the team's threads, whoever of them
takes part. HELD: address of ``held``; PIECES: of the memory for attention's pieces, which the threads share."""

PHASE_NAMES = ("attention", "ffn", "norm", "lm_head", "kv_cache", "embed", "sample")
T_ATTENTION, T_FFN, T_NORM, T_LM_HEAD, T_KV_CACHE, T_EMBED, T_SAMPLE, ASKED, STOPPED = range(9)
N_PHASES = 9
"""phases. The last two are no times: the caller wants a prompt to be left, and the team has left it."""

TOKENS, LASTS, N_LASTS, RUNS, N_RUNS, FEW, N_FEW, N_TILES, BLOCK_TABLE, N_TABLES, N_BLOCKS, STRETCH = range(12)
N_HELD = 12
"""held. TOKENS: address of (T, 2) int64, each token's position and slot (the sequence's place, or its row of the block
table). LASTS: of the N_LASTS tokens whose logits are wanted. RUNS: of (N_RUNS, 2), first token and number of tokens of
those that follow each other in one sequence and meet their keys as panels; FEW: of the N_FEW others, N_TILES the most
tiles of keys that one of them meets. BLOCK_TABLE: of (N_TABLES, N_BLOCKS) int32; STRETCH: of the compiled
``stretch``."""

ROUTER, SHARED_GATE, FIRST_EXPERT = range(3)
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = range(3)
"""Rows of a layer's table of experts: the router, the shared expert's gate (its W 0: none), three of each expert."""
