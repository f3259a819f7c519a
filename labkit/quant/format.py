"""What a weight format is: one config class that packs, counts its bytes and finds its own words.

Everybody who deals with formats (``load``, the forecasts, the panels, the benchmarks) asks these methods. A new format
is a frozen dataclass derived from ``WeightFormat``, a ``PackedLinear`` that holds what it makes, and ``register``:

    @dataclass(frozen=True)
    class Int6(WeightFormat):
        group_size: int = option(32, choices=(32, 64))
        def layer(self, name, linear): return linear_of(Grid(6).nearest(linear.weight, self.group_size), linear.bias)
        def layer_nbytes(self, n_out, n_in, name=""): return grouped.nbytes(n_out, n_in, bits=6, ...)

    register_format("int6", Int6, summary="6 bits a weight")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from labkit import registry
from labkit.quant.linear import PackedEmbedding, PackedLinear

KEPT = ("router", "shared_gate")
"""Linears that stay as they are: they decide where tokens go, and are tiny."""


class WeightFormat:
    """How a model's linears, and its head, are held. Configs derive from this."""

    def layer(self, name: str, linear: nn.Linear) -> PackedLinear:
        """One of the layers' linears, packed; ``name`` as in ``transformer.layers``."""
        raise NotImplementedError

    def top(self, linear: nn.Linear) -> PackedLinear:
        """The head, which a tied embedding shares."""
        return self.layer("head", linear)

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int | None:
        """Bytes of what ``layer`` makes of (n_out, n_in), the bias not counted; None: it stays in the model's dtype.
        ``name``: its full name, if known."""
        raise NotImplementedError

    def top_nbytes(self, n_out: int, n_in: int) -> int | None:
        """Bytes of what ``top`` makes."""
        return self.layer_nbytes(n_out, n_in)

    def table_nbytes(self, n_out: int, n_in: int) -> int | None:
        """Bytes of an embedding that is not the head."""
        return None

    def bits_a_weight(self, n_in: int = 1024) -> float:
        """Bits that a weight of the layers takes, scales included, in rows of ``n_in`` inputs."""
        return 8 * (self.layer_nbytes(1024, n_in) or 2048 * n_in) / (1024 * n_in)

    def compiled(self) -> WeightFormat:
        """The format whose bytes are those that a CPU's compiled step comes to hold, where they are not the same."""
        return self

    from_file: ClassVar[bool] = False
    """Whether only a file can decide it: nobody proposes it as a switch then."""
    calibrates: ClassVar[bool] = False
    """Whether choosing the integers takes a text and minutes."""

    def form(self) -> WeightFormat:
        """The format with the same layout that any weights can be put into at once: what a forecast times. A format
        whose integers take a calibration to choose returns another one here."""
        return self


def replace_linears(
    transformer: Any, convert: Callable[[str, nn.Linear], PackedLinear], head: Callable[[nn.Linear], PackedLinear]
) -> Any:
    """Swap every linear of the layers for ``convert(name, linear)``, and the head (with a tied embedding) too, in
    place. What every way of choosing the integers ends with. Returns the transformer."""
    for name, module in linears_of(transformer.layers):
        replace(transformer.layers, name, convert(name, module))
    return replace_head(transformer, head)


def linears_of(module: Any) -> list[tuple[str, nn.Linear]]:
    """The linears inside a layer, or all layers, that a format packs: (name, linear)."""
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return [(name, m) for name, m in found if name.rpartition(".")[2] not in KEPT]


def replace(module: Any, name: str, linear: Any) -> None:
    """Put ``linear`` where ``module`` has ``name``."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, linear)


def replace_head(transformer: Any, head: Callable[[nn.Linear], Any]) -> Any:
    """Pack the head, and let a tied embedding look its rows up there. A ``head`` that gives the linear back leaves
    both as they are. Returns the transformer."""
    if transformer.head is not None:
        transformer.head = head(transformer.head)
        return transformer
    dtype = transformer.dtype
    tied = nn.Linear(*reversed(transformer.embedding.weight.shape), bias=False, device="meta")
    tied.weight = transformer.embedding.weight
    made = head(tied)
    if made is not tied:
        transformer.head, transformer.embedding = made, PackedEmbedding(made, dtype)
    return transformer


def register_format(name: str, config: type[WeightFormat], *, summary: str, why_not: Any = lambda: None) -> None:
    """Make a format that needs nothing but the weights selectable as ``name``."""

    def build(config: WeightFormat, *, transformer: Any) -> Any:
        return replace_linears(transformer, config.layer, config.top)

    registry.register("weights", name, config=config, summary=summary, why_not=why_not)(build)


def format_of(weights: Any) -> Any:
    """The config behind a format's name, or the config itself, checked. Raises ValueError that lists the formats."""
    return registry.find("weights", weights)[1]


def form_of(weights: Any) -> Any:
    """What a forecast measures in place of ``weights`` (a name, a config or None): the same layout, no calibration.
    None for plain numbers."""
    config = None if weights is None else format_of(weights)
    return registry.named("weights", config.form()) if isinstance(config, WeightFormat) else None
