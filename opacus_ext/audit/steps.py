"""An audit of single steps. It knows the noise-free sum of each step."""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_ext.audit import canaries as inserted
from opacus_ext.audit.bounds import gaussian_epsilon
from opacus_ext.audit.report import Audit, Finding
from opacus_ext.checks import subject
from opacus_ext.data.spent import NOT_TAKEN
from opacus_ext.engine import PrivacyEngine
from opacus_ext.private_torch import tree_map
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

Collate = Callable[[List[Any]], Any]
#: From samples to what a step releases about them, flattened ``[P]``.
Release = Callable[[Sequence[Any]], torch.Tensor]


class PrivateStep(subject.PrivateStep):
    """
    The package's own step as a :data:`Release`: the noisy sum of clipped gradients,
    read off the change of the parameters. Each step begins with the same parameters.

    Args:
        model: is copied, and the dropout of the copy set to 0
        loss_fn: takes a model and a batch, returns losses ``[B]``
        samples: some samples; an empty batch is made from theirs
        collate: makes a batch from a list of samples, as in a ``DataLoader``
        **options: of ``make_private``: ``max_grad_norm``, ``noise_multiplier`` (0 for
            the sum itself), ``grad_sample_mode``, ``data_loader`` and others

    Attributes:
        model, engine, loader: the copy, its engine, and the loader of ``make_private``
        sizes: entries of each trainable parameter, by name, in the release's order
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: subject.LossFn,
        samples: Sequence[Any],
        *,
        collate: Collate = default_collate,
        **options: Any,
    ):
        self.engine = PrivacyEngine(accountant="prv_bounds")
        self.model: Any = subject.without_dropout(model).train()
        self._collate = collate
        self._empty = tree_map(lambda x: x[:0], collate(list(samples)))
        options.setdefault("data_loader", DataLoader(TensorDataset(torch.zeros(1))))
        options.setdefault("grad_sample_mode", "ghost_bk")
        super().__init__(self.engine, self.model, loss_fn, lr=1.0, **options)
        named = self.model.named_parameters()
        self.sizes = {name: p.numel() for name, p in named if p.requires_grad}
        self._starts = [p.detach().clone() for p in self.params]

    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """The release ``[P]`` for these samples, of which there may be none."""
        self.step(self._collate(list(samples)) if len(samples) else self._empty)
        pairs = list(zip(self._starts, self.params))
        with torch.no_grad():
            changes = [(start - p).flatten().cpu() for start, p in pairs]
            for start, p in pairs:
                p.copy_(start)
        return torch.cat(changes)


def audit_steps(
    release: Release,
    exact: Release,
    pairs: Mapping[str, Sequence[Tuple[Sequence[Any], Any]]],
    *,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    trials: int = 50,
    sizes: Optional[Mapping[str, int]] = None,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> Audit:
    """
    Tests the claim that a step is a Gaussian mechanism with this noise multiplier.

    - *Sensitivity*, without chance: the noise-free sums with and without a canary
      differ by at most C = ``max_grad_norm``, to a relative 1e-3.
    - *Noise*: the release minus the noise-free sum has the variance
      ``(noise_multiplier C)^2``, in each parameter and in the least likely step
      (chi-squared, both sides), with the canary or without, by a fair coin.

    All tests of the noise share the error rate ``1 - confidence``.

    Args:
        release: the step under test, with the same parameters and fresh noise each time
        exact: the same step without noise
        pairs: for each kind, pairs of samples and a canary that may be added to them
        trials: their number for each kind
        sizes: entries of each part of the release whose noise is tested, in order

    Raises:
        Refused: without noise, or for fewer than 16 trials
    """
    if not (noise_multiplier > 0 and trials >= 16):
        what = f"noise_multiplier={noise_multiplier:g}, trials={trials}: too little."
        raise Refused(what, parameter="trials", remedy="Take 16 of each kind or more.")
    source, std = np.random.default_rng(0), noise_multiplier * max_grad_norm
    findings, squares = [], []
    for kind, some in progress(pairs.items(), "auditing steps"):
        sums = [(exact(others), exact([*others, canary])) for others, canary in some]
        # np.max: a sum that is not a number must not pass for a small one
        change = float(np.max([float((b - a).norm()) for a, b in sums]))
        row = kind, max_grad_norm, change, "greatest change of the sum"
        broken = not change <= max_grad_norm * (1 + 1e-3)
        findings.append(Finding("sensitivity", *row, broken))
        for trial, coin in enumerate(source.integers(2, size=trials)):
            others, canary = some[trial % len(some)]
            given = release([*others, canary] if coin else others).double()
            noise = (given - sums[trial % len(some)][coin].double()) / std
            parts = noise.square().split(list((sizes or {"all": len(noise)}).values()))
            squares.append([float(part.sum()) for part in parts])
    findings += _noise(np.array(squares), sizes or {"all": len(noise)}, 1 - confidence)
    claimed = gaussian_epsilon(1 / noise_multiplier, delta)
    return Audit(0.0, claimed, delta, confidence, findings)


def _noise(sums: np.ndarray, sizes: Mapping[str, int], level: float) -> List[Finding]:
    """Tests sums of squares ``[steps, parts]``: each part, and the oddest step."""

    def p_value(total: float, n: int) -> float:
        return 2 * float(min(chi2.cdf(total, n), chi2.sf(total, n)))

    steps, entries = len(sums), sum(sizes.values())
    oddest = min(sums.sum(1), key=lambda total: p_value(total, entries))
    tests = [(name, sizes[name] * steps) for name in sizes] + [("oddest step", entries)]
    found = []
    for (name, n), total in zip(tests, [*sums.sum(0), oddest]):
        row = name, 1.0, (total / n) ** 0.5, "std over claimed"
        broken = not p_value(total, n) >= level / (len(sizes) + steps)
        found.append(Finding("noise", *row, broken))
    return found


def audit_model(
    model: nn.Module,
    loss_fn: subject.LossFn,
    records: Any,
    *,
    canaries: int = 16,
    noise_multiplier: float = 0.5,
    max_grad_norm: float = 1.0,
    grad_sample_mode: str = "ghost_bk",
    clipping: str = "flat",
    collate: Collate = default_collate,
    **options: Any,
) -> Audit:
    """
    :func:`audit_steps` of :class:`PrivateStep`, with a gradient canary beside all
    records, with each record beside the others, and with each record alone.

    Args:
        records: a list of samples, or a tree of tensors ``[B, ...]``
        canaries: how many gradient canaries; all parameters take turns
        collate: makes a batch from a list of samples; if it lets one sample change
            others (by a padded length), the audit finds that
        **options: of :func:`audit_steps`

    Raises:
        Refused: as :func:`audit_steps`, and for more canaries than entries

    Example:
        >>> layer, x = nn.Linear(3, 5), torch.randn(4, 3)
        >>> found = audit_model(layer, lambda m, x: m(x).square().sum(1), x)
        >>> found.ok, found.epsilon < found.claimed
        (True, True)
    """
    whole = inserted.WithCanaries(model, loss_fn, canaries, 100 * max_grad_norm)
    samples = inserted.marked(records, range(canaries))
    given, alone = samples[:-canaries], samples[-canaries:]

    def together(some: Sequence[Any]) -> Any:
        marks, plain = zip(*some)
        return torch.tensor(marks), collate(list(plain))

    with quiet():
        release, exact = (
            PrivateStep(
                whole,
                nn.Module.__call__,
                given,
                collate=together,
                noise_multiplier=noise,
                max_grad_norm=max_grad_norm,
                grad_sample_mode=grad_sample_mode,
                clipping=clipping,
            )
            for noise in (noise_multiplier, 0.0)
        )
    others = [given[:i] + given[i + 1 :] for i in range(len(given))]
    pairs = {
        "a gradient beside all": [(given, canary) for canary in alone],
        "a record beside others": list(zip(others, given)),
        "a record alone": [([], record) for record in given],
    }
    options.update(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    sizes = {name.removeprefix("model."): n for name, n in release.sizes.items()}
    with quiet():
        return audit_steps(release, exact, pairs, sizes=sizes, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings that say nothing of an audit: its steps need no loader."""
    with warnings.catch_warnings():
        for message in ("Secure RNG turned off", re.escape(NOT_TAKEN)):
            warnings.filterwarnings("ignore", message)
        yield
