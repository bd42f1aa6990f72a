"""Error instantiation: the effective error of every parameter in a DP-SGD run.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.1 and appendix C.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Mapping, Sequence

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import Tensor, nn

from opacus_ext.refused import Refused
from opacus_ext.secure import SecureSource, with_noise


def gradient_noise(optimizer: Any) -> float:
    """
    Standard deviation of the noise in every element of an averaged gradient,
    sigma_dp C / B, read from a DP optimizer.

    Equation 3.1 as printed has the noise inside the clipping and without C. DP-SGD adds
    noise of std sigma_dp C to the sum; here C is the sensitivity of the clipping
    function (1 for "normalized"; the norm over all bounds for "per_layer") and B the
    expected batch size, over all processes. If the optimizer sums
    (``loss_reduction="sum"``), B is 1: what counts is the noise in ``p.grad``. Batches
    accumulated outside ``BatchMemoryManager`` divide it by their number once more.
    Correlated noise has, at each step, a std of its own: that of the last is taken.

    Args:
        optimizer: of Opacus or this package, as ``make_private`` returns it

    Raises:
        Refused: for an optimizer without noise

    Example:
        >>> from opacus.optimizers import DPOptimizer
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> gradient_noise(DPOptimizer(
        ...     sgd, noise_multiplier=2.0, max_grad_norm=0.5, expected_batch_size=4
        ... ))
        0.25
    """
    multiplier = getattr(optimizer, "noise_multiplier", None)
    if multiplier is None:
        raise Refused(
            f"{type(optimizer).__name__} adds no noise.",
            parameter="optimizer",
            remedy="Pass the optimizer that PrivacyEngine.make_private returned.",
        )
    for name in ("_adjusted_noise_multiplier", "gradient_noise_multiplier"):
        multiplier = getattr(optimizer, name, multiplier)
    correlated = getattr(optimizer, "correlated", None)
    if correlated is not None:
        multiplier *= correlated.std
    clip = getattr(optimizer, "sensitivity", optimizer.max_grad_norm)
    batch = 1.0
    if optimizer.loss_reduction != "sum":
        batch = optimizer.expected_batch_size * getattr(optimizer, "world_size", 1)
    return float(multiplier) * float(clip) / float(batch)


def effective_errors(
    model: nn.Module, optimizer: Any, shares: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """
    The effective error (a standard deviation) of every parameter of a model.

    With s = sigma_dp C / B of :func:`gradient_noise`: s for a parameter all samples
    use (claim 5.3), s / p_i for row i of an embedding that a share p_i of the samples
    uses (claim 5.4: sigma_dp / (B p_i)). The paper has C = 1. Parameters that the
    optimizer doesn't train have an error of 0. It is the noise of one averaged
    gradient: parameters are not gradients, and what they have gathered over a run may
    be far more or far less.

    An embedding that is also the output layer gets a gradient in all rows from every
    sample. The paper counts the input's use only, and so does this function if given
    shares for it.

    Args:
        model: the model, or the wrapper that ``make_private`` returned
        optimizer: the DP optimizer, as ``make_private`` returned it, or s itself for a
            model of which all parameters with gradients are trained
        shares: by name of a parameter ``[rows, *]``, the shares ``[rows]`` of samples
            that use each row, see :func:`token_shares`; for positions, the share of
            samples of at least that length. What is smaller than the smallest positive
            share counts as that: a token that was never seen is as rare as the rarest
            that was

    Returns:
        By the model's names of parameters: a scalar, or ``[rows]`` where there are
        shares. Squared, they are the variances that
        :class:`~opacus_ext.re_attention.Propagation` takes.

    Raises:
        Refused: for unknown names, shares of a wrong length or outside [0, 1], no
            positive share, an optimizer without noise

    Example:
        >>> from opacus.optimizers import DPOptimizer
        >>> model = nn.Embedding(3, 4)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> private = DPOptimizer(
        ...     sgd, noise_multiplier=2.0, max_grad_norm=1.0, expected_batch_size=10
        ... )
        >>> effective_errors(model, private)
        {'weight': tensor(0.2000)}
        >>> effective_errors(model, private, {"weight": torch.tensor([0.0, 0.1, 1.0])})
        {'weight': tensor([2.0000, 2.0000, 0.2000])}
    """
    params = dict(innermost(model).named_parameters())
    noise = optimizer if isinstance(optimizer, float) else gradient_noise(optimizer)
    return errors_of(params, noise, trained_names(params, optimizer), shares or {})


def trained_names(params: Mapping[str, Tensor], optimizer: Any) -> set[str]:
    """The names of those that err; with a number as optimizer, of all not frozen."""
    names = {name for name, p in params.items() if p.requires_grad}
    if isinstance(optimizer, float):
        return names
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name in names if id(params[name]) in trained}


def errors_of(
    params: Mapping[str, Tensor],
    noise: float,
    trained: set[str],
    shares: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """:func:`effective_errors` of parameters, of which some are trained."""
    if unknown := sorted(set(shares) - set(params)):
        raise Refused(
            f"shares for {unknown}; the parameters are {list(params)}.",
            parameter="shares",
        )
    errors = {}
    for name, p in params.items():
        error = torch.tensor(noise if name in trained else 0.0, device=p.device)
        if name in shares:
            error = error / _checked_shares(name, p, shares[name])
        errors[name] = error
    return errors


def innermost(model: nn.Module) -> nn.Module:
    """The model in wrappers of Opacus, torch.compile or distributed training."""
    inside = model
    if isinstance(model, (nn.parallel.DistributedDataParallel, DPDDP)):
        inside = model.module
    else:
        for name in ("_module", "_orig_mod"):
            inside = getattr(inside, name, inside)
    return model if inside is model else innermost(inside)


def _checked_shares(name: str, p: Tensor, given: Tensor) -> Tensor:
    shares = given.detach().to(p.device, torch.float32)
    if shares.shape != p.shape[:1]:
        raise Refused(
            f"{name} {list(p.shape)} needs {p.shape[0]} shares, got "
            f"{list(given.shape)}.",
            parameter=name,
        )
    if not bool(((shares >= 0) & (shares <= 1)).all()):
        raise Refused(f"The shares of {name} must lie between 0 and 1.", parameter=name)
    positive = shares[shares > 0]
    if not len(positive):
        raise Refused(f"No share of {name} is positive.", parameter=name)
    return shares.clamp(min=float(positive.min()))


def token_shares(
    sequences: Sequence[Tensor],
    vocabulary: int,
    *,
    source: str,
    max_tokens: int | None = None,
    noise_multiplier: float | None = None,
    accountant: Any = None,
    padding_idx: int | None = 0,
    generator: torch.Generator | SecureSource | None = None,
) -> Tensor:
    """
    p_i: the share of *sequences* that contain token i, ``[vocabulary]``.

    The paper calls it the frequency of the token, but claim 5.4 is derived (C.3) for
    the chance that a sequence contains it, not for the share among all tokens. It
    depends on the data, and the paper assumes it to be public (remark C.1). Where a
    public table exists (an earlier release, another population), pass that to
    :func:`effective_errors` and do without this function. Otherwise ``source``:

    - "private": the Gaussian mechanism on the counts. Adding or removing one sequence
      changes the number of sequences and the counts of its distinct tokens by 1 each.
      With at most L = ``max_tokens`` of them (the last L; earlier ones aren't counted)
      this is a sensitivity of sqrt(L + 1) in L2, and noise of std
      ``noise_multiplier * sqrt(L + 1)`` is added. It is recorded in the accountant as a
      step with that multiplier and a sample rate of 1. What follows is post-processing:
      counts below the std of the noise, which can't be told from 0, become that std,
      and shares above 1 become 1. The paper expects high accuracy at a tiny budget
      (remark C.1). That holds for tokens that occur in many more sequences than the
      std; all others get the same share. A smaller L lowers the noise.
    - "exact": the counts as they are. This spends privacy that no accountant sees, and
      says so in a warning.

    Pass sequences as training sees them: cut to the same length. Call it once.
    Choosing the noise of the training by ``make_private_with_epsilon`` ignores what has
    been spent before, so leave a part of the budget for it.

    Args:
        sequences: token ids, one tensor ``[T]`` for each sequence, or ``[N, T]``
        vocabulary: number of tokens, as in the embedding
        source: "private" or "exact"
        max_tokens: the most distinct tokens of a sequence that are counted, L
        noise_multiplier: for "private"; 20 costs an epsilon of about 0.2 by itself, at
            a delta of 1e-5
        accountant: for "private", of Opacus: RDP or PRV; "gdp" can't take steps that
            differ
        padding_idx: not counted, its share is 0; None if there is no padding
        generator: for the noise, which is drawn in float64 without protection from
            attacks on floating-point numbers; whoever knows the seed knows the noise.
            ``opacus_ext.secure.SecureSource()`` draws secure noise

    Raises:
        Refused: for another source, ids outside the vocabulary, "private" without
            its arguments

    Warns:
        UserWarning: for "exact"

    Example:
        >>> from opacus.accountants import RDPAccountant
        >>> accountant = RDPAccountant()
        >>> shares = token_shares(
        ...     torch.tensor([[1, 2, 2], [1, 0, 0]]), 4, source="private",
        ...     max_tokens=3, noise_multiplier=20.0, accountant=accountant,
        ... )
        >>> shares.shape, accountant.history
        (torch.Size([4]), [(20.0, 1.0, 1)])
    """
    if source not in ("private", "exact"):
        raise Refused(
            f'source must be "private" or "exact", not {source!r}.', parameter="source"
        )
    private = source == "private"
    if private and (
        accountant is None
        or not (max_tokens or 0) > 0
        or not (noise_multiplier or 0) > 0
    ):
        raise Refused(
            'source="private" needs max_tokens, a positive noise_multiplier and the '
            "accountant of the run, as PrivacyEngine has it.",
            parameter="source",
        )
    if not private:
        warnings.warn(
            "Token shares are taken from the data as they are. What is trained with "
            "them is not covered by the privacy guarantee, unless they are public. "
            'source="private" releases them within it.',
            stacklevel=2,
        )
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for ids in sequences:
        tokens = _distinct(ids, padding_idx)
        if max_tokens is not None:
            tokens = tokens[len(tokens) - min(max_tokens, len(tokens)) :]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise Refused(
                f"Token ids {min(tokens)} to {max(tokens)} in a vocabulary of "
                f"{vocabulary}.",
                parameter="sequences",
                remedy="Pass vocabulary=, the number of rows of the embedding.",
            )
        counts[tokens] += 1
    total = torch.tensor(float(len(sequences)), dtype=torch.float64)

    if private:
        assert max_tokens and noise_multiplier  # or it was refused
        _record(accountant, noise_multiplier)
        sensitivity = math.sqrt(max_tokens + 1)
        std = noise_multiplier * sensitivity
        both = torch.cat([total[None], counts])
        both = with_noise(both, noise_multiplier, sensitivity, generator)
        total, counts = both[0], both[1:].clamp(min=max(std, 1.0))
    shares = (counts / total.clamp(min=1)).clamp(max=1).float()
    if padding_idx is not None:
        shares[padding_idx] = 0
    return shares


def _record(accountant: Any, noise_multiplier: float) -> None:
    history = list(accountant.history)
    try:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    except ValueError:
        accountant.history = history  # "gdp" drops a run's cost when it refuses
        raise


def _distinct(ids: Tensor, padding_idx: int | None) -> list[int]:
    """The distinct tokens of a sequence, by their last occurrence."""
    latest = list(dict.fromkeys(reversed(torch.as_tensor(ids).tolist())))
    return [token for token in reversed(latest) if token != padding_idx]
