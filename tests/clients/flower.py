"""A Flower client that trains with Opacus, as in Flower's example of Opacus."""

from collections import OrderedDict

import torch
from flwr.client import NumPyClient
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.weights import NOISE, weights


class FlowerClient(NumPyClient):
    def __init__(self, model, loader):
        super().__init__()
        self.model, self.loader = model, loader

    def get_parameters(self, config):
        return [w.numpy().copy() for w in self.model.state_dict().values()]

    def fit(self, parameters, config):
        names = self.model.state_dict()
        state = OrderedDict(
            (name, torch.tensor(w)) for name, w in zip(names, parameters)
        )
        self.model.load_state_dict(state, strict=True)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        engine = PrivacyEngine(accountant="rdp", secure_mode=False)
        model, optimizer, loader = engine.make_private(
            module=self.model,
            optimizer=optimizer,
            data_loader=self.loader,
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
        )
        for image, label in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(image), label).backward()
            optimizer.step()
        model.remove_hooks()  # the next round wraps the same model again
        spent = engine.get_epsilon(delta=1e-5)
        return self.get_parameters({}), len(self.loader.dataset), {"epsilon": spent}


def flower():
    """Two rounds of two clients; the server's mean is ``aggregate``, Flower's own."""
    from flwr.server.strategy.aggregate import aggregate

    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    before = weights(model)
    data = TensorDataset(torch.randn(32, 1, 6, 6), torch.randint(0, 4, (32,)))
    clients = [FlowerClient(model, DataLoader(data, batch_size=8)) for _ in range(2)]
    parameters = clients[0].get_parameters({})
    for _ in range(2):
        answers = [client.fit(parameters, {})[:2] for client in clients]
        parameters = aggregate(answers)
    return before, {str(i): torch.tensor(w) for i, w in enumerate(parameters)}
