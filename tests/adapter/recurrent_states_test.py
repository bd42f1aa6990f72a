"""Recurrent layers as models: outputs and states have the shapes of the plain model."""

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM
from torch import nn

from tests.adapter.common import steps
from tests.common import squares

D, H, T = 3, 2, 4
KINDS = {"DPLSTM": DPLSTM, "DPGRU": DPGRU, "LSTM": nn.LSTM, "GRU": nn.GRU}


class Recurrent(nn.Module):
    def __init__(self, kind, layers, first):
        super().__init__()
        self.rnn = KINDS[kind](D, H, num_layers=layers, batch_first=first)

    def forward(self, x, state=None):
        return self.rnn(x, state)


def parts(output):
    y, state = output
    return [y, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("mode", ["ghost_bk", "scan", "hooks"])
@pytest.mark.parametrize("length", [T, 1])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_states(kind, layers, first, length, mode):
    torch.manual_seed(0)
    dim = 0 if first else 1

    def given_back(model, x):
        """Twice: with no state, and with the one that was returned."""
        x = x if first else x.transpose(0, 1)
        y, state = model(x)
        for own, plain in zip(parts((y, state)), parts(plain_model()(x))):
            torch.testing.assert_close(own, plain)
        detached = [s.detach() for s in parts((y, state))[1:]]
        again = model(x, tuple(detached) if len(detached) > 1 else detached[0])
        return sum(
            squares(s.transpose(0, d))
            for out in ((y, state), again)
            for s, d in zip(parts(out), (dim, 1, 1))
        )

    model = Recurrent(kind, layers, first)
    plain = Recurrent(kind, layers, first).double()

    def plain_model():
        plain.load_state_dict(model.state_dict())
        return plain

    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(n, length, D, generator=generator).double() for n in (4, 1, 3, 2)
    ]
    steps(model, batches, mode, loss_fn=given_back, batch_first=first)
