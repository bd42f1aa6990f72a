"""The baselines of Lee & Kifer 2021, as reference implementations.

Both take every sample's gradient by itself from plain autograd, clip it, and add it to
the sum: exact for any model whose samples are independent, and slow. They build steps
like those of ``step_time.py``, with the same loss, clipping, noise and ``SGD.step()``.
What a sample does not use (an expert that no token chose) has a gradient of zero.

- nxBP: one forward and one backward pass for each sample.
- multiLoss: one forward pass of the batch, then one ``torch.autograd.grad`` for each
  sample's loss. Each of these walks through the graph of the whole batch, so the time
  grows with the square of the batch size where a device has no cores to spare.
"""

from typing import Callable, Iterator, Tuple

import step_time
import torch
from step_time import Step, TokenLoss, noisy_sgd
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import TensorDataset

Gradients = Iterator[Tuple[torch.Tensor, ...]]


def nx_bp_gradients(model: nn.Module, data: TensorDataset) -> Gradients:
    """The gradient of each sample, from a forward and a backward pass of its own."""
    params, criterion = list(model.parameters()), TokenLoss()
    for x, y in zip(*(tensor.split(1) for tensor in data.tensors)):
        loss = criterion(model(x), y)
        yield torch.autograd.grad(loss, params, materialize_grads=True)


def multi_loss_gradients(model: nn.Module, data: TensorDataset) -> Gradients:
    """The gradient of each sample, from its loss in one forward pass of all."""
    params, (inputs, targets) = list(model.parameters()), data.tensors
    losses = TokenLoss("none")(model(inputs), targets)
    for i in range(len(losses)):
        again = i < len(losses) - 1
        yield torch.autograd.grad(
            losses[i], params, retain_graph=again, materialize_grads=True
        )


def baseline(
    gradients: Callable[[nn.Module, TensorDataset], Gradients],
) -> Callable[[nn.Module, TensorDataset, str], Step]:
    """A builder of steps that clip the gradients one by one and average them."""

    def build(model: nn.Module, data: TensorDataset, mode: str) -> Step:
        params, update = list(model.parameters()), noisy_sgd(model, len(data))
        bound = step_time.MAX_GRAD_NORM

        def step() -> None:
            for p in params:
                p.grad = torch.zeros_like(p)
            for gradient in gradients(model, data):
                clip = min(1.0, bound / (get_total_norm(gradient).item() + 1e-6))
                for p, g in zip(params, gradient):
                    p.grad.add_(g, alpha=clip / len(data))
            update()

        return step

    return build


nx_bp = baseline(nx_bp_gradients)
multi_loss = baseline(multi_loss_gradients)
