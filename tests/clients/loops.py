"""Loops in the shape of Opacus's examples, and of a GAN of tables as CTGAN's.

Draws of samples are the programs' own: importing the package doesn't change them.
"""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.weights import NOISE, weights


def make_private(model, loader, lr=0.1, **others):
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = dict(noise_multiplier=NOISE, max_grad_norm=1.0) | others
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )


def mnist():
    """mnist.py: convolutions, Poisson draws, physical batches of a memory manager."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(8),
        nn.ReLU(),
        nn.Linear(8, 10),
    )
    images = torch.randn(48, 1, 14, 14)
    model(images)
    before = weights(model)
    data = TensorDataset(images, torch.randint(0, 10, (48,)))
    engine, model, optimizer, loader = make_private(
        model, DataLoader(data, batch_size=12)
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
        ) as batches:
            for image, target in batches:
                optimizer.zero_grad()
                criterion(model(image), target).backward()
                optimizer.step()
    assert engine.get_epsilon(1e-5) > 0
    return before, weights(model._module)


class CharLSTM(nn.Module):
    """char-lstm-classification.py: the last state of each layer of a DPLSTM."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = DPLSTM(6, 5, num_layers=2, batch_first=True)
        self.out_layer = nn.Linear(5, 3)

    def forward(self, x, hidden):
        x, hidden = self.lstm(self.embedding(x), hidden)
        return self.out_layer(x[:, -1]), hidden


def char_lstm():
    model = CharLSTM()
    before = weights(model)
    data = TensorDataset(torch.randint(0, 20, (40, 7)), torch.randint(0, 3, (40,)))
    _, model, optimizer, loader = make_private(model, DataLoader(data, batch_size=10))
    for _ in range(2):
        for names, target in loader:
            hidden = torch.zeros(2, len(names), 5), torch.zeros(2, len(names), 5)
            optimizer.zero_grad()
            logits, _ = model(names, hidden)
            nn.CrossEntropyLoss()(logits, target).backward()
            optimizer.step()
    return before, weights(model._module)


class SampleNet(nn.Module):
    """imdb.py, with its ``squeeze()`` of all dims."""

    def __init__(self):
        super().__init__()
        self.emb, self.pool = nn.Embedding(20, 8), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze()
        return self.fc2(F.relu(self.fc1(x)))


def imdb():
    model = SampleNet()
    before = weights(model)
    data = TensorDataset(torch.randint(0, 20, (40, 7)), torch.randint(0, 2, (40,)))
    _, model, optimizer, loader = make_private(
        model, DataLoader(data, batch_size=20), poisson_sampling=False
    )
    for _ in range(2):
        for x, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), label).backward()
            optimizer.step()
    return before, weights(model._module)


def dcgan():
    """dcgan.py: one backward pass for real and fake, then the generator's."""
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 6, 3, 2, 1),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(24, 1),
        nn.Sigmoid(),
        nn.Flatten(0),
    )
    generator = nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4), nn.Tanh(), nn.ConvTranspose2d(4, 1, 4, 2, 1)
    )
    both = nn.ModuleList([critic, generator])
    before = weights(both)
    loader = DataLoader(TensorDataset(torch.randn(24, 1, 8, 8)), batch_size=8)
    _, critic, optimizer, loader = make_private(critic, loader, lr=0.02)
    theirs = torch.optim.Adam(generator.parameters(), lr=0.01)
    criterion = nn.BCELoss()
    for _ in range(2):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 5, 1, 1))
            optimizer.zero_grad(set_to_none=True)
            fakes, reals = critic(fake.detach()), critic(real)
            wrong = criterion(fakes, torch.zeros(len(real)))
            (wrong + criterion(reals, torch.ones(len(real)))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            theirs.zero_grad()
            criterion(critic(fake), torch.ones(len(real))).backward()
            theirs.step()
    return before, weights(both)


class Critic(nn.Module):
    """CTGAN's: ten rows a sample ("pac") side by side, dropout between layers."""

    def __init__(self, width, pac):
        super().__init__()
        self.dim = width * pac
        self.seq = nn.Sequential(
            nn.Linear(self.dim, 8), nn.LeakyReLU(0.2), nn.Dropout(0.0), nn.Linear(8, 1)
        )

    def forward(self, rows):
        return self.seq(rows.view(-1, self.dim))


def ctgan():
    """Wasserstein losses of packed rows; no batch norm, which DP-SGD can't have."""
    critic, pac = Critic(6, 1), 1
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6 * pac))
    both = nn.ModuleList([critic, generator])
    before = weights(both)
    loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8)
    _, critic, optimizer, loader = make_private(critic, loader)
    theirs = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for _ in range(2):
        for (real,) in loader:
            fake = torch.tanh(generator(torch.randn(len(real), 4)))
            optimizer.zero_grad()
            y_fake, y_real = critic(fake.detach()), critic(real)
            (torch.mean(y_fake) - torch.mean(y_real)).backward()
            optimizer.step()
            optimizer.zero_grad()
            theirs.zero_grad()
            (-torch.mean(critic(torch.tanh(generator(torch.randn(8, 4)))))).backward()
            theirs.step()
    return before, weights(both)
