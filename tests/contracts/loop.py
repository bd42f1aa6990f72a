"""A private loop that fails where a test says, and counts its steps."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.common import clipped_sum, make_private, oracle, square_loss

RECORDS = 12


class Failure(Exception):
    """An exception of user code."""


class Net(nn.Module):
    """Fails at the places that are named in ``fails``."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails = nn.Linear(3, 2), set()

    def forward(self, x):
        self.fail("forward")
        x = self.layer(x)
        if "backward" in self.fails and x.requires_grad:
            x.register_hook(lambda g: self.fail("backward"))
        return x

    def fail(self, place):
        if place in self.fails:
            raise Failure(place)


class SGD(torch.optim.SGD):
    """Fails between two parameters."""

    net = None

    def step(self, closure=None):
        weight, bias = self.param_groups[0]["params"]
        with torch.no_grad():
            weight.sub_(1e-4 * weight.grad)
            self.net.fail("optimizer")
            bias.sub_(1e-4 * bias.grad)


class Loop:
    """
    Attributes:
        counted: steps that the accountant has counted
        changed: how often ``look`` found that the weights had changed
    """

    def __init__(self, mode="ghost_bk", noise_multiplier=1.0, **kwargs):
        self.net = Net().double()
        records = torch.randn(RECORDS, 3, dtype=torch.float64)
        optimizer = SGD(self.net.parameters(), lr=1e-4)
        SGD.net = optimizer.net = self.net
        self.mode = mode
        self.private = make_private(
            self.net,
            mode,
            batch_size=kwargs.pop("batch_size", 3),
            dataset=TensorDataset(records),
            poisson_sampling=True,
            noise_multiplier=noise_multiplier,
            optimizer=optimizer,
            **kwargs,
        )
        self.optimizer, self.loader = self.private.optimizer, self.private.loader
        self.accountant = self.private.engine.accountant
        self.changed, self._seen = 0, self.weights()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    @property
    def counted(self):
        return sum(n for *_, n in self.accountant.history)

    def loss(self, model, x):
        self.net.fail("criterion")
        return square_loss(model, x)

    def step(self, x):
        """One step, without handling of errors."""
        self.private.step(x, self.loss)

    @contextmanager
    def failing(self, place):
        """A context in which the code at this place fails."""
        self.net.fails.add(place)
        with pytest.raises(Failure, match=place):
            yield
        self.net.fails.clear()

    def look(self):
        """Notes if the weights changed, which must not happen without a count."""
        self.changed += not torch.equal(self._seen, self.weights())
        self._seen = self.weights()
        assert self.counted >= self.changed, "steps that nobody has counted"

    def sum_of(self, x):
        """The clipped sum of the batch by the oracle, with the current weights."""
        plain = Net().double()
        plain.load_state_dict(self.net.state_dict())
        return clipped_sum(oracle(plain, x, square_loss))
