"""Mixture of experts: many FFNs, of which each token visits a few.

    p = softmax(W_router x)                       (T, E), in float32
    y = sum over the k largest p_e:  g_e FFN_e(x)        g = p, or p / sum of the k (``renormalize``)
      + sigmoid(w_gate . x) FFN_shared(x)                when there is a shared expert (Qwen2-MoE)

DeepSeek's gates (``gated``) score in another way, choose among the best groups of experts first, and learn a bias that
counts for the choice and not for the weights. V4's first layers do not choose at all: a table names each token id's
experts (``n_ids``), and the scores only weigh them.

The weights in memory are E times an FFN's, the work for a token only k times: so a decode step reads few of the
weights, and a prefill reads all of them. Sources: Shazeer et al. (arXiv 1701.06538), Mixtral (arXiv 2401.04088),
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import DenseFFN, Gate, MoEFFN
from labkit.model.ffn import ACTIVATIONS, FeedForward, cut


class Experts(nn.Module):
    """E gated FFNs, their weights stacked: gate and up (E, F, M), down (E, M, F)."""

    def __init__(self, d_model: int, config: MoEFFN) -> None:
        super().__init__()
        n, d_ff = config.n_experts, config.d_ff
        self.activation, self.limit = ACTIVATIONS[config.activation], config.limit
        self.gate = nn.Parameter(torch.empty(n, d_ff, d_model), requires_grad=False)
        self.up = nn.Parameter(torch.empty(n, d_ff, d_model), requires_grad=False)
        self.down = nn.Parameter(torch.empty(n, d_model, d_ff), requires_grad=False)

    def forward(self, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """sum over j of gates[t, j] FFN_{expert_ids[t, j]}(x_t): x (T, M), both others (T, k) -> (T, M).

        Visits are sorted by expert, so that each expert sees all of its tokens in one product.
        """
        n_active = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)  # (T*k,) visits, by expert
        counts = expert_ids.flatten().bincount(minlength=len(self.gate)).tolist()
        visitors = x[order // n_active].split(counts)
        out = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        out[order] = torch.cat([self.one(i, own) for i, own in enumerate(visitors) if len(own)])
        return (out.unflatten(0, (-1, n_active)) * gates[..., None]).sum(1)

    def one(self, expert_idx: int, x: Tensor) -> Tensor:
        """The gated FFN of one expert: (n, M) -> (n, M)."""
        gate, up = cut(F.linear(x, self.gate[expert_idx]), F.linear(x, self.up[expert_idx]), self.limit)
        return F.linear(self.activation(gate) * up, self.down[expert_idx])


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: F.softplus(logits).sqrt(),
}


def gated(
    logits: Tensor,
    gate: Gate,
    *,
    n_active: int,
    renormalize: bool,
    bias: Tensor | None = None,
    named: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, both (T, k): logits (T, E) float32, bias (E,) for the choice.
    ``named`` (T, k): they are chosen already."""
    scores = SCORES[gate.scoring](logits)
    ids = choose(scores, gate, n_active, bias) if named is None else named
    gates = scores.gather(1, ids)
    if renormalize:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return ids, gates * gate.scaling


def choose(scores: Tensor, gate: Gate, n_active: int, bias: Tensor | None) -> Tensor:
    """The experts (T, k) with the largest scores (T, E), bias added, within the best groups."""
    wanted = scores if bias is None else scores + bias.float()
    if gate.n_groups > 1:
        grouped = wanted.unflatten(-1, (gate.n_groups, -1))  # (T, groups, E / groups)
        best = grouped.topk(gate.n_best, dim=-1).values.sum(-1).topk(gate.n_groups_active, dim=-1).indices
        away = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        wanted = grouped.masked_fill(away[..., None], -torch.inf).flatten(1)
    return wanted.topk(n_active, dim=-1).indices


class MixtureOfExperts(nn.Module):
    """A router, its experts, and perhaps one expert that every token shares: (T, M) -> (T, M)."""

    experts_of_id: Tensor

    def __init__(self, d_model: int, config: MoEFFN) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(d_model, config.n_experts, bias=False)
        has_bias = config.gate.choice_bias
        self.choice_bias = nn.Parameter(torch.empty(config.n_experts), requires_grad=False) if has_bias else None
        self.route = self.route_by_softmax if config.gate == Gate() else self.route_gated
        if config.n_ids:
            self.register_buffer("experts_of_id", torch.empty(config.n_ids, config.n_active, dtype=torch.int32))
        self.experts = Experts(d_model, config)
        shared = DenseFFN(config.d_ff_shared, config.activation, limit=config.limit)
        self.shared = FeedForward(d_model, shared) if config.d_ff_shared else None
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if config.shared_gate else None

    def route_gated(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``route_by_softmax``, for every other gate. The router's product is taken in float32."""
        config = self.config
        logits = F.linear(x.float(), self.router.weight.float())
        named = None
        if config.n_ids:
            assert token_ids is not None, "these experts are named by token ids"
            named = self.experts_of_id[token_ids].long()
        rule = {"n_active": config.n_active, "renormalize": config.renormalize}
        ids, gates = gated(logits, config.gate, **rule, bias=self.choice_bias, named=named)
        return ids, gates.to(x.dtype)

    def route_by_softmax(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Which experts each token visits, and how much each counts: ids and gates, both (T, k)."""
        gates, ids = self.router(x).float().softmax(-1).topk(self.config.n_active, dim=-1)
        if self.config.renormalize:
            gates = gates / gates.sum(-1, keepdim=True)
        return ids, gates.to(x.dtype)

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """``token_ids`` (T,) are asked for where a table names the experts."""
        out = self.experts(x, *self.route(x, token_ids))
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
