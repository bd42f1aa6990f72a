"""Random numbers, which must not reveal the position of a sample in the batch.

Samples that run together draw from torch's own generators, each sample its own part of
the numbers. The numbers are fresh only if the generators go on from draw to draw. If
code sets a seed or a state in between, a sample's numbers depend on its position in the
batch, and so on the other samples. Then samples run one by one, and each sets the seed
anew.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
from torch.nn import functional as F
from torch.nn import init

T = torch.Tensor

_NAMES = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"),
    *("randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "kaiming_uniform_", "kaiming_normal_"),
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_"),
    *("gumbel_softmax", "scaled_dot_product_attention", "_standard_gamma"),
    *("multi_head_attention_forward", "_sample_dirichlet", "fractional_max_pool2d"),
    *("fractional_max_pool3d", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
)
#: Functions that may draw random numbers. Draws by other functions look like set seeds.
DRAWS: set[Callable] = {
    getattr(namespace, name)
    for namespace in (torch, T, F, init)
    for name in _NAMES
    if hasattr(namespace, name)
}


def random_state() -> tuple[T, tuple]:
    """Returns the states of torch's own generators."""
    on_devices: tuple = torch.cuda.default_generators
    if on_devices and torch.cuda.is_initialized():
        # The seed and offset are on the host: no device has to be waited for.
        on_devices = tuple((g.initial_seed(), g.get_offset()) for g in on_devices)
    return torch.default_generator.get_state(), on_devices


def torch_generators() -> list[torch.Generator]:
    """Returns torch's own generators."""
    generators = [torch.default_generator]
    # Before CUDA is initialized its generators have given no numbers.
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return generators


def states() -> list[tuple[torch.Generator, T]]:
    """Returns torch's own generators and their states."""
    return [(generator, generator.get_state()) for generator in torch_generators()]


@contextmanager
def set_to(given: list[tuple[torch.Generator, T]]) -> Iterator[None]:
    """Sets generators to states for a block."""
    before = [(generator, generator.get_state()) for generator, _ in given]
    for generator, state in given:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


class Stream:
    """
    The numbers of one of torch's generators, as a sample finds it. If this sample has
    set a seed, another sample finds the same state as this one did. If it has drawn
    numbers, or has set the seed that was there already, another sample finds a new
    stream that follows from this state.
    """

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self._remember()

    def _remember(self) -> None:
        self.state = self.generator.get_state()
        self.seed = self.generator.initial_seed()

    def begin_anew(self) -> None:
        """Called between samples."""
        generator = self.generator
        if torch.equal(generator.get_state(), self.state):
            return
        was_seeded = generator.initial_seed() != self.seed
        generator.set_state(self.state)
        # Another sample that draws must not draw the same numbers.
        if not was_seeded:
            options: Any = dict(generator=generator, device=generator.device)
            generator.manual_seed(int(torch.randint(2**62, (), **options)))
            self._remember()


def is_own(generator: torch.Generator | None) -> bool:
    """Returns True for a generator that is not one of torch's own."""
    if generator is None:
        return False
    return not any(generator is one for one in torch_generators())
