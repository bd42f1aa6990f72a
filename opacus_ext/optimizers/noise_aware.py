"""
Adam that knows of the noise, for ``make_private``.

The noise of DP-SGD adds its variance to Adam's second moment. Where noise is larger
than the gradients, all entries have the same second moment then, and Adam is SGD with
momentum. :class:`AdamBC` subtracts that variance. :class:`ScaledAdam` divides gradients
by a scale before they are clipped, so that noise has the proportions of the gradients.

``make_private`` takes any optimizer of torch. One that has an attribute
``noise_variance`` is told the variance of the noise before each step, and what its
method ``gradient_scales()`` returns, by parameter, divides the gradients of the next
logical batch.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

import torch
from torch.optim.optimizer import ParamsT

from opacus_ext.grad_sample.factors import Scale, upcast
from opacus_ext.refused import Refused, check_number

_SQUARES = 100  # of which a mean is known to 14 percent
# A subclass whose step() calls that of Adam itself would run hooks of a step twice.
_step_of_adam: Callable[..., Any] = inspect.unwrap(torch.optim.Adam.step)


class AdamBC(torch.optim.AdamW):
    r"""
    Adam, or AdamW with ``weight_decay``, whose second moment is corrected for the
    variance of the noise. Source: Tang, Shpilevskiy and Lécuyer 2023, "DP-AdamBC: Your
    DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)".

    A step is ``lr * m / sqrt(max(v - phi, floor * phi))``, with the moments m and v of
    Adam, and ``phi = (sigma C / B)^2``, the variance of the noise in each entry of the
    mean gradient. ``make_private`` tells it before each step. It may change from step
    to step, as a bound that adapts does: then phi is its moving average, as v is that
    of the squares. Without noise, and without ``make_private``, it is torch's Adam or
    AdamW bit for bit.

    Args:
        params: as of ``torch.optim.AdamW``
        lr: learning rate. A step is up to ``1 / sqrt(floor)`` times as long as one of
            Adam where noise is larger than the gradients, so take a smaller one
        betas: decays of the moments
        eps: added to the root of v, in steps without noise only
        weight_decay: decoupled, as in AdamW
        floor: the least variance of a gradient, over that of the noise. The constant
            gamma' of the paper, in units of a squared gradient, is ``floor * phi``.
            Noise alone moves ``v - phi`` by ``sqrt(2 (1 - beta2) / (1 + beta2)) * phi``
            (0.03 phi for a beta2 of 0.999), so that a smaller floor takes it for a
            gradient. With a floor far above 1 it is SGD with momentum
        maximize: True maximizes

    Raises:
        Refused: unless ``floor`` is a positive number

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamBC(model.parameters(), lr=1e-3, weight_decay=0.01)
        >>> optimizer.noise_variance = 1e-4  # make_private does this in each step
    """

    #: The variance of the noise in each entry of the gradients of the next step.
    noise_variance: Optional[float] = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        floor: float = 0.1,
        maximize: bool = False,
    ):
        check_number("floor", floor)
        options: Any = dict(weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, lr=lr, betas=betas, eps=eps, **options)
        # Copies of an optimizer keep these, and no other attributes.
        self.defaults["floor"] = floor

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """See ``torch.optim.Optimizer``; a variance holds for one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        variance, self.noise_variance = self.noise_variance or 0.0, None
        has_noise = False
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state, beta2 = self._state_of(p), group["betas"][1]
                    state["noise"] = beta2 * state["noise"] + (1 - beta2) * variance
                    has_noise |= state["noise"] > 0
        if not has_noise:
            _step_of_adam(self)
            return loss
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_with_noise(params, group)
        return loss

    def _step_with_noise(
        self, params: List[torch.Tensor], group: Dict[str, Any]
    ) -> None:
        """Takes a step with the parameters of a group."""
        beta1, beta2 = group["betas"]
        rate = float(group["lr"])
        grads: Any = [p.grad for p in params]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        states = [self._state_of(p) for p in params]
        for state in states:
            state["step"] += 1
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        steps = [float(state["step"]) for state in states]
        of_squares = [1 - beta2**step for step in steps]
        noises = [state["noise"] / c for state, c in zip(states, of_squares)]
        corrected = torch._foreach_div(squares, of_squares)
        torch._foreach_sub_(corrected, noises)
        floor = self.defaults["floor"]
        # A parameter that has met no noise yet may have gradients of zero.
        tiny = torch.finfo(torch.float32).tiny
        least = [max(floor * phi, tiny) for phi in noises]
        torch._foreach_clamp_min_(corrected, least)
        torch._foreach_sqrt_(corrected)
        torch._foreach_mul_(corrected, [1 - beta1**step for step in steps])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(params, means, corrected, -rate)

    def _state_of(self, p: torch.Tensor) -> Dict[str, Any]:
        """
        Returns the state of a parameter: Adam's, and the moving average of the noise's
        variance, without the correction for its beginning.
        """
        state = self.state[p]
        if not state:
            zeros = functools.partial(
                torch.zeros_like, p, memory_format=torch.preserve_format
            )
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = zeros(), zeros()
        state.setdefault("noise", 0.0)  # a checkpoint of Adam has none
        return state


class ScaledAdam(torch.optim.AdamW):
    r"""
    Adam, or AdamW with ``weight_decay``, that scales gradients before they are clipped
    (scale-then-privatize). Source: Ganesh, McMahan and Thakurta 2025, "On Design
    Principles for Private Adaptive Optimizers".

    Let s be the scale of an entry: the root of its second moment in earlier steps,
    which are private already. Each sample's gradient is divided by s and clipped to
    ``max_grad_norm``, noise is added to the sum, and the result is multiplied by s.
    Where gradients are small, so is the noise. In the space of the divided gradients it
    is the Gaussian mechanism, with the same epsilon.

    Scales have a mean square of 1 over all entries, so that noise has the norm that it
    has without them, and ``max_grad_norm`` can be what it is without them. For a
    parameter of two and more axes they are an outer product of one vector for each
    axis, as in Adafactor: norms of linear layers and embeddings stay as cheap as they
    are. Each number is a mean of at least 100 squares, over entries and steps: until
    there are so many, as for a bias in the first 100 steps, the numbers of an axis are
    equal. Noise has the proportions of the scales, so that what they take from a few
    draws of it would stay in them. Until the first update scales are 1. Without noise
    it is Adam, up to rounding, as the scales cancel.

    ``optimizer.norms`` and adaptive clipping see the norms of divided gradients.

    Args:
        params: as of ``torch.optim.AdamW``
        lr: learning rate
        betas: decays of the moments
        eps: added to the root of the second moment in Adam's step
        weight_decay: decoupled, as in AdamW
        every: the number of steps between two updates of the scales
        least: the least entry of the vectors whose products are the scales
        maximize: True maximizes

    Raises:
        Refused: unless ``every`` is a whole number of 1 or more, and ``least`` between
            0 and 1

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ScaledAdam(model.parameters(), lr=1e-3, every=10)
        >>> optimizer.gradient_scales()  # none before the first steps
        {}
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        every: int = 1,
        least: float = 0.01,
        maximize: bool = False,
    ):
        check_number("every", every, whole=True)
        check_number("least", least, below=1)
        options: Any = dict(weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, lr=lr, betas=betas, eps=eps, **options)
        self.defaults.update(every=every, least=least)

    def gradient_scales(self) -> Dict[torch.nn.Parameter, Scale]:
        """Returns the vectors whose outer product divides a parameter's gradients."""
        scales = {}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if "scale" in state:
                    scales[p] = state["scale"]
        return scales

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """See ``torch.optim.Optimizer``."""
        loss = _step_of_adam(self, closure)
        moments, draws = {}, {}
        steps = 0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if "exp_avg_sq" not in state or not p.numel():
                    continue
                steps = int(state["step"])
                square = upcast(state["exp_avg_sq"])
                beta2 = group["betas"][1]
                left = beta2**steps
                square = square / (1 - left)
                moments[p] = square if square.dim() else square.reshape(1)
                draws[p] = (1 + beta2) / (1 - beta2) * (1 - left) / (1 + left)
        if moments and steps % self.defaults["every"] == 0:
            self._update(moments, draws)
        return loss

    def _update(
        self,
        moments: Dict[torch.Tensor, torch.Tensor],
        draws: Dict[torch.Tensor, float],
    ) -> None:
        """
        Sets the scales by second moments. Each entry of them has the variance of a mean
        of so many ``draws``.
        """
        sums = [moment.sum() for moment in moments.values()]
        entries = sum(moment.numel() for moment in moments.values())
        mean = torch.stack([x.to(sums[0]) for x in sums]).sum() / entries
        if not 0 < float(mean) < math.inf:
            return
        for p, moment in moments.items():
            square = moment / mean.to(moment)
            tiny = torch.finfo(square.dtype).tiny
            of_axes = [_mean_but(square, axis) for axis in range(square.dim())]
            for number, of_axis in enumerate(of_axes[1:], 1):
                of_axes[number] = of_axis / square.mean().clamp(min=tiny)
            for number, of_axis in enumerate(of_axes):
                if draws[p] * square.numel() < _SQUARES * len(of_axis):
                    of_axes[number] = of_axis.mean().expand_as(of_axis)
            least = self.defaults["least"]
            roots = [of_axis.sqrt().clamp(min=least) for of_axis in of_axes]
            self.state[p]["scale"] = tuple(root.to(p.dtype) for root in roots)


def _mean_but(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the means over all axes but one."""
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1).mean(1)


def refuse_scales(name: str) -> NoReturn:
    """Refuses an optimizer with scales where processes have parts of parameters."""
    raise Refused(
        f"{name} scales gradients before they are clipped, which is not computed where "
        "parameters are spread over processes (fully_shard, expert_parallel).",
        parameter="optimizer",
        remedy="Take torch.optim.AdamW or opacus_ext.optimizers.AdamBC, or train in "
        "one process or with DDP.",
    )
