"""Models of Opacus's own examples that need more than a mode: as written there.

Oracle: each sample alone through plain autograd, over several steps.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext.refused import Refused
from tests.common import assert_same, check, clipped_sum, make_private, oracle

MODES = ("hooks", "ghost", "ghost_bk", "scan", "auto")
BOUND, SIZE = 0.5, 4


class SampleNet(nn.Module):
    """imdb.py: ``squeeze()`` takes the dim of a batch of one as well."""

    def __init__(self, *dims):
        super().__init__()
        self.emb, self.dims = nn.Embedding(10, 6), dims
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = F.adaptive_avg_pool1d(self.emb(x).transpose(1, 2), 1).squeeze(*self.dims)
        return self.fc2(F.relu(self.fc1(x)))


@pytest.mark.parametrize("mode", MODES)
def test_squeezed_batches(mode):
    """Refused, as the dim of the samples is gone; a dim named is exact."""
    torch.manual_seed(0)
    batch = torch.randint(0, 10, (SIZE, 5)), torch.randint(0, 2, (SIZE,))

    def losses(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    check(mode, True, SampleNet(-1).double(), batch, losses)
    private = make_private(SampleNet().double(), mode, batch_size=SIZE)
    with pytest.raises(Refused, match=r"shape \(2,\) for a sample alone"):
        private.step(batch, losses)


def gan():
    torch.manual_seed(0)
    discriminator = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 6, 3, 2, 1),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(24, 1),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    generator = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
    return discriminator.double(), generator.double()


def real_or_fake(discriminator, batch):
    real, fake = map(discriminator, batch)
    bce = nn.BCELoss(reduction="none")
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


@pytest.mark.parametrize("mode", MODES)
def test_gan(mode):
    """dcgan.py: a private discriminator feeds a trainable generator's gradients."""
    plain, plain_generator = gan()
    model, generator = copy.deepcopy((plain, plain_generator))
    private = make_private(
        model, mode, batch_size=SIZE, max_grad_norm=BOUND, criterion=nn.BCELoss()
    )
    criterion = private.criterion or nn.BCELoss()
    bce, ones = nn.BCELoss(), torch.ones(SIZE).double()
    theirs = torch.optim.SGD(generator.parameters(), lr=0.5)
    oracles = torch.optim.SGD(plain_generator.parameters(), lr=0.5)
    for step in range(3):
        torch.manual_seed(step)
        real, noise = torch.randn(SIZE, 1, 8, 8).double(), torch.randn(SIZE, 5).double()
        private.optimizer.zero_grad(set_to_none=True)
        fake = generator(noise)
        loss = criterion(private.module(real), ones)
        loss = loss + criterion(private.module(fake.detach()), 0 * ones)
        loss.backward()
        private.optimizer.step()
        private.optimizer.zero_grad(set_to_none=True)
        theirs.zero_grad()
        bce(private.module(fake), ones).backward()
        theirs.step()

        fake = plain_generator(noise)
        grads = oracle(plain, (real, fake.detach()), real_or_fake)
        with torch.no_grad():
            for name, total in clipped_sum(grads, "flat", BOUND).items():
                plain.get_parameter(name).sub_(total / SIZE)
        oracles.zero_grad()
        bce(plain(fake), ones).backward()
        oracles.step()
        for mine, other in ((model, plain), (generator, plain_generator)):
            assert_same(mine.state_dict(), other.state_dict())


@pytest.mark.parametrize("mode", ("ghost", "ghost_bk"))
def test_generator_gets_nothing_from_a_private_loss(mode):
    discriminator, generator = gan()
    private = make_private(discriminator, mode, batch_size=SIZE, criterion=nn.BCELoss())
    output = private.module(generator(torch.randn(SIZE, 5).double()))
    with pytest.raises(Refused, match="another model.*would not be private"):
        private.criterion(output, torch.ones(SIZE).double()).backward()
