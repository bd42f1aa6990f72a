"""The one private function of torch that is more than a name: gradients of edges."""

import torch
from torch.autograd.graph import get_gradient_edge

from opacus_ext.private_torch import gradients


def test_gradients_are_those_of_autograd():
    """Also of edges and of what is not used; without inputs nothing is changed."""
    left, right, unused = (torch.randn(3, requires_grad=True) for _ in range(3))
    inner = left * right
    output = inner.square()
    inputs, weights = [left, unused, get_gradient_edge(inner)], torch.rand(3)
    expected = torch.autograd.grad(
        [output], inputs, [weights], allow_unused=True, retain_graph=True
    )
    assert gradients([output], [], [weights], True) == ()
    found = gradients([output], inputs, [weights], False)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[2], expected[2])
    assert found[1] is None and expected[1] is None
    assert left.grad is None and right.grad is None
