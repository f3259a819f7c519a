"""Reference tokenizers that are put together here rather than read from a file."""

from __future__ import annotations

import base64
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def reference_smollm2(metadata) -> Tokenizer:
    """SmolLM2's tokenizer.json, rebuilt with `tokenizers` from the GGUF's lists: digits one by one, then GPT-2."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    reference = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    reference.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return reference


def write_rank_file(path: Path, ranks: dict[bytes, int]) -> Path:
    """A tiktoken file with these ranks."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path
