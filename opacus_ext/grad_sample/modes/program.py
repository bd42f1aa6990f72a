"""The backward pass of a compiled step: what the program does, and who asks for it."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

import torch

from opacus_ext.grad_sample.modes.clip import Clip, Sums
from opacus_ext.grad_sample.modes.loss import refuse_outside, runs_of
from opacus_ext.grad_sample.modes.step import Step
from opacus_ext.optimizers.clipping import (
    Clipping,
    clipping_factors,
    not_finite,
    report_not_finite,
)
from opacus_ext.refused import Refused


class TracedStep(Clip):
    """
    What a compiled program does in its backward pass.

    Args:
        engine: that runs the samples in the program
        leaves: of all trainable parameters, by name
        probe: whose gradient are the norms, ``[parameters + 1, B]``
        names: of the parameters that are clipped
        clipping: as the optimizer has it
    """

    def __init__(
        self,
        engine: Any,
        leaves: Dict[str, torch.Tensor],
        probe: torch.Tensor,
        names: List[str],
        clipping: Clipping,
    ):
        self.leaves, self.names, self.clipping = leaves, names, clipping
        self.rows = probe.shape[0] - 1
        # The scale of the losses, and bounds.
        self.settings = 1 + (len(names) if clipping.per_parameter else 1)
        used = [leaves[name] for name in names if name in leaves]
        super().__init__(engine, used, probe, probe.shape[1])

    def finish(self, settings: torch.Tensor) -> Tuple[torch.Tensor, List]:
        """
        Args:
            settings: the scale of the losses, and the clipping bound or bounds

        Returns:
            Norms by parameter and, in the last row, of all; and for each leaf its sum.
        """
        with torch.no_grad(), torch.autocast(settings.device.type, enabled=False):
            parts, norms = self.norms()
            scale, bounds = settings[0], settings[1:]
            whole = self._by_name(norms / scale)
            bad = ~whole.isfinite().all(0)
            factors, total = clipping_factors(
                self.clipping,
                bounds if self.clipping.per_parameter else bounds[0],
                whole.masked_fill(bad, math.inf),
                [None] * len(self.names),
            )
            known = dict(zip(self.names, factors))
            names = [name for name in self.names if name in self.leaves]
            own = [known[name].masked_fill(bad, 0) / scale for name in names]
            self.drop(parts, bad)
            sums = self.weighted_sums(parts, own)
            rows = whole.new_zeros(self.rows - len(self.names), self.size)
            norms = torch.cat([whole, rows, total.to(whole)[None]])
        return norms, [sums.get(x) for x in self.leaves.values()]

    def _by_name(self, norms: torch.Tensor) -> torch.Tensor:
        """Of each parameter; where small ones are taken together, of their first."""
        small = () if self.bundle is None else self.bundle[0]
        order = [
            *small[:1],
            *(p for p in self.params if all(p is not x for x in small)),
        ]
        row = {id(p): norm for p, norm in zip(order, norms)}
        zero = torch.zeros_like(norms[0])
        return torch.stack(
            [row.get(id(self.leaves.get(name)), zero) for name in self.names]
        )


class ProgramStep(Step):
    """One backward pass of a compiled program, which clips as well."""

    def run(self) -> Tuple[Sums, Optional[torch.Tensor]]:
        """The clipped sums, and the samples' norms ``[B]``."""
        (self.run_,) = runs_of(self.losses)
        engine, run = self.engine, self.run_
        self.runs = [run]
        self._check_size()
        if run.done:
            raise Refused(
                f"{engine.describe()}: backward() a second time through the same "
                "forward pass.",
                module=engine.describe(),
                remedy="Call the model again.",
            )
        refuse_outside(self.losses, engine)
        for p in self.params:
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise Refused(
                    f"Parameter {engine.names[p]} has a hook, which would change or "
                    "use its gradient before it is private.",
                    parameter=engine.names[p],
                    remedy="Remove the hook.",
                )
        bounds = self.bound if self.clipping.per_parameter else [self.bound]
        settings = torch.tensor([self.scale, *bounds], dtype=torch.float64)
        run.done, run.closed = True, False
        try:
            norms, *found = torch.autograd.grad(
                [self.losses, run.settings],
                [run.probe, *self.params],
                [
                    torch.full_like(self.losses, self.scale),
                    settings.to(self.losses.device),
                ],
                allow_unused=True,
            )
        finally:
            run.closed = True
            run.end()
        norms = norms[:, : self.size]
        if not_finite(norms) is not None:
            each = norms[: len(self.params)]
            names = [f"{name} (or a small one beside it)" for name in self._names()]
            report_not_finite(each, names, self.mode.on_nonfinite)
        sums = {
            p: torch.zeros_like(p, requires_grad=False) if g is None else g
            for p, g in zip(self.params, found)
        }
        return sums, norms[-1].to(self.dtype, copy=True)  # a program's memory
