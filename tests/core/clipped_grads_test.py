"""``clipped_grads``: what it promises, against each sample alone by plain autograd."""

import warnings
from typing import Any, Callable, Dict, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opacus_ext import Refused, clipped_grads, per_sample_grads
from opacus_ext.clipping import CLIPPINGS
from opacus_ext.grad_sample.core.gradients import gradients_alone
from opacus_ext.layers import SwitchFeedForward, TopKFeedForward
from tests import common
from tests.common import clipped_sum, norms_of
from tests.fuzz.ops import Opaque

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = dict(rtol=1e-8, atol=1e-9)


class Case(NamedTuple):
    """
    A loss of a sample, the parameters that it reads, and batches of some sizes.

    Attributes:
        build: of the case, gives ``(loss, params)``
        batch: of a number of samples
        compiled: whether it is compiled, as a whole
    """

    build: Callable[[], Any]
    batch: Callable[[int], Any]
    compiled: bool = True


def rows(size):
    return torch.randn(size, 4).double()


def ids(size):
    return torch.randint(0, 7, (size, 5))


def pair(size):
    return {"x": rows(size), "y": torch.randint(0, 3, (size,))}


def params_of(model: nn.Module) -> Dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def _model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


def of_weights(then, *shapes):
    """Builds a loss ``then(x, *weights)`` of weights of these shapes."""

    def build():
        torch.manual_seed(0)
        made = [torch.randn(*n).double().requires_grad_() for n in shapes]
        return lambda x: then(x, *made), {f"w{i}": w for i, w in enumerate(made)}

    return build


def of_layers(then, *sizes):
    """Builds a loss ``then(x, *layers)`` of linear layers of these sizes."""

    def build():
        layers = _model(*(nn.Linear(*size) for size in sizes))
        return lambda x: then(x, *layers), params_of(layers)

    return build


def mlp():
    model = _model(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def loss(sample):
        return F.cross_entropy(model(sample["x"]), sample["y"])

    return loss, params_of(model)


def tied(x, table, scale):
    h = F.embedding(x, table) * scale
    return F.cross_entropy(F.linear(h, table)[0], x[0])


def made_of_parameters(x, w, b):
    first, last = w.chunk(2, 1)
    h = F.linear(x, w * 2, b) + x @ w.t().contiguous()
    both = torch.cat([first, last.detach()], 1)
    return (h * b.exp()).pow(2).sum() + F.linear(x, both).sum() * w.sum()


def views(x, w):
    windows = w.unfold(0, 4, 2)  # overlap
    strided = w.as_strided((2, 4), (1, 2))
    return (x @ windows.t()).square().sum() + (x @ strided.t()).sum()


def complex_numbers(x, w):
    return (x.to(torch.complex128) @ torch.view_as_complex(w)).abs().sum()


def cast(x, w):
    z = F.linear(torch.fft.fft(x), w.to(torch.complex128)) / (2 + w[0].to(x.dtype))
    return (z.real + z.imag * z.real).sum()


def scattered(x, w):
    h = torch.select_scatter(x.expand(4, 4), w[0], 0, 1)
    return (h * torch.select_scatter(w, x[0], 1, -1)).sin().sum()


def of_aten(x, w):
    aten = torch.ops.aten
    rows = aten.embedding(w * x.sum(), x, 0)
    changed = aten.select_scatter(rows[0].cos(), w[1], 0, 2)
    return (rows + aten.embedding.default(w, x, 0) * changed).square().sum()


def moved_in_place(x, w):
    """vmap would leave them as they are, and the shape may be the same."""
    one = (x * w).flatten().as_strided_((4,), (0,), 1)
    two = (x * w).flatten().set_((x * x)[0].flip(0)).detach()
    return (one.cos() * w).sum() + (two * w.sin()).sum()


def changed_in_place(x, w):
    """What is made of a parameter, by data and without."""
    first, second = w * 2, w * 3
    first.masked_fill_(x > 0, 0)
    second[0] = w[1] * 3
    return F.linear(x, first).square().sum() * F.linear(x, second).cos().sum()


def written(x, w):
    changed = w * 2
    changed[0] = w[1] * 3
    return F.linear(x, changed).square().sum()


def written_in_a_view(x, w):
    made = w * 2
    made[:2].t()[0] = 0.0
    return F.linear(x, made + 1).square().sum()


def hooks(x, w):
    view, copied = w.t(), w.clone()
    view.register_hook(lambda g: 2 * g)
    copied.register_hook(lambda g: g * g)
    return (x @ view).square().sum() + (x @ copied).sum()


def padding_from_the_end(x, w):
    return F.embedding(x, w * x.sum(), -1).square().sum()


def branches(x, first, second):
    h = first(x) if x.sum() > 0 else second(x)
    return h[h > 0].sum()


def unused_frozen_twice():
    layer = _model(nn.Linear(4, 4))
    frozen = torch.randn(4).double()
    unused = torch.ones(3).double().requires_grad_()
    params = {**params_of(layer), "unused": unused, "frozen": frozen}
    return lambda x: (layer(layer(x)) * frozen).square().sum(), params


def biases_alone():
    """Which need no data, so that these may change in place."""
    model = _model(nn.Linear(4, 4), nn.Linear(4, 4))
    params = {n: p for n, p in params_of(model).items() if n.endswith("bias")}
    for name, p in params_of(model).items():
        p.requires_grad_(name in params)

    def loss(x):
        h = x * 2
        for layer in model:
            h += layer(h)
        return h.square().sum()

    return loss, params


def as_it_is(x, w):
    """What may return its argument, which a tracer takes for another tensor."""
    for same in (w.double(), w.to(w.dtype), w.type(w.dtype), w.contiguous()):
        x = x + F.linear(x, same).tanh()
    return x.square().sum()


def experts(kind, **kwargs):
    """A mixture of experts, most of which are not used by a sample."""

    def build():
        torch.manual_seed(0)
        layer = kind(4, 6, 8, **kwargs).double()

        def loss(x):
            y = layer(x[:, None] * torch.linspace(-1, 2, 5)[:, None].double())
            return y.square().sum() + layer.balancing.sum()

        return loss, params_of(layer)

    return build


TIED = of_weights(tied, (7, 6), (6,))
BRANCHES = of_layers(branches, (4, 4), (4, 4))
ONE_BY_ONE = of_layers(lambda x, layer: Opaque.apply(layer(x)).square().sum(), (4, 3))
CASES = {
    "mlp": Case(mlp, pair),
    "tied": Case(TIED, ids),
    "made of parameters": Case(of_weights(made_of_parameters, (3, 4), (3,)), rows),
    "views": Case(of_weights(views, (12,)), rows),
    "complex": Case(of_weights(complex_numbers, (4, 4, 2)), rows),
    "cast": Case(of_weights(cast, (4, 4)), rows),
    "scattered": Case(of_weights(scattered, (4, 4)), rows),
    "unused, frozen, twice": Case(unused_frozen_twice, rows, compiled=False),
    "cancels": Case(
        of_layers(lambda x, layer: (layer(x) - layer(x)).sum(), (4, 2)), rows, False
    ),
    "branches": Case(BRANCHES, rows, compiled=False),
    "changed in place": Case(of_weights(changed_in_place, (3, 4)), rows, False),
    "biases alone": Case(biases_alone, rows),
    "hooks": Case(of_weights(hooks, (4, 4)), rows, compiled=False),
    "padding from the end": Case(of_weights(padding_from_the_end, (7, 4)), ids),
    "one by one": Case(ONE_BY_ONE, rows, compiled=False),
    "moved in place": Case(of_weights(moved_in_place, (4,)), rows, False),
    "of aten": Case(of_weights(of_aten, (7, 4)), ids),
    "as it is": Case(of_weights(as_it_is, (4, 4)), rows),
    "one expert a token": Case(experts(SwitchFeedForward, capacity=2), rows),
    "two experts a token": Case(experts(TopKFeedForward), rows),
}
every_case = pytest.mark.parametrize("name", CASES)


def alone(loss, params, batch, size):
    """By name, the gradients ``[B, *shape]``, and the losses."""
    trained = {n: p for n, p in params.items() if p.requires_grad}
    grads = {n: p.new_zeros(size, *p.shape) for n, p in trained.items()}
    losses = []
    for i in range(size):
        value = loss(common.sample_of(batch, i))
        losses.append(value.detach())
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for name, g in zip(trained, found):
            if g is not None:
                grads[name][i] = g
    return grads, losses


def check(found, grads, losses, bound):
    # What cancels leaves the rounding of squares, under the root.
    torch.testing.assert_close(found.norms, norms_of(grads), rtol=1e-8, atol=1e-6)
    torch.testing.assert_close(list(found.losses), losses, **CLOSE)
    torch.testing.assert_close(found.sums, clipped_sum(grads, "flat", bound), **CLOSE)


def move(params):
    with torch.no_grad():
        for p in params.values():
            p.add_(0.01 * torch.randn_like(p))


def compiled(loss, params, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(
        lambda batch: clipped_grads(loss, params, batch, 0.5),
        backend=backend,
        fullgraph=True,
    )


@every_case
def test_sums(name):
    """Over steps with other data, numbers of samples, orders and groups."""
    case = CASES[name]
    loss, params = case.build()
    torch.manual_seed(1)
    for size, group in ((4, None), (1, None), (5, 2), (0, None), (7, 3), (4, None)):
        batch = case.batch(size)
        grads, losses = alone(loss, params, batch, size)
        bound = float(norms_of(grads).median()) + 0.01 if size else 1.0
        found = clipped_grads(loss, params, batch, bound, microbatch=group)
        check(found, grads, losses, bound)
        dense = per_sample_grads(loss, params, batch, microbatch=group)
        torch.testing.assert_close(dense.grads, grads, **CLOSE)
        move(params)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].compiled])
def test_compiled(name):
    case = CASES[name]
    loss, params = case.build()
    step = compiled(loss, params)
    torch.manual_seed(1)
    for _ in range(2):
        batch = case.batch(3)
        check(step(batch), *alone(loss, params, batch, 3), 0.5)
        move(params)


@pytest.mark.parametrize(
    "build, said",
    [
        (BRANCHES, "[Bb]ranch"),
        (of_weights(written, (3, 4)), "changed in place"),
        (of_weights(written_in_a_view, (3, 4)), "changed in place"),
    ],
)
def test_not_compiled(build, said):
    with pytest.raises(Exception, match=said):
        compiled(*build(), "eager")(rows(3))


def changing(x, w):
    data = 2 * x
    y = F.linear(data, w).square().sum()
    data.mul_(3)
    return y


def test_data_that_change_later_count_as_they_were():
    """Compiled; eagerly they are refused, as by autograd."""
    loss, params = of_weights(changing, (3, 4))()
    plain = lambda x: F.linear(2 * x, params["w0"]).square().sum()  # noqa: E731
    batch = rows(3)
    check(compiled(loss, params)(batch), *alone(plain, params, batch, 3), 0.5)


def test_compiled_under_autocast_with_bounds_that_change():
    """Norms and sums are not rounded: the sum of one sample is as long as its norm."""
    layer = nn.Linear(64, 64)
    params, batch = dict(layer.named_parameters()), torch.randn(1, 10, 64)

    def loss(x):
        return layer(x).float().square().sum()

    torch._dynamo.reset()
    step = torch.compile(
        lambda batch, bound: clipped_grads(loss, params, batch, bound),
        backend="aot_eager",
        fullgraph=True,
    )
    for bound in (1e6, 1.0, 0.5):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(batch, bound)
        total = torch.cat([g.flatten() for g in found.sums.values()]).norm()
        torch.testing.assert_close(total, found.norms[0].clamp(max=bound))


@pytest.mark.parametrize("kind", ["flat", "automatic", "normalized", "per_layer"])
def test_sensitivity(kind):
    loss, params = mlp()
    clipping = CLIPPINGS[kind].at([0.1] * 6 if kind == "per_layer" else 0.1)
    batch = pair(5)
    for size in range(1, 6):
        some = {n: x[:size] for n, x in batch.items()}
        sums = clipped_grads(loss, params, some, clipping).sums
        total = torch.cat([s.flatten() for s in sums.values()]).norm()
        assert total <= size * clipping.sensitivity("add_or_remove_one") + 1e-9
    assert clipping.sensitivity("replace_one") == 2 * clipping.sensitivity()


def test_a_clipping_of_ones_own():
    class Sign:
        def __call__(self, norms):
            return 1 / norms.clamp(min=1e-9)

        def sensitivity(self, relation):
            return 1.0

    loss, params = mlp()
    batch = pair(4)
    found = clipped_grads(loss, params, batch, Sign())
    for name, g in alone(loss, params, batch, 4)[0].items():
        expected = torch.einsum("b,b...->...", 1 / found.norms, g)
        torch.testing.assert_close(found.sums[name], expected, **CLOSE)


def test_aux_and_take():
    """Sequences of other lengths, taken out of a list, with what the loss tells."""
    layer = _model(nn.Linear(4, 2))
    batch = [rows(n) for n in (3, 1, 3, 2)]

    def loss(x):
        y = layer(x)
        return y.square().mean(), {"mean": y.mean(), "length": x.shape[1]}

    found = clipped_grads(
        loss, params_of(layer), batch, 0.3, take=lambda b, i: b[i][None]
    )
    assert found.aux["length"].tolist() == [3, 1, 3, 2]
    for x, mean in zip(batch, found.aux["mean"]):
        torch.testing.assert_close(layer(x).mean().detach(), mean)
    one = clipped_grads(loss, params_of(layer), batch[1][None], 0.3)
    torch.testing.assert_close(one.norms, found.norms[1:2])


def test_not_finite():
    loss, params = mlp()
    batch = pair(4)
    batch["x"][1, 0] = float("inf")
    with pytest.warns(RuntimeWarning, match="sample 1 is not finite"):
        found = clipped_grads(loss, params, batch, 0.3)
    rest = {n: x[[0, 2, 3]] for n, x in batch.items()}
    expected = clipped_grads(loss, params, rest, 0.3)
    for name in params:
        torch.testing.assert_close(found.sums[name], expected.sums[name])
    assert found.norms[1] == float("inf")
    with pytest.raises(Refused, match="sample 1 is not finite"):
        clipped_grads(loss, params, batch, 0.3, on_nonfinite="raise")


def test_half_precision():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    batch = torch.randn(5, 4).bfloat16()
    found = clipped_grads(
        lambda x: model(x).float().square().sum(), params_of(model), batch, 0.5
    )
    assert found.norms.dtype == torch.float32
    assert found.sums["weight"].dtype == torch.float32


def test_one_warning_says_what_runs_one_by_one():
    loss, params = ONE_BY_ONE()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            clipped_grads(loss, params, rows(3), 1.0)
    told = [str(w.message) for w in caught if "one sample after the other" in str(w)]
    assert len(told) == 1 and "Opaque.apply" in told[0]


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(batch=[torch.ones(3, 4), torch.ones(2)]), "one first dim"),
        (dict(batch=3), "no tensor"),
        (dict(batch=(rows(3), [1, 2, 3])), r"\[1\]\[0\] of type int is no tensor"),
        (dict(params={}), "No parameter"),
        (dict(clipping=-1.0), "sensitivity"),
        (dict(clipping=lambda norms: norms), "sensitivity"),
        (dict(clipping=True), "neither a number"),
        (dict(microbatch=0), "microbatch"),
        (dict(on_nonfinite="ignore"), "on_nonfinite"),
        (dict(loss=lambda x: x), "one real number"),
        (dict(take=lambda batch, i: 3), "without a tensor"),
    ],
)
def test_refused(change, match):
    layer = _model(nn.Linear(4, 2))
    given = dict(
        loss=lambda x: layer(x).sum(),
        params=params_of(layer),
        batch=rows(3),
        clipping=1.0,
    )
    with pytest.raises(Refused, match=match):
        clipped_grads(**{**given, **change})
    w = given["params"]["0.weight"]
    with pytest.raises(Refused, match="weight has a hook"):
        handle = w.register_hook(lambda g: 2 * g)
        clipped_grads(**given)
    handle.remove()
    with pytest.raises(Refused, match="one tensor"):
        clipped_grads(**{**given, "params": {"a": w, "b": w}})


def test_a_reentrant_checkpoint_leaves_gradients_that_are_there():
    """They belong to somebody else: they are no part of the sample's."""
    w = torch.ones(3, requires_grad=True)
    w.grad = there = torch.full((3,), 7.0)
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda x: x * w, x, use_reentrant=True).sum() + 2 * w.sum()
    found = gradients_alone([y], [torch.ones(())], [w])
    assert torch.equal(found[id(w)], torch.full((3,), 3.0))
    assert w.grad is there and torch.equal(there, torch.full((3,), 7.0))
