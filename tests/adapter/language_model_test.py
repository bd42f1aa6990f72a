"""The language model of pytorch/examples: hidden states, flattened tokens, time first.

Its lines are as there (word_language_model), but for those marked "changed".
"""

import copy

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from tests.adapter.common import EVERY_MODE
from tests.common import assert_same, clipped_sum, trainable

V, D, B, C = 11, 5, 4, 0.3


class RNNModel(nn.Module):
    def __init__(self, flattened, layers=2):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(V, D)
        self.rnn = nn.LSTM(D, D, layers, dropout=0.0)
        self.decoder = nn.Linear(D, V)
        self.layers, self.flattened = layers, flattened

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        if self.flattened:
            decoded = decoded.view(-1, V)  # changed: without this line
        return F.log_softmax(decoded, dim=-1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (
            weight.new_zeros(self.layers, bsz, D),
            weight.new_zeros(self.layers, bsz, D),
        )


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def text():
    """``data [T, B]`` and ``targets [T * B]``, of several lengths."""
    stream = torch.randint(V, (24, B))
    for begin, end in ((0, 4), (4, 9), (9, 13), (13, 14), (14, 19)):
        yield stream[begin:end], stream[begin + 1 : end + 1].reshape(-1)


def expected(model, data, targets, hidden, criterion):
    """Each sequence alone."""
    rows = []
    for b in range(B):
        alone = copy.deepcopy(model)
        state = tuple(h[:, b : b + 1].clone() for h in hidden)
        output, _ = alone(data[:, b : b + 1], state)
        criterion(output.reshape(-1, V), targets.view(-1, B)[:, b]).backward()
        rows.append({n: p.grad for n, p in trainable(alone).items()})
    return clipped_sum(
        {n: torch.stack([r[n] for r in rows]) for n in rows[0]}, "flat", C
    )


def private(model, criterion, mode):
    return PrivacyEngine().make_private(  # changed
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(torch.zeros(B, 1)), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=C,
        batch_first=False,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_word_language_model(mode):
    torch.manual_seed(0)
    plain = RNNModel(flattened=False).double()
    criterion = nn.NLLLoss()
    model, optimizer, *rest = private(copy.deepcopy(plain), criterion, mode)
    criterion = rest[0] if len(rest) > 1 else criterion
    model.train()
    hidden = plain.init_hidden(B)
    for data, targets in text():
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        plain.load_state_dict(model._module.state_dict())
        sums = expected(plain, data, targets, hidden, nn.NLLLoss())
        output, hidden = model(data, hidden)
        with torch.no_grad():
            own, own_hidden = plain(data, tuple(h.clone() for h in hidden))
        assert output.shape == own.shape and output.is_contiguous()
        assert [h.shape for h in hidden] == [h.shape for h in own_hidden]
        if len(rest) > 1:  # sequences first, as the private criterion takes them
            loss = criterion(
                output.permute(1, 2, 0), targets.view(-1, B).t()
            )  # changed
        else:
            loss = criterion(output.view(-1, V), targets)  # changed
        loss.backward()
        optimizer.step()
        got = {n: B * p.grad for n, p in trainable(model._module).items()}
        assert_same(got, sums, 1e-7, mode)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_flattened_output_is_named(mode):
    model, optimizer, *rest = private(RNNModel(True), nn.NLLLoss(), mode)
    criterion = rest[0] if len(rest) > 1 else nn.NLLLoss()
    data, targets = next(text())
    output, hidden = model(data, model._module.init_hidden(B))
    with pytest.raises(Refused, match=r"RNNModel: output\[0\] has shape \(4, 11\)"):
        criterion(output, targets)


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_hooks_on_outputs(mode, capsys):
    """As users look at gradients."""
    model, _, *rest = private(RNNModel(False), nn.NLLLoss(), mode)
    criterion = rest[0] if len(rest) > 1 else nn.NLLLoss()
    data, targets = next(text())
    output, _ = model(data, model._module.init_hidden(B))
    output.register_hook(print)
    criterion(output.permute(1, 2, 0), targets.view(-1, B).t()).backward()
    assert "tensor" in capsys.readouterr().out
