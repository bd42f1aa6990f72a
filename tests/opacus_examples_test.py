"""Models of Opacus's own examples that need more than a mode: as written there.

Oracle: each sample alone through plain autograd, over several steps.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from opacus_ext.refused import Refused
from tests.common import assert_same, check, clipped_sum, make_private, oracle

MODES = ("hooks", "ghost", "ghost_bk", "scan", "auto")
BOUND, SIZE, FAKES, RECORDS = 0.5, 4, 2, 6


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


class Gan:
    """A private discriminator, and a generator beside it."""

    def __init__(self, mode, **kwargs):
        self.model, self.generator = gan()
        self.private = make_private(
            self.model,
            mode,
            batch_size=FAKES,
            max_grad_norm=BOUND,
            criterion=nn.BCELoss(),
            dataset=TensorDataset(torch.randn(RECORDS, 1, 8, 8).double()),
            **{"poisson_sampling": True, **kwargs},
        )
        self.module, self.optimizer = self.private.module, self.private.optimizer
        self.criterion = self.private.criterion or nn.BCELoss()
        self.random = torch.Generator().manual_seed(0)
        self.own = torch.optim.SGD(self.generator.parameters(), lr=0.5)

    def batches(self, epochs=1):
        """Draws of any size, also without records, and the generator's fakes."""
        for _ in range(epochs):
            for (x,) in self.private.loader:
                yield x, self.fakes(len(x))

    def fakes(self, size=FAKES):
        return self.generator(self.noise(size))

    def noise(self, size):
        return torch.randn(size, 5, generator=self.random, dtype=torch.double)

    def loss(self, images, label):
        output = self.module(images)
        return self.criterion(output, torch.full_like(output, label))


def private_step(gan, x, fake):
    """A record and its fake are one sample."""
    gan.optimizer.zero_grad()
    (gan.loss(x, 1.0) + gan.loss(fake.detach(), 0.0)).backward()
    gan.optimizer.step()


def step_of_generator(gan, fake):
    gan.own.zero_grad()
    gan.loss(fake, 1.0).backward()
    gan.own.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fakes", ["one each", "always two"])
def test_gan(mode, fakes):
    """
    dcgan.py: the generator is trained by the private criterion, on its own fakes.
    Nothing is clipped or noisy there.
    """
    torch.manual_seed(0)
    trained, sizes = Gan(mode), set()
    torch.manual_seed(1)
    plain, plain_generator = copy.deepcopy((trained.model, trained.generator))
    own = torch.optim.SGD(plain_generator.parameters(), lr=0.5)
    for x, fake in trained.batches(epochs=3):
        sizes.add(len(x))
        grads = oracle(plain, (x, fake.detach()), real_or_fake)
        private_step(trained, x, fake)
        with torch.no_grad():
            for name, total in clipped_sum(grads, "flat", BOUND).items():
                plain.get_parameter(name).sub_(total / FAKES)

        noise = trained.noise(len(x) if fakes == "one each" else FAKES)
        step_of_generator(trained, trained.generator(noise))
        own.zero_grad()
        output = plain(plain_generator(noise))
        F.binary_cross_entropy(output, torch.ones_like(output)).backward()
        own.step()
        assert_same(trained.model.state_dict(), plain.state_dict())
        assert_same(trained.generator.state_dict(), plain_generator.state_dict())
    assert {0, FAKES} < sizes


def not_detached(gan, x, fake):
    gan.optimizer.zero_grad()
    (gan.loss(x, 1.0) + gan.loss(fake, 0.0)).backward()
    gan.optimizer.step()


def fakes_in_a_number_of_their_own(gan, x, fake):
    private_step(gan, x, gan.fakes(FAKES + 4))


def two_passes(gan, x, fake):
    gan.optimizer.zero_grad()
    gan.loss(x, 1.0).backward()
    gan.loss(fake.detach(), 0.0).backward()
    gan.optimizer.step()


def not_dropped(gan, x, fake):
    gan.optimizer.zero_grad()
    step_of_generator(gan, fake)
    gan.optimizer.step()


# What people write, and what the error says, which :func:`private_step` does.
REFUSED = {
    not_detached: r"another model.*detach\(\).*zero_grad\(\)",
    not_dropped: r"another model.*detach\(\).*zero_grad\(\)",
    fakes_in_a_number_of_their_own: r"loss of calls on .* and 6 .*randn\(len\(x\)",
    two_passes: r"a second time.*\(loss_real \+ loss_fake\)\.backward\(\)",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poisson", [True, False], ids=["poisson", "fixed"])
@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_gans_that_are_refused(mode, poisson, loop):
    """In the same words in all modes, and without a step; the advice trains."""
    torch.manual_seed(0)
    trained = Gan(mode, poisson_sampling=poisson)
    before = copy.deepcopy(trained.model.state_dict())
    refused = False
    for x, fake in trained.batches(epochs=2):
        if len(x) and not refused:
            with pytest.raises(Refused, match=REFUSED[loop]):
                loop(trained, x, fake)
            assert_same(trained.model.state_dict(), before)
            refused = True
        else:
            private_step(trained, x, fake)
            step_of_generator(trained, trained.fakes())
    assert refused and trained.private.engine.accountant.history


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_a_generator(mode):
    """Several in a row, in any number of fakes, and on a frozen private model."""
    torch.manual_seed(0)
    trained = Gan(mode)
    for x, fake in trained.batches():
        before = copy.deepcopy(trained.generator.state_dict())
        step_of_generator(trained, fake)
        step_of_generator(trained, trained.fakes(3))
        trained.optimizer.zero_grad()
        (trained.loss(x, 1.0) + trained.loss(fake.detach(), 0.0)).backward()
        trained.model.requires_grad_(False)
        step_of_generator(trained, trained.fakes())
        trained.model.requires_grad_(True)
        trained.optimizer.step()
        after = trained.generator.state_dict()
        assert all((after[name] != x).any() for name, x in before.items())
    assert len(trained.private.engine.accountant.history)
