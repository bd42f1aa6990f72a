r"""Secure noise and draws: ``PrivacyEngine(secure_mode=True)``.

Random bits come from the operating system (``os.urandom``), and noise is a Gaussian
rounded to a grid. Floating-point noise has gaps that reveal what it was added to
(Mironov 2012, "On Significance of the Least Significant Bits for Differential
Privacy"). Opacus adds four such draws, which makes that hard to exploit (Holohan and
Braghin 2021, "Secure Random Sampling in Differential Privacy"). Here there are no gaps.

Let f be the sum of clipped gradients, with d entries and sensitivity S. Let g be the
grid, a power of two, and s the noise multiplier. The release is

    g (round(f / g) + Z),   Z = round(N / g),   N ~ Normal(0, std^2) in each entry,

with ``std = s (S + g sqrt(d))`` and Z drawn exactly. Privacy: a whole number can be
moved into a rounding, so the release equals ``g round((g round(f / g) + N) / g)``. That
is a function of the ideal Gaussian mechanism on ``g round(f / g)``. Rounding moves f by
at most ``g sqrt(d) / 2``, so the rounded sum has a sensitivity of at most
``S + g sqrt(d)``, and std is s times that. As g is at most ``s S / 2^30``, std grows by
``s sqrt(d)`` billionths. All of this uses whole numbers below 2^63; what follows,
including the cast to the parameter's dtype, is post-processing.

The discrete Gaussian of Canonne, Kamath and Steinke (2020) is an alternative; a rounded
Gaussian keeps the accounting of the Gaussian itself.

Z is drawn by the inverse of the normal distribution function. The bits of a uniform
number name an interval. If both ends round to the same whole number, that is Z. If not,
the comparison is repeated with more digits and more random bits until it is decided.
"""

from __future__ import annotations

import bisect
import math
import os
from typing import Any, Optional, Tuple

import torch

from opacus_ext.refused import Refused

__all__ = ["SecureSource", "add_rounded_noise", "gaussian_grid"]

_FINE = 30  # the grid is at least 2^30 times finer than the noise's std
_CHUNK = 2**20  # entries that are drawn together
_BITS = 63  # of the uniform number that gives |N|; one more bit is the sign of N
_LARGEST = 2.0**61  # grid steps; clamping there moves no two sums further apart

# Float64 does not decide where the uniform number is below 2^-18, or |N| / std within
# _ERROR of a point where rounding changes. Elsewhere |N| / std is at most 4.62. There
# ndtri is off by a relative 7.2e-16 (says Cephes, its source), the bits not drawn
# yet move it by 6e-15, and rounding moves it by less: together a sixth of _ERROR.
_TAIL = 2 ** (_BITS - 18)
_ERROR = 2.0**-44


class SecureSource:
    """
    Random numbers from the operating system, instead of a ``torch.Generator``. Torch's
    own functions refuse it, so that none of them can draw other random numbers.

    Example:
        >>> SecureSource().integers(3).shape
        torch.Size([3])
    """

    def integers(self, count: int) -> torch.Tensor:
        """``[count]`` uniform whole numbers from 0 to 2^63 - 1, int64."""
        return _words(count) & (2**_BITS - 1)


def _words(count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)


def gaussian_grid(
    noise_multiplier: float, sensitivity: float, entries: int
) -> Tuple[float, float]:
    """
    Returns the std of the noise, and the grid, for a sum that is released.

    Args:
        noise_multiplier: the one that is accounted for
        sensitivity: of the sum, before it is rounded to the grid
        entries: their number in the sum

    Example:
        >>> std, grid = gaussian_grid(1.0, 1.0, 10**6)
        >>> grid == 2**-30, f"{std - 1:.2g}"
        (True, '9.3e-07')
    """
    _, exponent = math.frexp(noise_multiplier * sensitivity)
    grid = math.ldexp(1.0, exponent - 1 - _FINE)
    root = math.isqrt(entries) + 1  # at least the square root
    return noise_multiplier * (sensitivity + grid * root), grid


def add_rounded_noise(total: torch.Tensor, std: float, grid: float) -> torch.Tensor:
    """
    Returns ``total`` rounded to the grid, plus Gaussian noise rounded to the grid, with
    the same dtype and on the same device. The noise is drawn on the CPU, since CUDA has
    no secure source.

    Args:
        total: real numbers
        std, grid: from :func:`gaussian_grid`

    Raises:
        Refused: if an entry is not a number (NaN), to which no noise can be added

    Example:
        >>> std, grid = gaussian_grid(1.0, sensitivity=1.0, entries=3)
        >>> add_rounded_noise(torch.zeros(3), std, grid).shape
        torch.Size([3])
    """
    steps = total.double() / grid
    if bool(steps.isnan().any()):
        raise Refused(
            "What is to be released with noise is not a number (NaN) somewhere.",
            remedy="Look for the first step with NaN in the weights; "
            'on_nonfinite="drop" leaves out samples without finite gradients.',
        )
    whole = steps.round_().clamp_(-_LARGEST, _LARGEST).long()
    noise = rounded_normals(std / grid, total.numel())
    whole += noise.view(total.shape).to(total.device)
    return (whole.double() * grid).to(total.dtype)


def with_noise(
    total: torch.Tensor, noise_multiplier: float, sensitivity: float, generator: Any
) -> torch.Tensor:
    """
    A statistic plus Gaussian noise: rounded to a grid if the generator is a
    :class:`SecureSource`, otherwise torch's.
    """
    std = noise_multiplier * sensitivity
    if isinstance(generator, SecureSource):
        entries = total.numel()
        grid = gaussian_grid(noise_multiplier, sensitivity, entries)
        return add_rounded_noise(total, *grid) if std else total
    shape, device = total.shape, total.device
    kind = {"dtype": total.dtype, "device": device, "generator": generator}
    return total + std * torch.randn(shape, **kind)


def rounded_normals(std: float, count: int) -> torch.Tensor:
    """
    ``round(N)`` for independent normal numbers ``N`` with this std. The distribution is
    exact if :func:`torch.special.ndtri` is accurate to a relative 1e-14.

    Returns:
        ``[count]``, int64, on the CPU.
    """
    found = torch.empty(count, dtype=torch.int64)
    for part in found.split(_CHUNK):
        words = _words(len(part))
        heads = words & (2**_BITS - 1)
        # Half of the uniform number is the probability of values below -|N|.
        half = heads.clamp(min=_TAIL).double() * 2.0 ** -(_BITS + 1)
        size = torch.special.ndtri(half) * -std
        whole = size.round()
        unsure = (size - whole).abs_() >= 0.5 - std * _ERROR
        whole = whole.long()
        for i in (unsure | (heads < _TAIL)).nonzero()[:, 0].tolist():
            least = int(size[i]) if heads[i] >= _TAIL else None
            whole[i] = _Uniform(int(heads[i])).rounded_normal(std, least)
        torch.where(words < 0, -whole, whole, out=part)
    return found


class _Uniform:
    """
    A uniform number U from 0 to 1. Its bits are drawn as they are needed.

    Args:
        head: the first bits, as a whole number
        bits: their number
    """

    def __init__(self, head: int, bits: int = _BITS):
        self.head, self.bits = head, bits

    def rounded_normal(self, std: float, least: Optional[int] = None) -> int:
        """
        ``round(|N|)`` for the |N| with ``P[|N'| > |N|] = U``, where N' is normal with
        this std.

        Args:
            std: of N'
            least: a whole number; the result is known to be this or the next one
        """
        if least is not None:
            return least if self.above(least, std) else least + 1
        most = math.ceil(10 * std)
        while not self.above(most, std):
            most *= 2
        return bisect.bisect_left(range(most), True, key=lambda n: self.above(n, std))

    def above(self, whole: int, std: float) -> bool:
        """
        True if ``|N| < whole + 1/2``: if U is above the probability of a larger size,
        ``erfc((whole + 1/2) / (std sqrt(2)))``.
        """
        import mpmath  # torch needs sympy, which needs it

        while True:
            # The threshold in units of the last bit, with an error far below one unit.
            with mpmath.workprec(self.bits + 64):
                size = (whole + mpmath.mpf(0.5)) / (std * mpmath.sqrt(2))
                threshold = mpmath.ldexp(mpmath.erfc(size), self.bits)
                lower, upper = threshold - 2.0**-20, threshold + 2.0**-20
                if self.head >= upper or self.head + 1 <= lower:
                    return bool(self.head >= upper)
            self.head = self.head << 64 | int.from_bytes(os.urandom(8), "big")
            self.bits += 64
