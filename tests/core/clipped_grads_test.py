"""``clipped_grads``: what it promises, against each sample alone by plain autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opacus_ext import Refused, clipped_grads
from opacus_ext.grad_sample.core.gradients import gradients_alone
from opacus_ext.layers import SwitchFeedForward, TopKFeedForward
from tests.common import assert_same, clipped_sum, net, oracle
from tests.fuzz.ops import Opaque
from tests.zoo import Case, check, linear

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = (4, 1, 5, 0, 7, 4)
X = [torch.randn(size, 4).double() for size in SIZES]
IDS = [torch.randint(0, 7, (size, 5)) for size in SIZES]


def loss_of(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def case(then, batches=X, compiled=True, **parts):
    """``then(m, x)`` gives the loss of a sample, ``[]``."""
    modes = ("function", "compiled") if compiled else ("function",)
    model = net(lambda m, *inputs, **named: then(m, *inputs, **named)[None], **parts)
    return Case(model, batches, loss=loss_of, modes=modes)


def of_weights(then, *shapes, **kwargs):
    """The loss is ``then(x, *weights)``, of weights of these shapes."""
    return case(
        lambda m, x: then(x, *m.weights),
        weights=lambda: nn.ParameterList(torch.randn(*shape) for shape in shapes),
        **kwargs,
    )


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


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


def branches(m, x):
    h = m.first(x) if x.sum() > 0 else m.second(x)
    return h[h > 0].sum()


def biases_alone(m, x):
    """Which need no data, so that these may change in place."""
    h = x * 2
    for layer in m.layers:
        h += layer(h)
    return h.square().sum()


def as_it_is(x, w):
    """What may return its argument, which a tracer takes for another tensor."""
    for same in (w.double(), w.to(w.dtype), w.type(w.dtype), w.contiguous()):
        x = x + F.linear(x, same).tanh()
    return x.square().sum()


def experts(m, x):
    """Most of them are not used by a sample."""
    y = m.layer(x[:, None] * torch.linspace(-1, 2, 5)[:, None].double())
    return y.square().sum() + m.layer.balancing.sum()


def frozen_layers():
    made = nn.ModuleList([linear(), linear()])
    for layer in made:
        layer.weight.requires_grad_(False)
    return made


BRANCHES = case(branches, first=(4, 4), second=(4, 4), compiled=False)
CASES = {
    "mlp": case(
        lambda m, x, y: F.cross_entropy(m.layers(x), y),
        [{"x": x, "y": torch.randint(0, 3, x.shape[:1])} for x in X],
        layers=mlp,
    ),
    "tied": of_weights(tied, (7, 6), (6,), batches=IDS),
    "made of parameters": of_weights(made_of_parameters, (3, 4), (3,)),
    "views": of_weights(views, (12,)),
    "complex": of_weights(complex_numbers, (4, 4, 2)),
    "cast": of_weights(cast, (4, 4)),
    "scattered": of_weights(scattered, (4, 4)),
    "unused, frozen, twice": case(
        lambda m, x: (m.layer(m.layer(x)) * m.frozen).square().sum(),
        compiled=False,
        layer=(4, 4),
        unused=lambda: torch.ones(3),
        frozen=lambda: nn.Parameter(torch.randn(4), requires_grad=False),
    ),
    "cancels": case(
        lambda m, x: (m.layer(x) - m.layer(x)).sum(), compiled=False, layer=(4, 2)
    ),
    "branches": BRANCHES,
    "changed in place": of_weights(changed_in_place, (3, 4), compiled=False),
    "biases alone": case(biases_alone, layers=frozen_layers),
    "hooks": of_weights(hooks, (4, 4), compiled=False),
    "padding from the end": of_weights(
        lambda x, w: F.embedding(x, w * x.sum(), -1).square().sum(),
        (7, 4),
        batches=IDS,
    ),
    "one by one": case(
        lambda m, x: Opaque.apply(m.layer(x)).square().sum(),
        compiled=False,
        layer=(4, 3),
    )._replace(warns="one sample after the other.*Opaque.apply|Opaque.apply.*one sam"),
    "moved in place": of_weights(moved_in_place, (4,), compiled=False),
    "of aten": of_weights(of_aten, (7, 4), batches=IDS),
    "as it is": of_weights(as_it_is, (4, 4)),
    "one expert a token": case(
        experts, layer=lambda: SwitchFeedForward(4, 6, 8, capacity=2)
    ),
    "two experts a token": case(experts, layer=lambda: TopKFeedForward(4, 6, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_sums(name):
    """Over steps with other data and numbers of samples, at once and in groups."""
    for microbatch in (None, 2):
        given = dict(kwargs=dict(microbatch=microbatch))
        check(CASES[name]._replace(**given), "function")


@pytest.mark.parametrize("name", [n for n in CASES if len(CASES[n].modes) > 1])
def test_compiled(name):
    some = [x for x in CASES[name].batches[:3:2]]
    check(CASES[name]._replace(batches=some), "compiled")


@pytest.mark.parametrize(
    "made, said",
    [
        (BRANCHES, "[Bb]ranch"),
        (of_weights(written, (3, 4)), "changed in place"),
        (of_weights(written_in_a_view, (3, 4)), "changed in place"),
    ],
)
def test_what_is_not_compiled(made, said):
    with pytest.raises(Exception, match=said):
        check(made, "compiled")


def test_data_that_change_later_count_as_they_were():
    """Compiled; eagerly they are refused, as by autograd."""

    def changing(m, x):
        data = 2 * x
        y = m(data).square().sum()
        if torch.compiler.is_compiling():
            data.mul_(3)
        return y[None]

    some = [x for x in X[:3:2]]
    check(Case(lambda: nn.Linear(4, 3), some, loss=changing), "compiled")


def test_norms_and_sums_of_compiled_steps_are_not_rounded_by_autocast():
    """The sum of one sample is as long as its norm, for any bound."""
    layer = nn.Linear(64, 64)
    params, batch = dict(layer.named_parameters()), torch.randn(1, 10, 64)

    def clip(batch, bound):
        return clipped_grads(
            lambda x: layer(x).float().square().sum(), params, batch, bound
        )

    torch._dynamo.reset()
    step = torch.compile(clip, backend="aot_eager", fullgraph=True)
    for bound in (1e6, 1.0, 0.5):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(batch, bound)
        total = torch.cat([g.flatten() for g in found.sums.values()]).norm()
        torch.testing.assert_close(total, found.norms[0].clamp(max=bound))


LAYER, BATCH = nn.Linear(4, 3).double(), torch.randn(4, 4).double()
GIVEN = dict(
    loss=lambda x: LAYER(x).square().sum(),
    params=dict(LAYER.named_parameters()),
    batch=BATCH,
    clipping=0.3,
)


def of_layer(**changes):
    return clipped_grads(**{**GIVEN, **changes})


def grads_of_layer(batch):
    return oracle(LAYER, batch, lambda m, x: m(x).square().sum(1))


class Sign:
    """A clipping of one's own."""

    def __call__(self, norms):
        return 1 / norms.clamp(min=1e-9)

    def sensitivity(self, relation):
        return 1.0


def test_a_clipping_of_ones_own():
    found = of_layer(clipping=Sign())
    sums = {n: (g.T / found.norms).T.sum(0) for n, g in grads_of_layer(BATCH).items()}
    assert_same(found.sums, sums)


def test_aux_and_take():
    """Sequences of other lengths, taken out of a list, with what the loss tells."""
    batch = [torch.randn(n, 4).double() for n in (3, 1, 3, 2)]

    def loss(x):
        y = LAYER(x)
        return y.square().mean(), {"mean": y.mean(), "length": x.shape[1]}

    found = of_layer(loss=loss, batch=batch, take=lambda b, i: b[i][None])
    assert found.aux["length"].tolist() == [3, 1, 3, 2]
    for x, mean in zip(batch, found.aux["mean"]):
        torch.testing.assert_close(LAYER(x).mean().detach(), mean)
    one = of_layer(loss=loss, batch=batch[1][None])
    torch.testing.assert_close(one.norms, found.norms[1:2])


def test_a_sample_that_is_not_finite_is_left_out():
    batch = BATCH.clone()
    batch[1, 0] = float("inf")
    with pytest.warns(RuntimeWarning, match="sample 1 is not finite"):
        found = of_layer(batch=batch)
    rest = grads_of_layer(batch[[0, 2, 3]])
    assert_same(found.sums, clipped_sum(rest, "flat", 0.3))
    assert not found.norms[1].isfinite()
    with pytest.raises(Refused, match="sample 1 is not finite"):
        of_layer(batch=batch, on_nonfinite="raise")


def test_half_precision_is_summed_in_float32():
    model = nn.Linear(4, 3).bfloat16()
    found = clipped_grads(
        lambda x: model(x).float().square().sum(),
        dict(model.named_parameters()),
        torch.randn(5, 4).bfloat16(),
        0.5,
    )
    assert found.norms.dtype == found.sums["weight"].dtype == torch.float32


def test_one_warning_says_what_runs_one_by_one(recwarn):
    for _ in range(3):
        of_layer(loss=lambda x: Opaque.apply(LAYER(x)).sum())
    told = [str(w.message) for w in recwarn if "one sample after" in str(w.message)]
    assert len(told) == 1 and "Opaque.apply" in told[0]


ONES, W = torch.ones(2, 4).double(), LAYER.weight


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(batch=[torch.ones(3, 4), torch.ones(2)]), "one first dim"),
        (dict(batch=3), "no tensor"),
        (dict(batch=(ONES, [1, 2])), r"\[1\]\[0\] of type int is no tensor"),
        (dict(batch={"ids": [[1, 2], [3, 4]]}), "type int"),
        (dict(batch={"x": ONES, "names": ["a", "b"]}), "type str"),
        (dict(batch=torch.eye(4).to_sparse_csr()), "torch.sparse_csr"),
        (dict(batch=torch.eye(4).to_sparse()), "torch.sparse_coo"),
        (dict(batch=torch.nested.nested_tensor([*ONES])), "nested tensors"),
        (dict(params={}), "No parameter"),
        (dict(params=[W]), "params is a dict.*list"),
        (dict(params=LAYER), "params is a dict.*Linear"),
        (dict(params=None), "params is a dict.*NoneType"),
        (dict(params={"a": W, "b": W}), "one tensor"),
        (dict(clipping=-1.0), "sensitivity"),
        (dict(clipping=lambda norms: norms), "sensitivity"),
        (dict(clipping=True), "neither a number"),
        (dict(microbatch=0), "microbatch"),
        (dict(microbatch=True), "microbatch.*True"),
        (dict(on_nonfinite="ignore"), "on_nonfinite"),
        (dict(loss=lambda x: x), "one real number"),
        (dict(loss=lambda x: LAYER(x).sum() * 1j), "one real number.*complex"),
        (dict(take=lambda batch, i: 3), "without a tensor"),
        (dict(take=3), "take is a function.*int"),
        *(
            (dict(loss=lambda x, aux=aux: (LAYER(x).sum(), aux)), said)
            for aux, said in (
                ("a", "type str"),
                ({"x": [None]}, "type NoneType"),
                (object(), "type object"),
                (torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
            )
        ),
    ],
)
def test_arguments_that_are_refused(changes, match):
    with pytest.raises(Refused, match=match):
        of_layer(**changes)
    none = of_layer(loss=lambda x: (LAYER(x).sum(), None))
    assert none.aux is None


def test_hooks_of_parameters_are_refused():
    handle = W.register_hook(lambda g: 2 * g)
    with pytest.raises(Refused, match="weight has a hook"):
        of_layer()
    handle.remove()


def test_a_reentrant_checkpoint_leaves_gradients_that_are_there():
    """They belong to somebody else: they are no part of the sample's."""
    w = torch.ones(3, requires_grad=True)
    w.grad = there = torch.full((3,), 7.0)
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda x: x * w, x, use_reentrant=True).sum() + 2 * w.sum()
    found = gradients_alone([y], [torch.ones(())], [w])
    assert torch.equal(found[id(w)], torch.full((3,), 3.0))
    assert w.grad is there and torch.equal(there, torch.full((3,), 7.0))
