"""What users keep stays theirs: hooks, lists, attributes and globals see the batch."""

import pytest
import torch
from torch import nn

from tests.common import make_private, square_loss, squares
from tests.samplewise.common import steps

D = 3
KEPT = []  # what forwards and hooks of these tests keep


class Opaque(torch.autograd.Function):
    """What vmap has no rule for."""

    @staticmethod
    def forward(ctx, x, module):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


class Model(nn.Module):
    """
    Args:
        how: its samples run: "at once", "split" by what they say, or one by one: "scan"
    """

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.one, self.two, self.three = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        h = self.one(x)
        if self.how == "split":
            one = len(h) == 1
            parts = [h] if one else h.split(1)
            h = torch.cat([p if bool(p.sum() > 0) else p.sin() for p in parts])
        if self.how == "scan":
            h = Opaque.apply(h, self)
        return self.three(self.two(h.tanh()))


def batches(*sizes):
    torch.manual_seed(1)
    return [torch.randn(n, 4, D).double() for n in sizes]


WAYS = ["at once", "split", "scan"]
every_way = pytest.mark.parametrize("how", WAYS)
pytestmark = pytest.mark.filterwarnings("ignore:.*one sample after the other")


@pytest.fixture(autouse=True)
def nothing_is_kept():
    KEPT.clear()
    yield
    KEPT.clear()


@every_way
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_hooks_see_the_batch_once(mode, how):
    """In the first step too, with values that could be computed with at once."""
    model = Model(how).double()
    seen = []

    def hook(module, args, output):
        (x,) = args
        seen.append((module, x.shape, output.shape, float(output.detach().sum())))

    def before(module, args):
        seen.append((module, args[0].shape, type(args[0])))

    for part in (model.one, model.two):
        part.register_forward_hook(hook)
        part.register_forward_pre_hook(before)
    model.register_forward_hook(hook)
    private = make_private(model, mode, batch_size=4)
    for x in batches(4, 3, 1, 4):
        del seen[:]
        with torch.no_grad():  # as without privacy
            model(x)
        expected = list(seen)
        del seen[:]
        private.backward(x, square_loss)
        assert len(seen) == len(expected) == 5
        for got, wanted in zip(seen, expected):
            assert got[:3] == wanted[:3]
            if len(got) > 3:
                assert got[3] == pytest.approx(wanted[3])
        private.optimizer.step()
        private.optimizer.zero_grad()


@every_way
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_gradients_flow_through_what_hooks_keep(mode, how):
    def loss(model, x):
        KEPT.clear()
        out = model(x)
        (kept,) = KEPT
        return squares(out) + kept.square().sum((1, 2))

    model = Model(how)
    model.two.register_forward_hook(lambda m, args, out: KEPT.append(out))
    steps(model, batches(4, 3, 1, 4), mode, loss_fn=loss)


@every_way
def test_hooks_that_return_something(how):
    """They are part of what the model computes, and run for each sample."""

    def hook(module, args, output):
        return output * output.shape[1] + output.mean(0)

    model = Model(how)
    model.two.register_forward_hook(hook)
    model.one.register_forward_pre_hook(lambda m, args: (args[0].cos(),))
    steps(model, batches(1, 1), "ghost_bk")  # as each sample is the whole batch
    model = Model(how)
    model.two.register_forward_hook(lambda m, args, out: out.sin())
    model.one.register_forward_pre_hook(lambda m, args: (args[0].cos(),))
    steps(model, batches(4, 3, 1, 4), "ghost_bk")


def test_hooks_that_return_something_of_the_batch():
    """Once it is known that they do, what they mix is seen."""
    model = Model("at once").double()
    model.two.register_forward_hook(lambda m, args, out: out - out.mean(0))
    private = make_private(model, "ghost_bk", batch_size=4)
    x, y = batches(4, 4)
    with pytest.raises(RuntimeError, match="mixed"):
        private.step(x, square_loss)
        private.step(y, square_loss)


class Tapped(nn.Module):
    """Reads in its forward what a hook on its own part has kept."""

    def __init__(self, use):
        super().__init__()
        self.one, self.two, self.use = nn.Linear(D, D), nn.Linear(D, D), use
        self.one.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.tap = self.use(output)

    def forward(self, x):
        h = self.one(x)
        return self.two(h.tanh()) + self.tap


def test_forward_reads_what_a_hook_keeps():
    steps(Tapped(lambda x: x), batches(4, 3, 4))


def test_forward_reads_what_a_hook_computes_of_the_batch():
    private = make_private(
        Tapped(lambda x: x.detach().mean(0)).double(), "ghost_bk", batch_size=4
    )
    with pytest.raises(RuntimeError, match="a hook of the user"):
        private.step(batches(4)[0], square_loss)


class Keeper(Model):
    """Keeps activations in a list, an attribute, a dictionary, a global, a closure."""

    def __init__(self, how):
        super().__init__(how)
        self.listed, self.named = [], {}

    def forward(self, x):
        out = super().forward(x)
        h = out.tanh()
        self.listed.append(h)
        self.named["h"] = h
        self.kept = [h, (h.sum(1),)]
        KEPT.append(h)
        return out


@every_way
def test_lists_attributes_and_globals(how):
    model = Keeper(how).double()
    private = make_private(model, "ghost_bk", batch_size=4)
    for number, x in enumerate(batches(4, 4, 3)):
        private.step(x, square_loss)
        expected = 1 + number
        assert len(KEPT) >= expected
        h = model.named["h"]
        assert type(h) is torch.Tensor and h.shape == x.shape
        assert model.kept[0] is h and model.kept[1][0].shape == (len(x), D)
        assert torch.isfinite(KEPT[-1].sum()) and "tensor" in repr(model.listed[-1])
        if how == "at once":
            assert len(model.listed) == len(KEPT) == expected
            assert model.listed[-1] is h and KEPT[-1] is h


@every_way
def test_no_trace_of_the_comparison(how):
    model = Keeper(how).double()
    model.count, model.seen = 0, torch.zeros(())
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    calls = []

    def forward(x):
        model.count += 1
        model.calls += 1
        model.seen += 1
        calls.append(1)
        return Keeper.forward(model, x)

    model.forward = forward
    private = make_private(model, "ghost_bk", batch_size=4)
    torch.manual_seed(3)
    x = batches(4)[0]
    state = torch.get_rng_state()
    private.backward(x, square_loss)
    assert torch.equal(state, torch.get_rng_state())
    assert model.count == 1 and int(model.calls) == 1 and float(model.seen) == 1
    if how == "at once":
        assert len(calls) == 1 and len(model.listed) == len(KEPT) == 1


def test_inputs_changed_in_place():
    class InPlace(nn.Linear):
        def forward(self, x):
            x.add_(1)
            return super().forward(x)

    x = torch.zeros(4, D)
    make_private(InPlace(D, 2), "ghost_bk", batch_size=4).backward(x, square_loss)
    assert torch.equal(x, torch.ones(4, D))


class Carries(nn.Module):
    """Adds what it has kept of the last batch."""

    def __init__(self, place, what=lambda h: h.detach().mean((0, 1))):
        super().__init__()
        self.fc, self.place, self.what = nn.Linear(D, D), place, what
        self.state = None
        self.register_buffer("running", torch.zeros(D))

    def forward(self, x):
        h = self.fc(x)
        new = self.what(h)
        if self.place == "attribute":
            old, self.state = self.state, new
        elif self.place == "global":
            old = KEPT[-1] if KEPT else None
            KEPT.append(new)
        elif self.place == "output":
            old, self.state = self.state, h
            old = None if old is None else old.detach().mean((0, 1))
        elif self.place == "buffer":
            old, self.running = self.running, new
        elif self.place == "in place":
            old = self.running.mul_(0.9).add_(new)
        if self.place == "opaque":
            old, self.state = self.state, Opaque.apply(new, self)
        return h if old is None else h + old


@pytest.mark.parametrize("mode", ["ghost_bk", "scan"])
@pytest.mark.parametrize("place", ["attribute", "global", "output", "opaque"])
def test_values_carried_from_batch_to_batch(mode, place):
    model = Carries(place).double()
    private = make_private(model, mode, batch_size=4)
    first, *others = batches(4, 4, 4)
    private.step(first, square_loss)
    with pytest.raises(RuntimeError, match="earlier batch"):
        for x in others:
            private.step(x, square_loss)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("place", ["buffer", "in place"])
def test_buffers_of_data(mode, place):
    model = Carries(place).double()
    private = make_private(model, mode, batch_size=4)
    with pytest.raises(RuntimeError, match="buffer running|mixed"):
        private.step(batches(4)[0], square_loss)
    assert model.running.shape == (D,) and not model.running.any()


def test_tensor_hooks():
    """A hook on an activation changes the gradient of each sample."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x):
            h = self.one(x)
            h.register_hook(lambda g: g / (1 + g.norm()))
            return self.two(h.tanh())

    steps(Hooked(), batches(4, 1, 3))
    private = make_private(Hooked().double(), "ghost", batch_size=4)
    with pytest.raises(RuntimeError, match="not linear"):
        private.step(batches(4)[0], square_loss)


@every_way
def test_retained_gradients(how):
    class Retains(Model):
        def forward(self, x):
            self.h = self.one(x)
            self.h.retain_grad()
            return self.two(self.h)

    model = Retains(how).double()
    private = make_private(model, "hooks", batch_size=4)
    x = batches(4)[0]
    loss = square_loss(private.module, x).sum()
    h = model.h
    loss.backward()
    assert h.shape == x.shape
    if h.grad is not None:
        assert h.grad.shape == x.shape


@pytest.mark.parametrize("when", ["before", "later"])
def test_module_backward_hooks_are_refused(when):
    model = Model("at once").double()

    def register():
        model.two.register_full_backward_hook(lambda m, gi, go: None)

    if when == "before":
        register()
    with pytest.raises((RuntimeError, ValueError), match=r"two \(Linear\).*backward"):
        private = make_private(model, "ghost_bk", batch_size=4)
        register()
        private.step(batches(4)[0], square_loss)


def test_global_hooks_see_the_batch():
    shapes = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: shapes.append(tuple(out.shape))
    )
    try:
        model = nn.Sequential(nn.Linear(D, 2), nn.Tanh()).double()
        private = make_private(model, "ghost_bk", batch_size=4)
        private.backward(torch.randn(4, D).double(), square_loss)
    finally:
        handle.remove()
    assert (4, 2) in shapes and {shape[0] for shape in shapes} == {4}


def test_hooks_under_checkpointing():
    """The recomputation is not shown to them."""
    from torch.utils.checkpoint import checkpoint

    class Saves(Model):
        def forward(self, x):
            return self.three(checkpoint(self.two, self.one(x), use_reentrant=False))

    model = Saves("at once")
    shapes = []
    model.two.register_forward_hook(
        lambda m, args, out: shapes.append((type(out), tuple(out.shape)))
    )
    steps(model, batches(4, 4))
    assert shapes and all(kind is torch.Tensor for kind, _ in shapes)
