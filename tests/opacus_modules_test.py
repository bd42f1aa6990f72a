"""Opacus's own two classes, used without make_private, on layers that they can't read.

Each is compared with every sample alone through plain autograd, in float64.
"""

import copy
import warnings

import pytest
import torch
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    register_grad_sampler,
)
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

import opacus_ext
from opacus_ext.layers import (
    Experts,
    SelfAttention,
    SwitchFeedForward,
    TopKFeedForward,
)
from opacus_ext.re_attention import Propagating
from tests.common import Net, clipped_sum, net, norms_of, oracle

GSM, FAST = GradSampleModule, GradSampleModuleFastGradientClipping
both = pytest.mark.parametrize("stock", [GSM, FAST])
BOUND = 0.7


def losses_of(output):
    """Losses [B], of all tensors ``[B, ...]`` of an output."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum(y.flatten(1).square().sum(1) for y in outputs)


def compare(stock, model, batch, loss=None, forwards=1, reduction="sum"):
    """Compares one of Opacus's classes with each sample alone."""
    loss = loss or (lambda model, batch: losses_of(model(*batch)))
    want = oracle(model, batch, lambda *given: forwards * loss(*given))
    made = stock(model, loss_reduction=reduction, **_bound(stock))
    losses = sum(loss(made, batch) for _ in range(forwards))
    if stock is GSM:
        getattr(losses, reduction)().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(
                    p.grad_sample, want[name], atol=1e-8, rtol=1e-8
                )
        return made
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    DPTensorFastGradientClipping(made, optimizer, losses, reduction).backward()
    norms = made.per_sample_gradient_norms
    torch.testing.assert_close(norms, norms_of(want), atol=1e-8, rtol=1e-8)
    for name, total in clipped_sum(want, "flat", BOUND).items():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad, total, atol=1e-8, rtol=1e-8)
    return made


def _bound(stock):
    return dict(max_grad_norm=BOUND) if stock is FAST else {}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# -- the table -------------------------------------------------------------------------


def through(layer, then=lambda m, x: m.layer(x)):
    """A layer behind a linear one, whose gradient comes through the layer."""
    return net(
        lambda m, x, *rest: then(m, m.first(x), *rest), first=(4, 4), layer=layer
    )


def rnn(cls, then=lambda m, x: m.layer(x)[0], **kwargs):
    kwargs = {"batch_first": True, **kwargs}
    return through(lambda: cls(4, 3, **kwargs), then)


def last_states(m, x):
    out, (h, c) = m.layer(x)
    return out[:, -1], h.movedim(1, 0), c.movedim(1, 0)


def state_alone(m, x):
    return m.layer(x)[1].movedim(1, 0)


def from_states(m, x, h):
    return m.layer(x, hx=h.movedim(1, 0))[0]


def batch_second(m, x):
    return m.layer(x.movedim(1, 0))[0].movedim(1, 0)


def mha(then, **kwargs):
    kwargs = {"batch_first": True, **kwargs}
    return through(lambda: nn.MultiheadAttention(4, 2, **kwargs), then)


def attend(m, x, **kwargs):
    return m.layer(x, x, x, **kwargs)[0]


def attend_padded(m, x, mask):
    out, weights = m.layer(x, x, x, key_padding_mask=~mask)
    return out * mask[..., None], weights * mask[..., None]


def attend_causal(m, x):
    seen = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return attend(m, x, attn_mask=seen, is_causal=True, need_weights=False)


def attend_masked(m, x, added):
    return attend(m, x, attn_mask=added.flatten(0, 1))


def attend_second(m, x):
    x = x.movedim(1, 0)
    return m.layer(query=x, key=x, value=x, need_weights=False)[0].movedim(1, 0)


def moe(cls, *args, **kwargs):
    def then(m, x, *mask):
        return m.layer(x, *mask), m.layer.balancing[:, None]

    return through(lambda: cls(4, 6, 3, *args, **kwargs), then)


def own_router(m, x):
    weights, index = m.router(x).softmax(-1).topk(2, dim=-1)
    return m.layer(x, index, weights)


def experts():
    return Net(
        lambda m, x: own_router(m, m.first(x)),
        first=nn.Linear(4, 4),
        router=nn.Linear(4, 3),
        layer=Experts(4, 6, 3, gated=True, bias=True),
    )


def tied():
    model = Net(
        lambda m, ids: m.head(m.middle(m.table(ids)).tanh()),
        table=nn.Embedding(7, 4, padding_idx=0),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 7),
    )
    model.head.weight = model.table.weight
    return model


def shared_layer():
    inner = nn.Linear(4, 4)
    parts = nn.Sequential(inner, nn.Tanh()), nn.Sequential(inner)
    return Net(lambda m, x: m.two(m.one(x)), one=parts[0], two=parts[1])


def encoder_layer():
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


X = (4, 5, 4)
PADDING = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
CASES = {
    "switch": (moe(SwitchFeedForward, capacity=2), lambda: (randn(*X),)),
    "switch padded": (moe(SwitchFeedForward), lambda: (randn(*X), PADDING.bool())),
    "top k": (moe(TopKFeedForward), lambda: (randn(*X),)),
    "top k padded": (moe(TopKFeedForward), lambda: (randn(*X), PADDING.bool())),
    "experts": (experts, lambda: (randn(*X),)),
    "attention": (mha(attend), lambda: (randn(*X),)),
    "attention padded": (mha(attend_padded), lambda: (randn(*X), PADDING.bool())),
    "attention causal": (mha(attend_causal), lambda: (randn(*X),)),
    "attention masked": (mha(attend_masked), lambda: (randn(*X), randn(4, 2, 5, 5))),
    "attention second": (mha(attend_second, batch_first=False), lambda: (randn(*X),)),
    "attention, T = B": (mha(attend), lambda: (randn(4, 4, 4),)),
    "attention, extra keys": (
        mha(attend, add_bias_kv=True, add_zero_attn=True, bias=False),
        lambda: (randn(*X),),
    ),
    "attention, other widths": (
        mha(lambda m, x, y: m.layer(x, y, y)[0], kdim=3, vdim=3),
        lambda: (randn(*X), randn(4, 6, 3)),
    ),
    "encoder layer": (
        through(encoder_layer, lambda m, x, p: m.layer(x, src_key_padding_mask=~p)),
        lambda: (randn(*X), PADDING.bool()),
    ),
    "self-attention": (
        through(lambda: SelfAttention(4, 2), lambda m, x, mask: m.layer(x, mask=mask)),
        lambda: (randn(*X), PADDING.bool()),
    ),
    "lstm": (rnn(nn.LSTM), lambda: (randn(*X),)),
    "lstm states": (rnn(nn.LSTM, last_states, num_layers=2), lambda: (randn(*X),)),
    "lstm projected": (
        rnn(nn.LSTM, last_states, proj_size=2, bidirectional=True),
        lambda: (randn(*X),),
    ),
    "gru": (rnn(nn.GRU, bidirectional=True), lambda: (randn(*X),)),
    "gru, state alone": (rnn(nn.GRU, state_alone), lambda: (randn(*X),)),
    "gru, from a state": (
        rnn(nn.GRU, from_states),
        lambda: (randn(*X), randn(4, 1, 3)),
    ),
    "rnn": (rnn(nn.RNN, nonlinearity="relu"), lambda: (randn(*X),)),
    "rnn, batch second": (
        rnn(nn.RNN, batch_second, batch_first=False),
        lambda: (randn(*X),),
    ),
    "tied": (tied, lambda: (torch.randint(0, 7, (4, 5)),)),
    "one layer twice": (shared_layer, lambda: (randn(*X),)),
}
every_case = pytest.mark.parametrize("case", CASES)


def build(case, seed=0):
    torch.manual_seed(seed)
    made, batch = CASES[case]
    return made().double(), batch()


@both
@every_case
def test_exact(stock, case):
    compare(stock, *build(case))


@both
@every_case
@pytest.mark.parametrize("size", [1, 3])
def test_one_sample_and_mean(stock, case, size):
    model, batch = build(case)
    compare(stock, model, tuple(x[:size] for x in batch), reduction="mean")


FROZEN = {
    "switch": "router",
    "experts": "up_proj",
    "attention": "in_proj",
    "attention padded": "out_proj",
    "lstm": "weight_hh",
    "gru": "bias",
    "tied": "middle",
}


@both
@pytest.mark.parametrize("case", FROZEN)
def test_frozen_part(stock, case):
    model, batch = build(case)
    frozen = [n for n, _ in model.named_parameters() if FROZEN[case] in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    compare(stock, model, batch)
    assert frozen and len(frozen) < len(list(model.parameters()))
    for name in frozen:
        assert getattr(model.get_parameter(name), "grad_sample", None) is None


@both
@pytest.mark.parametrize("case", ["experts", "attention", "lstm", "gru", "tied"])
def test_two_forwards(stock, case):
    model, batch = build(case)
    if stock is FAST:  # Opacus refuses two calls of layers with ghost norms
        kept = {"layer", "table", "head"}
        for name, child in model.named_children():
            child.requires_grad_(name in kept)
    compare(stock, model, batch, forwards=2)


@both
def test_layer_alone(stock):
    """A layer that is the model itself, called by names."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = randn(4, 5, 4)
    compare(stock, layer, x, lambda m, x: losses_of(m(query=x, key=x, value=x)[0]))


@both
def test_no_samples(stock):
    model, (x,) = build("lstm")
    made = stock(model, loss_reduction="sum")
    made(x[:0]).sum().backward()
    for p in model.parameters():
        if stock is GSM:
            assert p.grad_sample.shape == (0, *p.shape)
        else:
            assert p._norm_sample.shape == (0,)


@both
def test_accumulated_batches(stock):
    """Gradients of several batches are a list, or refused, as those of other layers."""
    if stock is FAST:
        return
    model, (x,) = build("lstm")
    made = stock(model, loss_reduction="sum")
    for _ in range(2):
        losses_of(made(x)).sum().backward()
    assert all(len(p.grad_sample) == 2 for p in model.parameters())
    made.zero_grad()
    made.forbid_grad_accumulation()
    losses_of(made(x)).sum().backward()
    with pytest.raises(ValueError, match="grad accumulation"):
        losses_of(made(x)).sum().backward()


class Attending(Propagating):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.attention = SelfAttention(4, 2, causal=True)

    def propagate(self, x):
        return x.through(self.first).through(self.attention)


@both
def test_re_attention(stock):
    """The correction is the same with hooks and without, and gradients are exact."""
    torch.manual_seed(0)
    model = Attending().double()
    x = randn(4, 5, 4)
    made = stock(model, loss_reduction="sum", **_bound(stock))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=3.0,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    with torch.no_grad():
        plain = made(x)
    tracker = opacus_ext.track_errors(made, optimizer)
    output = made(x)
    assert not torch.allclose(plain, output)
    made.disable_hooks()
    rows = torch.cat([model(x[b : b + 1]) for b in range(4)])
    torch.testing.assert_close(output, rows, atol=1e-8, rtol=1e-8)
    want = []
    for b in range(4):
        model.zero_grad()
        losses_of(model(x[b : b + 1])).sum().backward()
        want.append({n: p.grad.clone() for n, p in model.named_parameters()})
    made.to_standard_module()
    made = stock(model, loss_reduction="sum", **_bound(stock))
    losses_of(made(x)).sum().backward()
    for name, p in model.named_parameters():
        grads = torch.stack([w[name] for w in want])
        if stock is GSM:
            torch.testing.assert_close(p.grad_sample, grads, atol=1e-8, rtol=1e-8)
        else:
            norms = grads.flatten(1).norm(dim=1)
            torch.testing.assert_close(p._norm_sample, norms, atol=1e-8, rtol=1e-8)
    tracker.detach()


# -- what is refused -------------------------------------------------------------------

DROPPING = {
    "layer (MultiheadAttention)": lambda: mha(attend, dropout=0.1)(),
    "layer (LSTM)": lambda: rnn(nn.LSTM, num_layers=2, dropout=0.1)(),
    "layer (GRU)": lambda: rnn(nn.GRU, num_layers=2, dropout=0.1)(),
    "layer (RNN)": lambda: rnn(nn.RNN, num_layers=2, dropout=0.1)(),
}


@both
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_refused(stock, name):
    """Where the layer is called in training mode; make_private takes the wrapper."""
    made = stock(DROPPING[name]().eval())
    made(torch.randn(2, 5, 4))
    with pytest.raises(opacus_ext.Refused, match="dropout=0.1") as caught:
        made.train()(torch.randn(2, 5, 4))
    assert caught.value.module == name and "make_private" in caught.value.remedy


def test_dropout_of_one_layer_drops_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GSM(nn.LSTM(4, 3, dropout=0.1))


@both
def test_self_attention_may_drop(stock):
    """Its two linear layers are not computed again."""
    stock(SelfAttention(4, 2, dropout=0.5))


@both
@pytest.mark.parametrize(
    "model, given, said",
    [
        (
            lambda: nn.LSTM(4, 3),
            lambda: (nn.utils.rnn.pack_sequence([torch.randn(2, 4)]),),
            "PackedSequence",
        ),
        (lambda: nn.GRU(4, 3), lambda: (torch.randn(5, 4),), "no batch dim"),
        (
            lambda: nn.MultiheadAttention(4, 2),
            lambda: (torch.randn(5, 4),) * 3,
            "query of shape",
        ),
        (
            lambda: Experts(4, 5, 3),
            lambda: (torch.randn(6, 4), torch.zeros(6, 1).long(), torch.ones(6, 1)),
            "to which sample",
        ),
    ],
)
def test_inputs_that_are_not_cut(stock, model, given, said):
    with pytest.raises(opacus_ext.Refused, match=said):
        stock(model())(*given())


@both
@pytest.mark.parametrize(
    "layer, then",
    [
        (lambda: nn.LSTM(4, 4, batch_first=True), lambda m, x: m.layer(x + m.own)[0]),
        (lambda: SwitchFeedForward(4, 5, 3), lambda m, x: m.layer(x + m.own)),
        (
            lambda: nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
            lambda m, x: attend(m, x + m.own),
        ),
    ],
)
def test_inside_of_what_functorch_runs(stock, layer, then):
    """A parameter of the model's own makes Opacus run all of it by functorch."""
    model = Net(then, own=torch.randn(5, 4), layer=layer()).double()
    with pytest.raises(opacus_ext.Refused, match=r"the model \(Net\) owns parameters"):
        stock(model)
    model.own.requires_grad_(False)
    if getattr(model.layer, "dropout", 0) == 0:
        compare(stock, model, (randn(*X),))


@both
def test_attention_inside_of_what_functorch_runs(stock):
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    then = lambda m, x: attend(m, x + m.own)  # noqa: E731
    compare(stock, Net(then, own=randn(5, 4), layer=layer).double(), (randn(*X),))


def test_ghost_norms_of_other_tied_layers():
    model = nn.Sequential(nn.EmbeddingBag(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    with pytest.raises(opacus_ext.Refused, match=r"0 \(EmbeddingBag\) shares"):
        FAST(model)


def test_sizes_that_differ():
    """A head on rows of tokens beside a table of samples."""
    model = tied()
    model.middle.requires_grad_(False)
    model.then = lambda m, ids: m.head(m.table(ids).flatten(0, 1))
    made = FAST(model, loss_reduction="sum")
    with pytest.raises(opacus_ext.Refused, match="for 4 and for 20 samples"):
        made(torch.randint(0, 7, (4, 5))).sum().backward()


@both
def test_inputs_changed_in_place(stock):
    model, (x,) = build("lstm")

    def forward(m, x):
        y = m.first(x)
        out = m.layer(y.detach())[0]
        y.detach().mul_(2)
        return out

    model.then = forward
    model.first.requires_grad_(False)
    made = stock(model, loss_reduction="sum")
    with pytest.raises((opacus_ext.Refused, RuntimeError), match="in place"):
        made(x).sum().backward()


@both
def test_weights_that_are_computed(stock):
    """In the forward by a parametrization, or before it by a hook."""
    torch.manual_seed(0)
    layer, x = nn.GRU(4, 3, batch_first=True).double(), randn(*X)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    compare(stock, layer, x, lambda m, x: losses_of(m(x)[0]))
    layer = nn.GRU(4, 3, batch_first=True).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer, "weight_hh_l0")
    with pytest.raises(opacus_ext.Refused, match="reads weight_hh_l0"):
        stock(layer)(x)


@both
def test_second_backward(stock):
    model, (x,) = build("lstm")
    loss = stock(model.layer, loss_reduction="sum")(x)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(opacus_ext.Refused, match="second backward"):
        loss.backward()


# -- neighbors -------------------------------------------------------------------------


@both
def test_copied_and_removed(stock):
    model, batch = build("attention")
    made = copy.deepcopy(stock(model, loss_reduction="sum", **_bound(stock)))
    again = made.to_standard_module()
    assert not any(m._forward_hooks for m in again.modules())
    compare(stock, again, batch)


@both
def test_autocast(stock):
    """The forward is computed again in the dtype that it had."""
    model, (x,) = build("attention")
    made = stock(model.float(), loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(x.float()).float().square().sum()
    loss.backward()
    layer = model.layer.in_proj_weight
    if stock is GSM:
        torch.testing.assert_close(
            layer.grad_sample.sum(0), layer.grad, rtol=0.05, atol=0.05
        )


@both
def test_samplers_of_users_come_first(stock):
    asked = []

    class Own(nn.LSTM):
        pass

    @register_grad_sampler(Own)
    def sampler(layer, activations, backprops):
        asked.append(type(layer))
        return {
            p: backprops.new_zeros(len(backprops), *p.shape) for p in layer.parameters()
        }

    try:
        made = stock(Own(4, 3, batch_first=True))
        made(torch.randn(2, 5, 4))[0].sum().backward()
        assert asked == [Own]
    finally:
        for table in (GSM.GRAD_SAMPLERS, FAST.GRAD_SAMPLERS):
            table.pop(Own, None)


@both
def test_unregistered(stock):
    opacus_ext.unregister()
    try:
        made = stock(nn.LSTM(4, 3, batch_first=True), loss_reduction="sum")
        assert not hasattr(GSM.add_hooks, "__wrapped__")
        with pytest.raises(Exception):
            made(torch.randn(2, 5, 4))[0].sum().backward()
    finally:
        opacus_ext.register()
