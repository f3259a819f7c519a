"""Named tensors and a config to a ``Transformer``: every tensor placed, checked and accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.checkpoint.placement import check_fits
from labkit.checkpoint.stored_rows import Rows, can_hold, put_in
from labkit.model.config import ModelConfig, dtype_name
from labkit.model.transformer import Transformer

_SHOWN = 6
_SERIAL_VALUES = 31 * 1024
"""Just under torch's grain of 32,768 values, below which it starts no threads (see ``dequantize``)."""
_THREADED_VALUES = 2**24


class _NoInit(TorchFunctionMode):
    """Skips ``torch.nn.init``: weights that are about to be replaced need no values. On the meta device an
    initialiser would even import torch's compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def skeleton(config: ModelConfig, name: str) -> Transformer:
    """The model's modules without memory (on the meta device). Raises ValueError when its sizes are impossible."""
    try:
        with torch.device("meta"), _NoInit():
            return Transformer(config)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: its config asks for sizes that no tensor can have ({error}).") from error


def assemble(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Any]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    n_stored: int,
    borrowed: bool = False,
) -> Transformer:
    """Build the model that ``config`` describes from named ``tensors`` (labkit's names).

    ``n_stored``: how many values the file holds, which is what must fit (a wrong config may claim more).
    ``Rows`` become a packed linear where the model has a linear or an embedding, else it is unpacked.
    ``borrowed``: the tensors live in a mapped file, so each is copied; the model never depends on the file later.
    Raises ValueError that names the tensors which are missing, unexpected, wrong-shaped, or hold NaN.
    """
    transformer = skeleton(config, name)
    wanted = {key: tuple(tensor.shape) for key, tensor in transformer.state_dict().items()}
    check_fits(n_stored, dtype, device, name)
    state: dict[str, Tensor] = {}
    unexpected, wrong, sums = [], [], {}
    packed: dict[str, Rows] = {}
    for key, tensor in tensors:
        if key not in wanted or key in state or key in packed:
            unexpected.append(key)
        elif tuple(tensor.shape) != wanted[key]:
            wrong.append(f"{key} is {tuple(tensor.shape)}, should be {wanted[key]}")
        elif isinstance(tensor, Rows) and can_hold(transformer, key):
            packed[key] = tensor
        elif isinstance(tensor, Rows):
            state[key] = tensor.unpack(dtype).to(device)
        elif not tensor.is_floating_point():
            wrong.append(f"{key} holds {str(tensor.dtype).removeprefix('torch.')}, should be floating point")
        else:
            placed = tensor.to(device=device, dtype=dtype, copy=borrowed).contiguous()
            sums[key] = _total(placed)
            state[key] = placed
    seen = {*state, *packed, *(line.split(" ", 1)[0] for line in wrong)}
    missing = [key for key in wanted if key not in seen]
    _report_disagreement(name, missing, unexpected, wrong)
    _report_not_finite(name, state, sums, dtype)
    held = put_in(transformer, packed, name=name, device=device, dtype=dtype)
    left, more = transformer.load_state_dict(state, strict=False, assign=True)
    assert not more
    assert set(left) <= held
    return transformer.requires_grad_(False).eval()


def _total(tensor: Tensor) -> Tensor:
    """The sum in float32: not finite when any value is not."""
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        with np.errstate(all="ignore"):
            return torch.tensor(tensor.numpy().sum())  # on one thread, all at once (see ``dequantize``)
    if tensor.device.type != "cpu" or tensor.numel() > _THREADED_VALUES:
        return tensor.sum(dtype=torch.float32)
    parts = tensor.view(-1).split(_SERIAL_VALUES)
    return torch.stack([part.sum(dtype=torch.float32) for part in parts]).sum()


def _report_disagreement(name: str, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
    parts = [
        f"{len(items)} {what}: {', '.join(items[:_SHOWN])}{', ...' if len(items) > _SHOWN else ''}"
        for what, items in (("missing", missing), ("unexpected", unexpected), ("wrong", wrong))
        if items
    ]
    if parts:
        raise ValueError(
            f"{name}: the config and the weights disagree. Tensors {'; '.join(parts)}. "
            "They belong to different models, or the download is incomplete."
        )


def _report_not_finite(name: str, state: dict[str, Tensor], sums: dict[str, Tensor], dtype: torch.dtype) -> None:
    """A NaN or an infinity anywhere makes its tensor's sum one too: one pass, one synchronisation."""
    if not sums or bool(torch.isfinite(torch.stack(list(sums.values()))).all()):
        return
    bad = [key for key, total in sums.items() if not torch.isfinite(total) and not torch.isfinite(state[key]).all()]
    if bad:
        shown = f"{', '.join(bad[:_SHOWN])}{', ...' if len(bad) > _SHOWN else ''}"
        hint = " Values above 65,504 do not fit in fp16: try dtype='bf16' or 'fp32'." if dtype == torch.float16 else ""
        raise ValueError(
            f"{name}: {len(bad)} tensors hold NaN or infinity in {dtype_name(dtype)}: {shown}. "
            f"The file is damaged or its training diverged.{hint}"
        )
