"""The zoo in every mode, the fuzzer's ops one by one, and what else a model may be."""

import gc
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    spectral_norm,
    weight_norm,
)

from opacus_ext import Refused
from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from tests.common import (
    Net,
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    net,
    oracle,
    square_loss,
    squares,
    trainable,
)
from tests.fuzz import ops
from tests.zoo import (
    ALIKE,
    BAG,
    LOSSES,
    MODELS,
    PIECES,
    SEVERAL,
    D,
    X,
    check,
    every,
    every_mode,
    one_bag,
    small,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@every(model=MODELS, loss=LOSSES, pieces=PIECES, several=SEVERAL)
def test_steps(case, mode, wrap):
    check(case, mode, wrap)


@pytest.mark.parametrize("name", ops.UNARY)
def test_ops_of_the_fuzzer(name):
    """Each op between two layers, of which one is frozen."""
    torch.manual_seed(1)
    step = ops.UNARY[name](random.Random(1))
    model = nn.Sequential(nn.Linear(3, 3), step, nn.Linear(3, 2)).double()
    model[2].requires_grad_(False)
    if single := hasattr(step, "single"):
        step.float()
    x = torch.randn(4, 4, 3).double()
    grads = {n: g.double() for n, g in oracle(model, x, square_loss).items()}
    expected = clipped_sum(grads, "flat", bound := half_clipped(grads))
    private = make_private(model, "ghost_bk", batch_size=4, max_grad_norm=bound, lr=0.0)
    private.step(x, square_loss)
    got = {n: 4 * p.grad for n, p in trainable(model).items()}
    assert_same(got, expected, 1e-4 if single else getattr(step, "tolerance", 1e-8))


def positive(layer):
    parametrize.register_parametrization(layer, "weight", Net(lambda m, w: w.exp()))
    return layer


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize(
    "way",
    [
        *(parametrizations.weight_norm, parametrizations.spectral_norm),
        *(parametrizations.orthogonal, positive, weight_norm, spectral_norm, pruned),
    ],
    ids=lambda way: way.__name__,
)
def test_parametrized_weights(way):
    """Power iterations go on as they do without privacy."""

    def make():
        torch.manual_seed(1)
        first, last = way(nn.Linear(D, D)), way(nn.Conv1d(1, D, 2))
        return nn.Sequential(first, nn.Unflatten(1, (1, D)), last).double()

    x = torch.randn(3, D).double()
    alone = [make() for _ in x]  # what a hook has computed can't be deep-copied
    for model, row in zip(alone, x):
        square_loss(model, row[None]).sum().backward()
    names = trainable(alone[0])
    columns = zip(*(trainable(model).values() for model in alone))
    grads = [torch.stack([p.grad for p in column]) for column in columns]
    grads = dict(zip(names, grads))
    model, bound = make(), half_clipped(grads)
    private = make_private(model, "ghost_bk", batch_size=3, max_grad_norm=bound, lr=0.0)
    private.step(x, square_loss)
    got = {n: 3 * p.grad for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", bound))
    for buffer, expected in zip(model.buffers(), alone[0].buffers()):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize(
    "make, x",
    [
        (
            net(
                lambda m, x: torch.einsum("btd,edh->bteh", m.fc(x), m.w / 2).tanh(),
                fc=(D, D),
                w=weights(3, D, 5),
            ),
            torch.randn(4, 6, D),
        ),
        *(
            (
                lambda kind=kind, width=width: nn.Sequential(
                    kind(3, 4, 2), nn.Flatten(), nn.Linear(width, 2)
                ),
                torch.randn(4, 3, 5),
            )
            for kind, width in ((nn.Conv1d, 16), (nn.ConvTranspose1d, 24))
        ),
    ],
)
def test_autocast_reaches_what_runs_by_sample(make, x):
    model, outputs = make(), []

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(model(x))
        return squares(outputs[-1].float())

    expected = clipped_sum(oracle(model, x, loss))
    private = make_private(model, "ghost_bk", batch_size=4, lr=0.0)
    private.step(x, loss)
    assert outputs[-1].dtype == torch.bfloat16
    got = {n: 4 * p.grad for n, p in model.named_parameters()}
    assert_same(got, expected, 0.05)


def test_a_batch_of_none_needs_one_with_samples_before():
    """Their shapes are known then."""
    none = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    private = make_private(BAG().double(), "ghost_bk", batch_size=4, take=one_bag)
    with pytest.raises(Refused, match="Begin with a batch that is not empty"):
        private.step(none, square_loss)
    private.step((torch.tensor([1, 3]), torch.tensor([5, 2, 2, 6])), square_loss)
    private.step(none, square_loss)
    assert all(not p.grad.any() for p in private.optimizer.params)


def test_a_generator_before_a_private_discriminator():
    """In "hooks" the gradient of the input is plain autograd's."""
    generator, model = nn.Linear(2, D).double(), small().double()
    z = torch.randn(4, 2).double()
    model(generator(z)).square().mean().backward()
    expected = [p.grad.clone() for p in generator.parameters()]
    generator.zero_grad()
    private = make_private(model, "hooks", batch_size=4)
    private.module(generator(z)).square().mean().backward()
    for p, grad in zip(generator.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)
    private.optimizer.zero_grad()
    private.step(torch.randn(4, D).double(), square_loss)


@every_mode
def test_users_hook_outputs_to_look_at_gradients(mode, capsys):
    private = make_private(nn.Linear(D, 2).double(), mode, batch_size=4)
    y = private.module(X[0])
    y.register_hook(print)
    losses = squares(y)
    (private.criterion(losses) if private.criterion else losses.mean()).backward()
    assert "tensor" in capsys.readouterr().out


@every_mode
def test_nothing_is_kept_from_step_to_step(mode):
    private = make_private(ALIKE().double(), mode, batch_size=4)
    gc.collect()
    gc.disable()  # what goes round through autograd Python never finds
    try:
        for _ in range(2):
            private.step(X[0], square_loss)
        private.optimizer.zero_grad()
        assert not any(isinstance(x, ForwardRecord) for x in gc.get_objects())
    finally:
        gc.enable()
