"""One backward pass of a ghost mode, from per-sample losses to clipped sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

import torch

from opacus_ext.grad_sample.modes.clip import Clip, Sums
from opacus_ext.grad_sample.modes.common import Parts
from opacus_ext.grad_sample.modes.loss import outside_error
from opacus_ext.grad_sample.modes.stream import Stream
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.grad_sample.samplewise.compiled.programs import CompiledRun
from opacus_ext.grad_sample.samplewise.gather import leaves_of
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from opacus_ext.optimizers.clipping import (
    clipping_factors,
    not_finite,
    report_not_finite,
)
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.modes.ghost import GhostMode


class Step(Clip):
    """One backward pass, from the losses to the clipped sums."""

    def __init__(
        self, mode: GhostMode, optimizer: Any, losses: torch.Tensor, scale: float
    ):
        self.mode, self.losses, self.scale = mode, losses, scale
        self.clipping, self.bound = optimizer.clipping, optimizer.clipping_bound
        # Those of programs that the losses do not depend on have nothing to show.
        runs = mode.engine.runs()
        self.runs = [run for run in runs if not isinstance(run, CompiledRun)]
        super().__init__(
            mode.engine, optimizer.params, losses.detach(), len(losses), mode.one_pass
        )

    def reset(self) -> None:
        """Nothing is known yet."""
        super().reset()
        self.digests: Dict[int, Tuple[Any, torch.Tensor]] = {}
        self.largest_norms: Dict[Any, torch.Tensor] = {}  # of a run's norms, by sample
        self.second_weights: Optional[torch.Tensor] = (
            None  # the weights of a second pass
        )
        self.differing: List[torch.Tensor] = []  # whether it has given another gradient
        self.stream = (
            Stream(self)
            if len(self.runs) == 1
            and isinstance(self.runs[0], ScanRun)
            and self.runs[0].rows is None
            and self.expert_group is None
            else None
        )

    def run(self) -> Tuple[Sums, Optional[torch.Tensor]]:
        """The clipped sums, and the samples' norms ``[B]``."""
        self._check_size()
        if self.size == 0 and self.expert_group is None:
            zero = {p: torch.zeros_like(p, requires_grad=False) for p in self.params}
            self._done()
            return zero, self.losses.detach().new_zeros(0)
        self.keep_gradients = self.mode.one_pass or self.clipping.per_parameter
        self._first_pass()
        if self.stream is not None:
            self._done()
            stream, self.stream = self.stream, None  # else they keep each other alive
            return stream.finish()
        with torch.no_grad():
            parts, norms = self.norms()
        bad = not_finite(norms) if self.expert_group is None else None
        if bad is not None:
            self._report_nonfinite(parts)
            if not self.keep_gradients:
                # A second pass would spread what is not finite: take the sums from
                # the factors instead.
                self.keep_gradients = True
                self.reset()
                self._first_pass()
                with torch.no_grad():
                    parts, norms = self.norms()
            norms = norms.masked_fill(bad, math.inf)
        factors, total = clipping_factors(
            self.clipping, self.bound, norms, list(map(group_of, self.params))
        )
        if bad is not None:
            factors = [f.masked_fill(bad, 0) for f in factors]
            self.drop(parts, bad)
        if self.keep_gradients:
            if self.scale != 1:
                factors = [f / self.scale for f in factors]
            with torch.no_grad():
                sums = self.weighted_sums(parts, factors)
        else:
            group = self.expert_group
            sharded = next((w for w in map(group_of, self.params) if w), None)
            own = factors[0]
            if sharded is not None and group_of(self.params[0]) is not None:
                own = factors[0][group.own_samples]
            sums = self._second_pass(own)
        self._done()
        return sums, total

    def _report_nonfinite(self, parts: Parts) -> None:
        """Which parameter's gradients are not finite."""
        norms = []
        for p in self.params:
            found = self.losses.new_zeros(self.size, dtype=self.dtype)
            for rows, sample in parts.get(id(p), []):
                # Mode "ghost" has kept the norm alone.
                known = rows is None and id(p) in self.squares
                each = self.squares[id(p)] if known else sample.squared_norm()
                each = each.sqrt().to(found)
                where = slice(None) if rows is None else rows.to(found.device)
                found[where] = each
            norms.append(found)
        report_not_finite(norms, self._names(), self.mode.on_nonfinite)

    def _done(self) -> None:
        for run in self.runs:
            run.done = True

    def _names(self) -> List[str]:
        return [self.engine.names[p] for p in self.params]

    def _check_size(self) -> None:
        sizes = {run.batch for run in self.runs}
        if sizes and self.size not in sizes:
            raise Refused(
                f"The criterion gives {self.size} losses for a batch of "
                f"{sorted(sizes)[0]} samples.",
                remedy=(
                    "The privacy unit is the sample: for losses of flattened tokens "
                    "call criterion(logits.flatten(0, 1), targets.flatten(), "
                    "shape=[B, T]), or let the criterion return [B] when its "
                    'reduction is "none".'
                ),
            )
        self.runs = [run for run in self.runs if run.batch == self.size]

    # -- what autograd shows -------------------------------------------------------

    def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
        """A use of a parameter."""
        if self.second_weights is not None:
            self._compare(use, grad)
            return
        if not self.keep_gradients:
            digest = _digest(grad)
            self.digests[id(use)] = use, digest
            if use.table is None:
                before = self.largest_norms.get(use.run, digest[0])
                self.largest_norms[use.run] = torch.maximum(
                    before, digest[0].to(before)
                )
        super().use(use, grad, saved)

    @property
    def side_by_side(self) -> bool:
        """Whether all samples have run side by side."""
        return len(self.runs) == 1 and self.runs[0].rows is None

    def norms(self) -> Tuple[Parts, Union[torch.Tensor, List[torch.Tensor]]]:
        """All parts, and for each parameter the samples' norms."""
        parts, norms = super().norms()
        if self.scale == 1:
            return parts, norms
        if isinstance(norms, torch.Tensor):
            return parts, norms.div_(self.scale)
        return parts, [x / self.scale for x in norms]

    def sample(self, run: Any, b: int, grads: Dict) -> None:
        """A sample of a scan."""
        if self.stream is not None:
            self.stream.sample(b, grads)
        else:
            self.gather.add_sample(run, b, grads)

    # -- the passes ----------------------------------------------------------------

    def _first_pass(self) -> None:
        """Backpropagates the sum of the losses, without weight gradients."""
        engine = self.engine
        before, engine.collector = engine.collector, self
        try:
            outside = list(engine.params.values())
            found = torch.autograd.grad(
                [self.losses],
                [engine.anchor, *outside],
                [torch.full_like(self.losses, self.scale)],
                allow_unused=True,
                retain_graph=not self.mode.one_pass,
            )
        finally:
            engine.collector = before
        for p, grad in zip(outside, found[1:]):
            if grad is not None:
                raise outside_error(p, engine)

    def _second_pass(self, weights: torch.Tensor) -> Sums:
        """Backpropagates the losses weighted with the clipping factors."""
        engine, self.second_weights = self.engine, weights
        roots = [root for run in self.runs for root in run.roots.values()]
        before, engine.collector = engine.collector, self
        try:
            found = torch.autograd.grad(
                [self.losses],
                [root.shared for root in roots],
                [weights.to(self.losses.dtype) * self.scale],
                allow_unused=True,
            )
        finally:
            engine.collector = before
        total = {p: torch.zeros_like(p, requires_grad=False) for p in self.params}
        rest = []
        for root, grad in zip(roots, found):
            if grad is None:
                continue
            if root.tensor in total:
                total[root.tensor] += grad
            elif id(root.tensor) not in engine.params and root.edge is not None:
                rest.append((root, grad))
        if rest:
            edges = [root.edge for root, _ in rest]
            leaves = leaves_of(edges, engine.params)
            with engine.own_backward():
                grads = torch.autograd.grad(
                    edges, [edge for _, edge in leaves], [grad for _, grad in rest]
                )
            for (p, _), grad in zip(leaves, grads):
                if p in total:  # not all are the optimizer's
                    total[p] += grad
        # A device is waited for once, for all that was looked at.
        device = self.losses.device
        finite = torch.stack(
            [g.isfinite().all().to(device) for g in total.values()]
            or [torch.ones((), dtype=torch.bool, device=device)]
        ).all()
        other = torch.stack(
            [finite.logical_not(), *(x.to(device) for x in self.differing)]
        )
        infinite, *differs = other.tolist()
        if any(differs):
            raise Refused(
                f"{engine.describe()}: its backward pass is not linear (a hook that "
                "clips or changes gradients of activations?), so that the second "
                'pass of mode "ghost" gives other gradients than the first.',
                module=engine.describe(),
                remedy='Use grad_sample_mode="ghost_bk" or "hooks".',
            )
        if infinite:
            raise Refused(
                "The clipped gradients are not finite, where the gradients of the "
                "samples were.",
                remedy=(
                    "Where float16 overflows, use bfloat16, or a smaller scale in "
                    "loss.backward(scale=...)."
                ),
            )
        if self.scale != 1:
            total = {p: g / self.scale for p, g in total.items()}
        return total

    def _compare(self, use: Any, grad: torch.Tensor) -> None:
        """The second pass must give each row its weight times what the first gave."""
        first = self.digests.get(id(use))
        size = grad.shape[0]
        if first is None:
            return
        rows = use.run.rows
        weights = (
            self.second_weights
            if rows is None
            else self.second_weights[rows.to(grad.device)]
        )
        largest = self.largest_norms.get(use.run, first[1][0].new_zeros(len(weights)))
        if use.table is not None:
            if use.size != len(weights):
                return  # samples of other processes are among them
            weights, largest = weights[use.table.samples], largest[use.table.samples]
        if size != len(weights):
            return
        expected = first[1] * weights.to(first[1])
        gap = (_digest(grad) - expected).abs()
        if use.run.half or grad.dtype.itemsize < 4:
            coarse, fine = 0.1, 1e-2
        else:  # there may be float32 inside of float64
            coarse, fine = 1e-3, 1e-5 if grad.dtype.itemsize < 8 else 1e-7
        # What cancels is the rounding of what is not that small elsewhere.
        largest = largest * weights.to(largest)
        self.differing.append((gap > coarse * expected[0] + fine * largest).any())


def _digest(grad: torch.Tensor) -> torch.Tensor:
    """``[2, B]``: the norm of each sample's gradient, and a sum of its entries."""
    flat = grad.flatten(1) if grad.dim() > 1 else grad[:, None]
    flat = flat if flat.dtype.itemsize >= 4 else flat.float()
    norm = torch.linalg.vector_norm(flat, dim=1)
    return torch.stack([norm, flat.sum(1) / math.sqrt(max(1, flat.shape[1]))])
