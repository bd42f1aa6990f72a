"""The ops of random models, from ``[B, T, D]`` to ``[B, T, D]``.

Most of them occur in real models: weights that are sliced, transposed or shared, shapes
that are flattened, branches on data, numbers read from data.
"""

import random
from typing import Any, Callable, Dict

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from opacus_ext.layers import SwitchFeedForward, TopKFeedForward
from tests.common import Net as Step

D = 3  # B and T are often the same
LONGEST = 5  # of T
VOCAB = 6


class Opaque(torch.autograd.Function):
    """An autograd function without a rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


def linear() -> nn.Linear:
    return nn.Linear(D, D, bias=bool(torch.rand(()) < 0.7))


def over_time(layer: nn.Module) -> Step:
    """The step of a layer that has its features in dim 1."""
    return Step(lambda s, h: s.layer(h.mT)[..., : h.shape[1]].mT, layer=layer)


def norm(layer: nn.Module) -> Step:
    for p in layer.parameters():
        nn.init.normal_(p)
    return over_time(layer)


def conv(**kwargs: Any) -> Step:
    dilation = kwargs.get("dilation", 1)
    return over_time(nn.Conv1d(D, D, 3, padding=2 * dilation, **kwargs))


def recurrent(rng: random.Random) -> Step:
    kind, first = rng.choice([nn.LSTM, nn.GRU, nn.RNN]), rng.random() < 0.5
    layer = kind(D, D, num_layers=rng.choice([1, 2]), batch_first=first)

    def then(s, h):
        return s.layer(h)[0] if first else s.layer(h.transpose(0, 1))[0].transpose(0, 1)

    return Step(then, layer=layer)


def attention(rng: random.Random) -> Step:
    weights_too = rng.random() < 0.5
    layer = nn.MultiheadAttention(D, rng.choice([1, D]), batch_first=True)
    return Step(lambda s, h: s.layer(h, h, h, need_weights=weights_too)[0], layer=layer)


def packed_attention(s, h):
    q, k, v = F.linear(h, s.w).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fourier(s, h):
    return torch.fft.irfft(
        torch.fft.rfft(h, dim=-1) * torch.view_as_complex(s.w), n=D, dim=-1
    )


def cast(s, h):
    z = torch.fft.fft(h, dim=-1) @ s.w.to(torch.complex128)
    return (z * (2 + s.w[0].to(z.dtype))).real + z.imag


def conjugated(s, h):
    z = (h + s.w.to(torch.complex128)).conj() * torch.complex(h.cos(), h)
    return z.real + z.imag


def in_type(dtype: torch.dtype, tolerance: float) -> Callable:
    """A step that is rounded: by entries, which is the same for samples together."""

    def then(s, h):
        made = h.tanh().to(dtype) * s.w.to(dtype)
        return made.abs().double() if made.is_complex() else made.double()

    return lambda rng: Step(then, w=weights(D), tolerance=tolerance)


def caught(s, h):
    """A question about data, in code that goes on whatever comes of it."""
    try:
        count = int(h.detach().abs().sum()) % 3
    except Exception:
        count = 0
    return s.fc(h) * (1 + count)


def cancels(s, h):
    """Two uses whose gradients differ in their fourth digit."""
    return s.fc(1e3 * h) - s.fc(1e3 * h + h)


def cell(s, h):
    state, out = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = torch.tanh(s.fc(h[:, t]) + s.u(state))
        out.append(state)
    return torch.stack(out, 1)


def chosen(s, h):
    """Rows that data select; they are changed and put back."""
    index = h.detach().sum(-1) > 0
    out = h.clone()
    out[index] = s.fc(h[index])
    return out


def selected(s, h):
    picked = h[h.detach() > 0]
    return s.fc(h) * (picked.mean() if len(picked) else 1.0)


def inner_gradient(s, h):
    with torch.enable_grad():
        x = h.detach().requires_grad_()
        (found,) = torch.autograd.grad(s.fc(x).square().sum(), x, create_graph=True)
    return h + found


def flattened(s, h):
    B, T, d = h.shape
    return s.fc(h.reshape(B * T, d)).view(B, T, d)


def time_first(s, h):
    return s.fc(h.transpose(0, 1).contiguous()).transpose(0, 1)


def in_place(s, h):
    h = s.fc(h)
    h.mul_(s.w)
    h[:, 0] += 1
    return h


def hooked(rng: random.Random) -> Step:
    step = Step(lambda s, h: s.fc(h), fc=linear())
    kind = rng.randrange(3)
    if kind == 0:
        step.fc.register_forward_hook(lambda m, args, y: y * y.detach().abs().mean())
    elif kind == 1:
        step.fc.register_forward_pre_hook(lambda m, args: (args[0].cos(),))
    else:
        step.register_forward_hook(lambda m, args, y: y - y.mean(0, keepdim=True) / 2)
    return step


def frozen_buffer() -> Step:
    step = Step(lambda s, h: s.fc(h * s.scale), fc=linear())
    step.register_buffer("scale", torch.rand(D))
    return step


def counts(s, h):
    s.seen += 1
    return s.fc(h)


def remembers(s, h):
    old, s.seen = s.seen, 0.5 * s.seen + float(h.detach().mean())
    return s.fc(h) + old


def latches(s, h):
    if not s.seen:
        s.seen = float(h.detach().abs().mean()) + 1
    return s.fc(h) / s.seen


def bag(s, h):
    ids = (h.detach().abs() * 2).long().clamp(max=VOCAB - 1)  # [B, T, D]
    return s.bag(ids.reshape(-1, D)).view(h.shape)


def experts(rng: random.Random) -> Step:
    if rng.random() < 0.5:
        layer: nn.Module = TopKFeedForward(D, 4, 3, top_k=rng.choice([1, 2]))
    else:
        layer = SwitchFeedForward(D, 4, 3)
    return Step(lambda s, h: s.layer(h), layer=layer)


def with_weight(then: Callable, *shape: int) -> Callable:
    return lambda rng: Step(then, w=weights(*shape))


def with_linear(then: Callable, **kwargs: Any) -> Callable:
    return lambda rng: Step(then, fc=linear(), **kwargs)


UNARY: Dict[str, Callable[[random.Random], Step]] = {
    "linear": with_linear(lambda s, h: s.fc(h)),
    "flattened": with_linear(flattened),
    "time first": with_linear(time_first),
    "by position": with_linear(
        lambda s, h: torch.stack([s.fc(h[:, t]) for t in range(h.shape[1])], 1)
    ),
    "branch": with_linear(lambda s, h: s.fc(h) if h.sum() > 0 else h.cos()),
    "number": with_linear(lambda s, h: s.fc(h) * float(h.detach().abs().max())),
    "selected": with_linear(selected),
    "chosen": with_linear(chosen),
    "minus mean": with_linear(lambda s, h: s.fc(h) - 0.5 * h.mean(0)),
    "times B": with_linear(lambda s, h: s.fc(h) * h.shape[0]),
    "sorted": with_linear(lambda s, h: s.fc(h.sort(1).values)),
    "sums": with_linear(lambda s, h: s.fc(h.cumsum(1))),
    "rolled": with_linear(lambda s, h: s.fc(h.roll(1, 1).flip(-1))),
    "checkpoint": with_linear(lambda s, h: checkpoint(s.fc, h, use_reentrant=False)),
    "caught": with_linear(caught),
    "cancels": with_linear(cancels),
    "opaque": with_linear(lambda s, h: Opaque.apply(s.fc(h))),
    "inner gradient": with_linear(inner_gradient),
    "detached": with_linear(lambda s, h: s.fc(h.detach()) + h),
    "float32": with_linear(lambda s, h: s.fc(h.float()).double(), single=True),
    "autocast to weight": with_linear(lambda s, h: F.linear(h, s.fc.weight.double())),
    "cell": lambda rng: Step(cell, fc=linear(), u=linear()),
    "weight norm": lambda rng: Step(
        lambda s, h: s.fc(h), fc=parametrizations.weight_norm(nn.Linear(D, D))
    ),
    "half of a weight": with_weight(lambda s, h: F.linear(h, s.w[D:]), 2 * D, D),
    "both halves": with_weight(
        lambda s, h: F.linear(F.linear(h, s.w[:D]).tanh(), s.w[D:]), 2 * D, D
    ),
    "turned": with_weight(lambda s, h: h @ s.w.T, D, D),
    "tied": with_weight(lambda s, h: F.linear(F.linear(h, s.w), s.w.T), 4, D),
    "viewed": with_weight(lambda s, h: F.linear(h, s.w.view(D, D)), D * D),
    "strided": with_weight(lambda s, h: h @ s.w.as_strided((D, D), (1, 1)), 2 * D),
    "unfolded": with_weight(lambda s, h: h @ s.w.unfold(0, D, 1), 2 * D - 1),
    "addmm": with_weight(
        lambda s, h: torch.addmm(s.w[0], h.reshape(-1, D), s.w).view(h.shape), D, D
    ),
    "einsum": with_weight(lambda s, h: torch.einsum("btd,ed->bte", h, s.w), D, D),
    "bmm": with_weight(lambda s, h: torch.bmm(h, s.w.expand(len(h), D, D)), D, D),
    "scale": with_weight(lambda s, h: h * s.w, D),
    "shift": with_weight(lambda s, h: h + s.w, D),
    "scalar": lambda rng: Step(lambda s, h: h * s.w, w=torch.tensor(0.7)),
    "positions": with_weight(lambda s, h: h + s.w[: h.shape[1]], LONGEST, D),
    "first token": with_weight(
        lambda s, h: torch.cat([s.w.expand(len(h), 1, D), h[:, 1:]], 1), D
    ),
    "softmax of a weight": with_weight(  # twice: the sum of h would tie with its own
        lambda s, h: h @ (2 * s.w.softmax(-1)), D, D
    ),
    "inverse": with_weight(
        lambda s, h: h @ torch.linalg.inv(s.w @ s.w.T + torch.eye(D).to(h)), D, D
    ),
    "keys": with_weight(lambda s, h: (h @ s.w.T).softmax(-1) @ s.w, 4, D),
    "fourier": with_weight(fourier, D // 2 + 1, 2),
    "cast to complex": with_weight(cast, D, D),
    "conjugated": with_weight(conjugated, D),
    "half": in_type(torch.float16, 5e-3),
    "bfloat16": in_type(torch.bfloat16, 4e-2),
    "complex64": in_type(torch.complex64, 2e-4),
    "attention packed": with_weight(packed_attention, 3 * D, D),
    "low rank": lambda rng: Step(
        lambda s, h: F.linear(h, s.w + s.a @ s.b),
        w=weights(D, D),
        a=weights(D, 1),
        b=weights(1, D),
    ),
    "in place": lambda rng: Step(in_place, fc=linear(), w=weights(D)),
    "prelu": lambda rng: over_time(nn.PReLU(D)),
    "bilinear": lambda rng: Step(lambda s, h: s.l(h, h.cos()), l=nn.Bilinear(D, D, D)),
    "layer norm": lambda rng: Step(lambda s, h: s.norm(h), norm=nn.LayerNorm(D)),
    "rms norm": lambda rng: Step(lambda s, h: s.norm(h), norm=nn.RMSNorm(D)),
    "group norm": lambda rng: norm(nn.GroupNorm(rng.choice([1, D]), D)),
    "instance norm": lambda rng: over_time(nn.InstanceNorm1d(D, affine=True, eps=1.0)),
    "conv": lambda rng: conv(),
    "depthwise": lambda rng: conv(groups=D),
    "dilated": lambda rng: conv(dilation=2, bias=False),
    "recurrent": recurrent,
    "attention": attention,
    "experts": experts,
    "hooked": hooked,
    "buffer": lambda rng: frozen_buffer(),
    "bag": lambda rng: Step(bag, bag=nn.EmbeddingBag(VOCAB, D, mode="sum")),
    "codes": lambda rng: Step(
        lambda s, h: s.table((h.detach() > 0).sum(-1)) + h, table=nn.Embedding(4, D)
    ),
    "table of positions": lambda rng: Step(
        lambda s, h: h + s.table(torch.arange(h.shape[1])),
        table=nn.Embedding(LONGEST, D),
    ),
    "encoder layer": lambda rng: Step(
        lambda s, h: s.layer(h),
        layer=nn.TransformerEncoderLayer(D, 1, 4, dropout=0.0, batch_first=True),
    ),
}

# Exact or refused: ops that keep something made of data, or may after a branch on data,
# or that have complex parameters.
REFUSABLE: Dict[str, Callable[[random.Random], Step]] = {
    "remembers": with_linear(remembers, seen=0.0),
    "latches": with_linear(latches, seen=0.0),
    "counts": with_linear(counts, seen=0.0),
    "complex": lambda rng: Step(
        lambda s, h: (h.to(s.w.dtype) @ s.w).real,
        w=torch.randn(D, D, dtype=torch.complex128),
    ),
}

BINARY: Dict[str, Callable[[random.Random], Step]] = {
    "add": lambda rng: Step(lambda s, a, b: a + b),
    "times": lambda rng: Step(lambda s, a, b: a * b),
    "attends": lambda rng: Step(lambda s, a, b: (a @ b.mT).softmax(-1) @ b),
    "together": lambda rng: Step(
        lambda s, a, b: s.fc(torch.cat([a, b], -1)), fc=nn.Linear(2 * D, D)
    ),
    "where": lambda rng: Step(lambda s, a, b: torch.where(a > b, a, b)),
    "crossed": lambda rng: Step(
        lambda s, a, b: s.layer(a, b, b)[0],
        layer=nn.MultiheadAttention(D, 1, batch_first=True),
    ),
    "gated": lambda rng: Step(lambda s, a, b: s.fc(a).sigmoid() * b, fc=linear()),
    "either": lambda rng: Step(lambda s, a, b: a if bool(a.mean() > b.mean()) else b),
}
