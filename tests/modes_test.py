"""Properties that every mode has, whatever the model."""

import copy
import pickle
import re

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from opacus_ext import Refused
from opacus_ext.refused import add_note
from tests.common import (
    MODES,
    PerSample,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    net,
    next_token_loss,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    trainable,
    with_notes,
    wrapped_or_not,
)

V, T, B = 13, 5, 6
every_mode = pytest.mark.parametrize("mode", [*MODES, "scan"])
ghost_modes = pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan"])


def block(m, x):
    return x + m.down(m.up(m.norm(x)).tanh())


def tied(m, ids):
    """A tied embedding, positions, a norm, and a block that is used twice."""
    x = m.embedding(ids) + m.positions(torch.arange(ids.size(1)))
    for _ in range(2):
        if m.reentrant is None:
            x = m.block(x)
        else:
            x = checkpoint(m.block, x, use_reentrant=m.reentrant)
    return F.linear(x, m.embedding.weight)


BLOCK = net(block, norm=lambda: nn.LayerNorm(4), up=(4, 8), down=(8, 4))
TABLES = dict(
    embedding=lambda: nn.Embedding(V, 4), positions=lambda: nn.Embedding(T, 4)
)


def small(frozen=None, reentrant=None):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = net(tied, **TABLES, block=BLOCK, reentrant=reentrant)().double()
    for name, p in model.named_parameters():
        p.requires_grad_(frozen is None or not name.startswith(frozen))
    return model


def head_only():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    return model


def token_loss(model, ids):
    return next_token_loss(model(ids), ids)


def ids_of(size=B, seed=0):
    return torch.randint(0, V, (size, T), generator=torch.Generator().manual_seed(seed))


def snapshot(model):
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def update(before, model, scale=B):
    return {n: (before[n] - p.detach()) * scale for n, p in trainable(model).items()}


def grads_of(model):
    return {name: p.grad.clone() for name, p in trainable(model).items()}


def expected_sum(model, batch, loss_fn=token_loss, c=0.5):
    return clipped_sum(oracle(model, batch, loss_fn), "flat", c)


def check_step(
    mode, act=None, wrap=True, model=None, batch=None, oracle_loss=token_loss, **kwargs
):
    """
    Compares one step with the oracle: the update of SGD is the clipped sum.

    Args:
        act: does the step of a private model, by default ``private.step``
        kwargs: of make_private, and ``scale`` of the update
    """
    model = small() if model is None else model
    batch = ids_of() if batch is None else batch
    scale = kwargs.pop("scale", kwargs.setdefault("batch_size", B))
    expected, before = expected_sum(model, batch, oracle_loss), snapshot(model)
    private = make_private(model, mode, wrap, max_grad_norm=0.5, **kwargs)
    if act is None:
        private.step(batch, oracle_loss)
    else:
        act(private)
    assert_same(update(before, model, scale), expected)
    return private


def steps_of(engine):
    return sum(steps for _, _, steps in engine.accountant.history)


WITH_UNUSED = net(
    lambda m, x: m.unused(m.used(x)) if m.use else m.used(x),
    **dict(used=(3, 3), unused=(3, 3), use=False),
)
X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
EXACT = {
    "small": (small, None),
    **{
        f"frozen {name}": (lambda name=name: small(name), None)
        for name in ("embedding", "positions", "block.norm", "block.up.weight", "block")
    },
    "only the head is trained": (head_only, X),
    "input with a gradient": (
        lambda: head_only().requires_grad_(),
        X.clone().requires_grad_(),
    ),
    "unused": (lambda: WITH_UNUSED().double(), X),
    # The block's forward runs again in the backward pass.
    "reentrant checkpoint": (lambda: small(reentrant=True), None),
    "checkpoint": (lambda: small(reentrant=False), None),
}


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("name", EXACT)
def test_exact(mode, wrap, name):
    build, x = EXACT[name]
    batch, loss = (ids_of(), token_loss) if x is None else (x, square_loss)
    check(mode, wrap, build(), batch, loss)


def rollout(model, x):
    """Each call on what the one before has given: the loop of a recurrent cell."""
    losses, h = 0, x
    for _ in range(3):
        h = model(h).tanh()
        losses = losses + squares(h)
    return losses


ON_OUTPUTS = {
    "the last": lambda model, x: squares(model(model(x))),
    "each": rollout,
    "beside the input": lambda model, x: squares(model(x + model(x)) - model(2 * x)),
}


@every_mode
@pytest.mark.parametrize("name", ON_OUTPUTS)
def test_calls_on_outputs_of_the_model(mode, name):
    """The gradients of all calls are one sample's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    check(mode, True, model, X, ON_OUTPUTS[name])
    private = make_private(model, mode, batch_size=len(X), max_grad_norm=0.5)
    if mode != "hooks":
        with pytest.raises(Refused, match="depends on the outputs of others"):
            private.backward(
                X, lambda model, x: squares(model((y := model(x)) - y.mean(0)))
            )


def test_grad_sample_follows_the_samples():
    """In "hooks" row b of grad_sample is sample b."""
    model, ids = small(), ids_of()
    expected = oracle(model, ids, token_loss)
    private = make_private(model, "hooks", batch_size=B)
    private.backward(ids.flip(0), token_loss)
    got = {name: p.grad_sample for name, p in trainable(model).items()}
    assert_same(got, {name: g.flip(0) for name, g in expected.items()})


@ghost_modes
def test_grad_after_backward_is_the_clipped_sum(mode):
    """A second backward before the step would lose it, and is refused."""
    model, ids = small(), ids_of()
    grads = oracle(model, ids, token_loss)
    c = half_clipped(grads)
    private = make_private(model, mode, batch_size=B, max_grad_norm=c)
    losses = token_loss(private.module, ids)
    assert torch.equal(losses, token_loss(small(), ids))
    loss = private.criterion(losses)
    assert loss.item() == pytest.approx(losses.mean().item())
    loss.backward()
    assert_same(grads_of(model), clipped_sum(grads, "flat", c))
    with pytest.raises(RuntimeError, match="second time before optimizer.step"):
        private.backward(ids, token_loss)
    assert_same(grads_of(model), clipped_sum(grads, "flat", c))


@ghost_modes
def test_gradients_written_before_the_noise(mode):
    """By a Trainer that asks for their norm: a clip to infinity changes no number."""
    model, other, ids = small(), small(), ids_of()
    for found, bounds in ((model, [float("inf")]), (other, [])):
        private = make_private(found, mode, batch_size=B, max_grad_norm=1.0)
        private.backward(ids, token_loss)
        for bound in bounds:
            torch.nn.utils.clip_grad_norm_(found.parameters(), bound)
        private.optimizer.step()
    assert_same(snapshot(model), snapshot(other))


def negate(params):
    torch._foreach_neg_([p.grad for p in params])


@ghost_modes
@pytest.mark.parametrize(
    "change", [lambda params: torch.nn.utils.clip_grad_norm_(params, 1e-3), negate]
)
def test_gradients_changed_before_the_noise_are_refused(mode, change):
    """Such as by clip_grad_norm_, which would clip the sum without its noise."""
    model, ids = small(), ids_of()
    before = snapshot(model)
    private = make_private(model, mode, batch_size=B, max_grad_norm=1.0)
    private.backward(ids, token_loss)
    change(list(model.parameters()))
    with pytest.raises(RuntimeError, match="changed between backward"):
        private.optimizer.step()
    assert_same(snapshot(model), before)
    private.optimizer.zero_grad()
    private.step(ids, token_loss)
    assert update(before, model)


@every_mode
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_reduction(mode, reduction):
    def act(private):
        if private.criterion is not None:
            private.step(ids_of(), token_loss)
            return
        getattr(token_loss(private.module, ids_of()), reduction)().backward()
        private.optimizer.step()

    given = dict(criterion=PerSample(reduction), loss_reduction=reduction)
    check_step(mode, act, scale=B if reduction == "mean" else 1, **given)


@every_mode
def test_expected_batch_size(mode):
    """The sum is divided by the expected batch size, not by the batch's own."""
    check_step(mode, batch=ids_of(3), batch_size=8)


@ghost_modes
@pytest.mark.parametrize("ignored", [False, True])
def test_criterion_of_tokens_with_shape(mode, ignored):
    """Opacus's form, flattened; a sample's mean is over its own tokens."""
    ids = ids_of()
    targets = ids.clone()
    if ignored:
        targets[0, 1:] = targets[1, 3:] = -100

    def alone(m, batch):
        i, t = batch
        return F.cross_entropy(m(i).flatten(0, 1), t.flatten()).unsqueeze(0)

    def act(private):
        logits = private.module(ids)
        flat = logits.flatten(0, 1), targets.flatten()
        private.criterion(*flat, shape=logits.shape).backward()
        private.optimizer.step()

    given = dict(batch=(ids, targets), criterion=nn.CrossEntropyLoss())
    check_step(mode, act, oracle_loss=alone, **given)
    assert given["criterion"].reduction == "mean"  # the user's own is left alone


def seeded(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return dict(batch_size=B, noise_multiplier=1.0, noise_generator=generator)


@every_mode
def test_unused_parameter(mode):
    """Norm and sum are zero, also after a step in which it was used; noise is not."""
    model = WITH_UNUSED().double()
    private = make_private(model, mode, batch_size=4, max_grad_norm=0.5)
    for use in (True, False, True, False):
        model.use = use
        clean = WITH_UNUSED().double()
        clean.load_state_dict(model.state_dict())
        clean.use = use
        expected, before = expected_sum(clean, X, square_loss), snapshot(model)
        private.step(X, square_loss)
        assert_same(update(before, model, 4), expected, message=f"use={use}")
    model = WITH_UNUSED().double()
    before = snapshot(model)
    given = dict(batch_size=4, max_grad_norm=0.5, noise_multiplier=2.0)
    make_private(model, mode, **given).step(X, square_loss)
    noise = update(before, model, 4)
    drawn = torch.cat([noise["unused.weight"].flatten(), noise["unused.bias"]])
    assert (drawn != 0).all() and 0.3 < float(drawn.std()) < 2.5


def in_physical_batches(private, size):
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=size,
        optimizer=private.optimizer,
    ) as loader:
        for (batch,) in loader:
            private.step(batch, token_loss)


@every_mode
def test_batch_memory_manager(mode):
    """Physical batches of 2 make the same step as one of 6; noise is drawn once."""
    steps = {}
    for physical in (2, 4, B):
        model = small()
        before = snapshot(model)
        given = dict(dataset=TensorDataset(ids_of()), max_grad_norm=0.5, **seeded())
        private = make_private(model, mode, **given)
        in_physical_batches(private, physical)
        steps[physical] = update(before, model)
        assert steps_of(private.engine) == 1
    assert_same(steps[2], steps[B])
    assert_same(steps[4], steps[B])


@every_mode
def test_checkpoint_of_training(mode, tmp_path):
    """Two steps, save, load into fresh objects: the third step is the same."""

    def fresh(model):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return make_private(model, mode, optimizer=sgd, **seeded())

    private, other = fresh(small()), fresh(small())
    with torch.no_grad():
        other.module._module.block.up.weight.zero_()
    private.step(ids_of(), token_loss)
    private.step(ids_of(), token_loss)
    for p, act in (private, "save_checkpoint"), (other, "load_checkpoint"):
        given = dict(module=p.module, optimizer=p.optimizer)
        getattr(p.engine, act)(path=tmp_path / "checkpoint.pt", **given)
    assert other.engine.accountant.history == private.engine.accountant.history
    for p in (private, other):
        p.optimizer.generator = torch.Generator().manual_seed(4)
        p.step(ids_of(), token_loss)
    assert_same(snapshot(other.module), snapshot(private.module))


def counting(m, x):
    m.calls += 1
    return m.fc(x.flatten(0, 1)).view_as(x)


@every_mode
@wrapped_or_not
def test_nothing_runs_behind_the_users_back(mode, wrap):
    """Without noise no random numbers are drawn, and a forward counts once."""
    model = net(counting, fc=(3, 3), calls=0)().double()
    private = make_private(model, mode, wrap, batch_size=4)
    state = torch.get_rng_state()
    private.step(X, square_loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 1 and model.training


@pytest.mark.parametrize("mode", MODES)  # "scan" draws one sample after the other
def test_dropout(mode):
    """The mask of the loss is the mask of the gradient: one forward, one mask."""
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2)).double()
    x = torch.randn(4, 3).double()

    def loss_fn(m, batch):
        torch.manual_seed(5)
        return square_loss(m, batch)

    plain = copy.deepcopy(model)
    loss_fn(plain, x).sum().backward()
    got = run_mode(mode, True, model, x, loss_fn, max_grad_norm=1e9)
    assert_same(got, grads_of(plain))


@every_mode
def test_zero_grad_and_memory(mode):
    """Nothing of a step outlives zero_grad but the state of the optimizer."""
    model = small()
    private = make_private(model, mode, batch_size=B)
    private.step(ids_of(), token_loss)
    private.optimizer.zero_grad(set_to_none=True)
    for p in trainable(model).values():
        for name in ("grad", "grad_sample", "summed_grad"):
            assert getattr(p, name, None) is None, name


@every_mode
@wrapped_or_not
def test_cleanup(mode, wrap):
    """After cleanup (or to_standard_module) the model is the user's own again."""
    model, ids = small(), ids_of()
    private = make_private(model, mode, wrap, batch_size=B)
    private.step(ids, token_loss)
    if wrap:
        assert private.handle.to_standard_module() is model
    else:
        private.handle.cleanup()
    for m in model.modules():
        assert not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks)
    token_loss(model, ids).sum().backward()
    check(mode, wrap, copy.deepcopy(model), ids, token_loss)


@every_mode
def test_adam(mode):
    """Any optimizer of torch beneath: two Adam steps on the oracle's gradients."""
    model, plain, ids = small(), small(), ids_of()
    adam, own = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model))
    given = dict(batch_size=B, max_grad_norm=0.5, optimizer=own)
    private = make_private(model, mode, **given)
    for _ in range(2):
        totals = expected_sum(plain, ids)
        for name, p in trainable(plain).items():
            p.grad = totals[name] / B
        adam.step()
        private.step(ids, token_loss)
    assert_same(snapshot(model), snapshot(plain), tolerance=1e-6)


@pytest.mark.parametrize("wrap", [True, False])
def test_accumulation_in_hooks(wrap):
    """Two backward passes before a step, which Opacus allows without Poisson."""
    first, second = ids_of(B), ids_of(B, seed=1)

    def act(private):
        private.backward(first, token_loss)
        private.backward(second, token_loss)
        private.optimizer.step()

    check_step("hooks", act, wrap, batch=torch.cat([first, second]), scale=2 * B)


@every_mode
def test_optimizer_of_some_parameters(mode):
    """What the optimizer does not hold stays; the step's norm is at most C."""
    model, names = small(), ["block.up.weight", "block.up.bias"]
    before = snapshot(model)
    held = [p for name, p in model.named_parameters() if name in names]
    given = dict(max_grad_norm=1e-3, optimizer=torch.optim.SGD(held, lr=1.0))
    make_private(model, mode, batch_size=B, **given).step(ids_of(), token_loss)
    moved = update(before, model)
    assert {name for name, u in moved.items() if (u != 0).any()} == set(names)
    assert norms_of({n: u[None] for n, u in moved.items()}) <= B * 1e-3 * (1 + 1e-6)


@every_mode
@pytest.mark.parametrize("later", [False, True])
def test_groups_of_parameters(mode, later):
    """Learning rates of their own; a group may be added, but not of another model."""
    model, ids = small(), ids_of()
    others = [p for n, p in model.named_parameters() if not n.startswith("block.")]
    groups = [{"params": list(model.block.parameters())}]
    groups += [] if later else [{"params": others, "lr": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    given = dict(batch_size=B, max_grad_norm=0.5, optimizer=optimizer)
    private = make_private(model, mode, **given)
    if later:
        private.step(ids, token_loss)
        with pytest.raises(Refused, match="not the private model's"):
            private.optimizer.add_param_group({"params": nn.Linear(2, 3).weight})
        private.optimizer.add_param_group({"params": others, "lr": 2.0})
    expected, before = expected_sum(model, ids), snapshot(model)
    private.optimizer.zero_grad()
    private.step(ids, token_loss)
    for name in expected:
        expected[name] *= 1.0 if name.startswith("block") else 2.0
    assert_same(update(before, model), expected)


@every_mode
def test_state_dict_after_a_step(mode):
    """What a mode keeps for its next step is no buffer of the model."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 3)
    )
    private = make_private(model, mode, batch_size=8)
    names = list(private.module.state_dict())
    private.step(torch.randn(8, 1, 8, 8), square_loss)
    assert list(private.module.state_dict()) == names
    assert not list(private.module.buffers())


@pytest.mark.parametrize("mode", [*MODES, "scan", "auto"])
def test_whole_models_are_copied_and_pickled(mode):
    """As plain models, without gradients of samples; copies can be made private."""
    x = torch.randn(3, 4).double()
    private = make_private(nn.Linear(4, 2).double(), mode, batch_size=3)
    private.step(x, square_loss)
    whole, expected = private.module, private.module(x).detach()
    with pytest.raises(Refused, match="gradient without noise.*zero_grad"):
        pickle.dumps(whole._module)
    kept = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    private.optimizer.zero_grad()
    kept += [copy.deepcopy(whole._module), pickle.loads(pickle.dumps(whole._module))]
    for made in kept:
        assert torch.equal(made(x), expected)
        for p in made.parameters():
            assert not any(
                isinstance(value, torch.Tensor) for value in vars(p).values()
            )
        again = make_private(made, mode, batch_size=3)
        before = [p.detach().clone() for p in made.parameters()]
        again.step(x, square_loss)
        assert not any(map(torch.equal, before, made.parameters()))
        again.optimizer.zero_grad()
    assert torch.equal(whole(x), expected)


@pytest.mark.filterwarnings("ignore:.*saves no memory")
@pytest.mark.parametrize("mode", [*MODES, "scan", "auto"])
def test_a_checkpoint_around_the_private_model(mode):
    """It is trained exactly, and nothing is computed twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = torch.randn(B, 4).double()
    grads = oracle(model, batch, square_loss)
    c = half_clipped(grads)
    private = make_private(model, mode, batch_size=B, max_grad_norm=c)
    given = private.module
    private.module = lambda x: checkpoint(given, x, use_reentrant=False)
    private.step(batch, square_loss)
    got = {n: B * p.grad for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 1e-8)


def inner(m, x):
    return m.one(x).tanh().pow(2).sum(-1)


def total(m, x):
    return lambda x: inner(m, x).sum()


def tangent(m, x):
    return torch.func.jvp(lambda x: inner(m, x), (x,), (x,))[1]


# Derivatives within a forward, [B, ...] of [B, 3].
TRANSFORMS = {
    "hessian": lambda m, x: torch.func.hessian(total(m, x))(x).sum((1, 2)),
    "hessian by row": lambda m, x: torch.stack(
        [torch.func.hessian(total(m, x))(row).sum(0) for row in x]
    ),
    "vmap of hessian": lambda m, x: torch.vmap(torch.func.hessian(total(m, x)))(x).sum(
        1
    ),
    "jacrev of jacrev": lambda m, x: torch.func.jacrev(torch.func.jacrev(total(m, x)))(
        x
    ).sum((1, 2)),
    "jvp of grad": lambda m, x: torch.func.jvp(
        torch.func.grad(total(m, x)), (x,), (x,)
    )[1],
    "grad of jvp": lambda m, x: torch.func.grad(lambda x: tangent(m, x).sum())(x),
    "jvp": lambda m, x: tangent(m, x)[:, None] * x,
    "vjp": lambda m, x: torch.func.vjp(total(m, x), x)[1](torch.ones(()).to(x))[0],
}


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_in_a_forward(name, mode):
    torch.manual_seed(0)
    model = net(lambda m, x: m.two(TRANSFORMS[name](m, x)), one=(3, 4), two=(3, 2))()
    check(mode, True, model.double(), torch.randn(B, 3).double(), square_loss)


# Forwards that need other samples, and what torch says of a batch of one.
TOGETHER = {
    "index": (lambda m, x: m.one(x) + m.one(x)[1], IndexError, "out of bounds"),
    "view": (lambda m, x: m.one(x).view(3, -1), RuntimeError, "is invalid"),
    "norm": (
        lambda m, x: F.batch_norm(m.one(x), None, None, training=True),
        ValueError,
        "more than 1 value",
    ),
    "assert": (lambda m, x: _at_least_two(m.one(x)), AssertionError, "1 > 1"),
    "class": (
        lambda m, x: m.one(x)[:, F.one_hot(x[:, 0].long()).sum(0) > 0],
        IndexError,
        "mask",
    ),
}


def _at_least_two(y):
    assert len(y) > 1
    return y


@pytest.mark.filterwarnings("ignore:.*one sample after the other")
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
@pytest.mark.parametrize("name", TOGETHER)
def test_errors_of_a_sample_alone_say_so(name, mode):
    forward, kind, words = TOGETHER[name]
    private = make_private(net(forward, one=(3, 2))(), mode, batch_size=B)
    with pytest.raises(kind, match=words) as caught:
        private.module(5 + torch.rand(B, 3))
    words = r"Net runs each sample alone.*inputs\[0\] \(1, 3\).*take="
    assert re.search(words, with_notes(caught.value))


def test_errors_of_a_criterion_say_so():
    given = dict(batch_size=B, criterion=lambda y: y[1].sum())
    private = make_private(nn.Linear(3, 2), "ghost_bk", **given)
    with pytest.raises(IndexError) as caught:
        private.criterion(private.module(torch.rand(B, 3)))
    assert re.search(r"criterion.*alone.*\[\(1, 2\)\]", with_notes(caught.value))


def test_notes_before_python_3_11():
    """They are a part of the text."""

    class Old(IndexError):
        add_note = property()  # as if there were none

    for args in (("out of range",), ()):
        error = Old(*args)
        add_note(error, "Samples run alone.")
        assert str(error) == "\n".join([*args, "Samples run alone."])
