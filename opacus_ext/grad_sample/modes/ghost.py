"""Modes "ghost", "ghost_bk" and "scan": ``loss.backward()`` leaves clipped sums."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from torch import nn

from opacus_ext.grad_sample.factors import GradSample, known, workspace
from opacus_ext.grad_sample.modes.common import (
    Gather,
    Parts,
    Samplewise,
    Wrapped,
    by_parameter,
    one_size,
)
from opacus_ext.grad_sample.modes.loss import (
    outside_error,
    refuse_mixing,
    refuse_outside,
    runs_of,
)
from opacus_ext.grad_sample.parallel import spread_over
from opacus_ext.grad_sample.samplewise.compiled import CompiledRun
from opacus_ext.grad_sample.samplewise.gather import SMALL, leaves_of
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from opacus_ext.optimizers.clipping import (
    Clipping,
    clipping_factors,
    not_finite,
    tell_not_finite,
)
from opacus_ext.refused import Refused

Sums = Dict[nn.Parameter, torch.Tensor]


class _Ghost(Samplewise):
    one_pass = False
    new_criterion = False  # whether it was given arguments of a new kind

    def add_hooks(self, **kwargs: Any) -> None:
        self.attached = not self.one_pass
        super().add_hooks(**kwargs)

    def serve(self, optimizer: Any) -> None:
        """Lets programs that are compiled clip as an optimizer says."""
        if not self.scan:
            self.engine.step = _Serve(self.engine, optimizer)

    def get_norm_sample(self) -> torch.Tensor:
        """
        Per-sample gradient norms ``[B]`` of the last backward pass.

        Raises:
            RuntimeError: where no process knows them: experts are spread over processes
                and clipping is by parameter
        """
        if self.per_sample_gradient_norms is None:
            raise Refused(
                'clipping="per_layer" of experts that are spread over processes does '
                "not compute norms over all parameters. Use another clipping function."
            )
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> torch.Tensor:
        """Flat clipping factors ``[B]`` of the last backward pass."""
        return (self.max_grad_norm / (self.get_norm_sample() + 1e-6)).clamp(max=1.0)

    def clipped_backward(
        self, optimizer: Any, losses: torch.Tensor, scale: float = 1.0
    ) -> None:
        """
        Sets ``p.grad`` of every trainable parameter to the sum of the clipped
        per-sample gradients. Nothing is changed if it fails.

        Args:
            optimizer: the DP optimizer, whose clipping is applied
            losses: per-sample losses ``[B]``
            scale: what they are multiplied by on the way back, see loss.py

        Raises:
            RuntimeError: for what can't be followed exactly, and with
                ``on_nonfinite="raise"`` for gradients that are not finite
            ValueError: if ``losses`` are not one a sample, or for a scale that is not
                a positive number
        """
        if not 0 < scale < math.inf:
            raise Refused(f"scale must be a positive number, got {scale}.")
        if getattr(optimizer, "ready", False):
            raise Refused(
                "backward() a second time before optimizer.step(): the clipped sum of "
                "the first batch would be lost. Call optimizer.step() after each "
                "backward(), or use BatchMemoryManager to accumulate batches."
            )
        if losses.dim() != 1:
            raise Refused(
                f"The criterion must give one loss a sample, shape [B], when its "
                f'reduction is "none"; got shape {tuple(losses.shape)}. What a model '
                "computes as its own loss is one number for the batch: give "
                "make_private criterion=opacus_ext.losses.PerSample() and call "
                "criterion(opacus_ext.losses.model_losses(model, batch)).backward()."
            )
        if self.new_criterion:
            self.new_criterion = not refuse_mixing(losses)
        with torch.autocast(losses.device.type, enabled=False):
            step = _Program if self._is_compiled(losses) else _Step
            sums, total = step(self, optimizer, losses, scale).run()
        self.per_sample_gradient_norms = total
        optimizer.take(sums)

    def _is_compiled(self, losses: torch.Tensor) -> bool:
        runs = runs_of(losses)
        compiled = [run for run in runs if isinstance(run, CompiledRun)]
        if compiled and len(runs) > 1:
            raise Refused(
                f"{self.engine.describe()}: the loss depends on {len(runs)} forward "
                "passes, at least one of them compiled, whose gradients are clipped "
                "within the program. Pass all that belongs to a sample in one call, or "
                "train the model without torch.compile."
            )
        return bool(compiled)


class _Serve:
    """Makes what clips in a compiled program, as an optimizer says."""

    def __init__(self, engine: Any, optimizer: Any):
        self.engine, self.optimizer = engine, optimizer

    @property
    def key(self) -> tuple:
        """What a program is made for."""
        return tuple(map(id, self.optimizer.params)), self.optimizer.clipping

    def __call__(self, engine: Any, leaves: Dict, probe: torch.Tensor) -> "_Traced":
        names = [self.engine.names[p] for p in self.optimizer.params]
        return _Traced(engine, leaves, probe, names, self.optimizer.clipping)


class _Clip:
    """
    From what autograd shows to norms and clipped sums.

    Args:
        engine: of the model
        params: those that are clipped
        like: of the device and, if that is wide, the dtype of the norms
        size: number of samples
        one_pass: whether clipped sums will be asked for as well
    """

    one_run = True  # whether all samples have run side by side
    keep = True  # whether gradients are kept from norms to sums

    def __init__(
        self,
        engine: Any,
        params: List[nn.Parameter],
        like: torch.Tensor,
        size: int,
        one_pass: bool = True,
    ):
        self.engine, self.params, self.like, self.size = engine, params, like, size
        self.world = engine.world
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.one_pass = one_pass
        self.begin()

    def begin(self) -> None:
        """Nothing is known yet."""
        self.gather = Gather(self.engine)
        self.squares: Dict[int, torch.Tensor] = {}
        self.bundle: Optional[Tuple[List[nn.Parameter], torch.Tensor]] = None
        self.budget = workspace() if self.one_pass else 0

    def touch(self, run: Any) -> None:
        """A run that the losses depend on."""

    def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
        """A use of a parameter, as autograd comes by it."""
        for p in self.gather.add(use, grad, saved):
            if self.one_run:
                sample = self.gather.of_run[id(use.run)].samples[id(p)]
                if not _is_small(sample):  # others together, in the end
                    self._square(p, sample)

    def _square(self, p: nn.Parameter, sample: GradSample) -> None:
        self.squares[id(p)] = sample.squared_norm(keep=self.budget)
        self.budget -= sample.kept_bytes
        if not self.keep:
            sample.clear()

    def norms(self) -> Tuple[Parts, Union[torch.Tensor, List[torch.Tensor]]]:
        """All parts, and for each parameter the samples' norms."""
        parts = by_parameter(self.gather.parts(), self.size)
        one_size(self.gather.sizes, self.engine)
        squares: List[torch.Tensor] = []
        if self.world is None and not self.clipping.per_parameter:
            squares += self._bundled(parts)
        bundled = () if self.bundle is None else set(map(id, self.bundle[0]))
        for p in self.params:
            if id(p) not in bundled:
                squares.append(self._squares_of(p, parts.get(id(p), [])))
        if self.world is not None:
            return parts, [x.sqrt() for x in squares]
        return parts, torch.stack(squares).sqrt_()

    def _bundled(self, parts: Parts) -> List[torch.Tensor]:
        """The small gradients that are there already, as one."""
        params, rows = [], []
        for p in self.params:
            each = parts.get(id(p), [])
            if len(each) != 1 or each[0][0] is not None or id(p) in self.squares:
                continue
            if p.device == self.like.device and _is_small(each[0][1]):
                params.append(p)
                rows.append(each[0][1].flat().to(self.dtype))
        if len(params) < 2:
            return []
        whole = torch.cat(rows, dim=1)
        self.bundle = params, whole
        return [torch.linalg.vector_norm(whole, dim=1).square_()]

    def _squares_of(self, p: nn.Parameter, parts: List) -> torch.Tensor:
        """The squared norms of one parameter's gradients, ``[B]``."""
        if len(parts) == 1 and parts[0][0] is None:
            if id(p) not in self.squares:
                self._square(p, parts[0][1])
            return self.squares[id(p)].to(self.like.device, self.dtype)
        size = p.world.batch_size if spread_over(p) else self.size
        squares = self.like.new_zeros(size, dtype=self.dtype)
        for rows, sample in parts:
            self._square(p, sample)
            found = self.squares[id(p)].to(squares)
            squares = squares.index_add(0, rows.to(squares.device), found)
        return squares

    def drop(self, parts: Parts, bad: torch.Tensor) -> None:
        """Makes the gradients of some samples zero, whatever they are."""
        for each in parts.values():
            for rows, sample in each:
                sample.drop(bad if rows is None else bad[rows.to(bad.device)])
        if self.bundle is not None:
            params, rows = self.bundle
            self.bundle = params, rows.masked_fill(bad[:, None], 0)

    def weighted_sums(self, parts: Parts, factors: List[torch.Tensor]) -> Sums:
        """The sum over the samples of each parameter's gradients times its factors."""
        sums = {}
        if self.bundle is not None:
            params, rows = self.bundle
            whole = factors[0].to(rows) @ rows
            for p, total in zip(params, whole.split([p.numel() for p in params])):
                sums[id(p)] = total.view(p.shape).to(p.dtype)
        for p, factor in zip(self.params, factors):
            if id(p) in sums:
                continue
            total = None
            for rows, sample in parts.pop(id(p), []):
                some = factor if rows is None else factor[rows.to(factor.device)]
                new = sample.weighted_sum(some)
                total = new if total is None else total + new
            if total is None:
                total = torch.zeros_like(p, requires_grad=False)
            sums[id(p)] = total.to(p.device, p.dtype)
        return {p: sums[id(p)] for p in self.params}


class _Step(_Clip):
    """One backward pass, from the losses to the clipped sums."""

    def __init__(
        self, mode: _Ghost, optimizer: Any, losses: torch.Tensor, scale: float
    ):
        self.mode, self.losses, self.scale = mode, losses, scale
        self.clipping, self.bound = optimizer.clipping, optimizer.clipping_bound
        # Those of programs that the losses do not depend on have nothing to show.
        runs = mode.engine.runs()
        self.runs = [run for run in runs if not isinstance(run, CompiledRun)]
        super().__init__(
            mode.engine, optimizer.params, losses.detach(), len(losses), mode.one_pass
        )

    def begin(self) -> None:
        """Nothing is known yet."""
        super().begin()
        self.digests: Dict[int, Tuple[Any, torch.Tensor]] = {}
        self.largest: Dict[Any, torch.Tensor] = {}  # of a run's norms, by sample
        self.second: Optional[torch.Tensor] = None  # the weights of a second pass
        self.other: List[torch.Tensor] = []  # whether it has given another gradient
        self.stream = (
            _Stream(self)
            if len(self.runs) == 1
            and isinstance(self.runs[0], ScanRun)
            and self.runs[0].rows is None
            and self.world is None
            else None
        )

    def run(self) -> Tuple[Sums, Optional[torch.Tensor]]:
        """The clipped sums, and the samples' norms ``[B]``."""
        self._check_size()
        if self.size == 0 and self.world is None:
            zero = {p: torch.zeros_like(p, requires_grad=False) for p in self.params}
            self._done()
            return zero, self.losses.detach().new_zeros(0)
        self.keep = self.mode.one_pass or self.clipping.per_parameter
        self._first_pass()
        if self.stream is not None:
            self._done()
            stream, self.stream = self.stream, None  # else they keep each other alive
            return stream.finish()
        with torch.no_grad():
            parts, norms = self.norms()
        bad = not_finite(norms) if self.world is None else None
        if bad is not None:
            self._tell(parts)
            if not self.keep:
                # A second pass would spread what is not finite: take the sums from
                # the factors instead.
                self.keep = True
                self.begin()
                self._first_pass()
                with torch.no_grad():
                    parts, norms = self.norms()
            norms = norms.masked_fill(bad, math.inf)
        factors, total = clipping_factors(
            *(self.clipping, self.bound, norms), list(map(spread_over, self.params))
        )
        if bad is not None:
            factors = [f.masked_fill(bad, 0) for f in factors]
            self.drop(parts, bad)
        if self.keep:
            if self.scale != 1:
                factors = [f / self.scale for f in factors]
            with torch.no_grad():
                sums = self.weighted_sums(parts, factors)
        else:
            world = self.world
            spread = next((w for w in map(spread_over, self.params) if w), None)
            own = factors[0]
            if spread is not None and spread_over(self.params[0]) is not None:
                own = factors[0][world.own]
            sums = self._second_pass(own)
        self._done()
        return sums, total

    def _tell(self, parts: Parts) -> None:
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
        tell_not_finite(norms, self._names(), self.mode.on_nonfinite)

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
                f"{sorted(sizes)[0]} samples. The privacy unit is the sample: for "
                "losses of flattened tokens call criterion(logits.flatten(0, 1), "
                "targets.flatten(), shape=[B, T]), or let the criterion return [B] "
                'when its reduction is "none".'
            )
        self.runs = [run for run in self.runs if run.batch == self.size]

    # -- what autograd shows -------------------------------------------------------

    def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
        """A use of a parameter."""
        if self.second is not None:
            self._compare(use, grad)
            return
        if not self.keep:
            digest = _digest(grad)
            self.digests[id(use)] = use, digest
            if use.table is None:
                before = self.largest.get(use.run, digest[0])
                self.largest[use.run] = torch.maximum(before, digest[0].to(before))
        super().use(use, grad, saved)

    @property
    def one_run(self) -> bool:
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
        engine, self.second = self.engine, weights
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
        other = torch.stack([finite.logical_not(), *(x.to(device) for x in self.other)])
        infinite, *differs = other.tolist()
        if any(differs):
            raise Refused(
                f"{engine.describe()}: its backward pass is not linear (a hook "
                "that clips or changes gradients of activations?), so that the second "
                'pass of mode "ghost" gives other gradients than the first. Use '
                'grad_sample_mode="ghost_bk" or "hooks".'
            )
        if infinite:
            raise Refused(
                "The clipped gradients are not finite, where the gradients of the "
                "samples were. Where float16 overflows, use bfloat16, or a smaller "
                "scale in loss.backward(scale=...)."
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
        weights = self.second if rows is None else self.second[rows.to(grad.device)]
        largest = self.largest.get(use.run, first[1][0].new_zeros(len(weights)))
        if use.table is not None:
            if use.size != len(weights):
                return  # samples of other processes are among them
            weights, largest = weights[use.table[0]], largest[use.table[0]]
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
        self.other.append((gap > coarse * expected[0] + fine * largest).any())


class _Traced(_Clip):
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


class _Program(_Step):
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
                "forward pass. Call the model again."
            )
        refuse_outside(self.losses, engine)
        for p in self.params:
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise Refused(
                    f"Parameter {engine.names[p]} has a hook, which would change or "
                    "use its gradient before it is private. Remove the hook."
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
            tell_not_finite(each, names, self.mode.on_nonfinite)
        sums = {
            p: torch.zeros_like(p, requires_grad=False) if g is None else g
            for p, g in zip(self.params, found)
        }
        return sums, norms[-1].to(self.dtype, copy=True)  # a program's memory


def _is_small(sample: GradSample) -> bool:
    """Whether a gradient is small, and there without more computation."""
    return known(sample.numel) <= SMALL and sample.flat() is not None


def _digest(grad: torch.Tensor) -> torch.Tensor:
    """``[2, B]``: the norm of each sample's gradient, and a sum of its entries."""
    flat = grad.flatten(1) if grad.dim() > 1 else grad[:, None]
    flat = flat if flat.dtype.itemsize >= 4 else flat.float()
    norm = torch.linalg.vector_norm(flat, dim=1)
    return torch.stack([norm, flat.sum(1) / math.sqrt(max(1, flat.shape[1]))])


class _Stream:
    """Clips the gradients of one sample after the other, and adds them up."""

    def __init__(self, step: _Step):
        self.step = step
        self.total: Optional[List[torch.Tensor]] = None
        self.norms: List[torch.Tensor] = []

    def sample(self, b: int, grads: Dict) -> None:
        """The gradients of sample ``b``."""
        step = self.step
        if b != len(self.norms):
            raise Refused(
                f"{step.engine.describe()}: sample {b} has gradients in several parts, "
                "which can't be clipped one after the other. Let the forward return "
                "all that the loss uses."
            )
        params = step.params
        found = [grads.get(p) for p in params]
        used = [i for i, g in enumerate(found) if g is not None]
        own = [_wide(found[i]) for i in used]
        norms = step.losses.new_zeros(len(params), dtype=step.dtype)
        if own:
            norms[used] = torch.stack(torch._foreach_norm(own)).to(norms) / step.scale
        bad = not bool(norms.isfinite().all())
        if bad:
            each = [n[None] for n in norms]
            tell_not_finite(each, step._names(), step.mode.on_nonfinite, b)
            self.norms.append(norms.new_full((), math.inf))
            return
        factors = step.clipping.factors(norms[:, None], step.bound)
        self.norms.append(torch.linalg.vector_norm(norms))
        if self.total is None:
            self.total = [None] * len(params)
        if factors.dim() > 1:
            scales = [factors[i, 0] / step.scale for i in used]
            for g, c in zip(own, scales):
                g.mul_(c)
            alpha = 1.0
        else:
            alpha = float(factors[0] / step.scale)
        new = [(i, g) for i, g in zip(used, own) if self.total[i] is None]
        more = [(i, g) for i, g in zip(used, own) if self.total[i] is not None]
        if new:
            if alpha != 1.0:
                torch._foreach_mul_([g for _, g in new], alpha)
            for i, g in new:
                self.total[i] = g
        if more:
            torch._foreach_add_(
                [self.total[i] for i, _ in more], [g for _, g in more], alpha=alpha
            )

    def finish(self) -> Tuple[Sums, torch.Tensor]:
        """The clipped sums and the norms."""
        params = self.step.params
        total = self.total or [None] * len(params)
        sums = {
            p: (
                torch.zeros_like(p, requires_grad=False) if t is None else t.to(p.dtype)
            )
            for p, t in zip(params, total)
        }
        norms = self.norms or [self.step.losses.detach().new_zeros(())]
        return sums, torch.stack(norms)


def _wide(g: torch.Tensor) -> torch.Tensor:
    g = g.to_dense() if g.is_sparse else g
    return g.float() if g.dtype.itemsize < 4 else g


class GhostHooks(_Ghost, GradSampleHooksFastGradientClipping):
    """Mode "ghost", attached to a model that is not wrapped."""


class GhostModule(Wrapped, _Ghost, GradSampleModuleFastGradientClipping):
    """Mode "ghost", wrapped around a model."""


class BookKeepingHooks(GhostHooks):
    """Mode "ghost_bk", attached to a model that is not wrapped."""

    one_pass = True


class BookKeepingModule(GhostModule):
    """Mode "ghost_bk", wrapped around a model."""

    one_pass = True


class ScanHooks(BookKeepingHooks):
    """Mode "scan", attached to a model that is not wrapped."""

    scan = True


class ScanModule(BookKeepingModule):
    """Mode "scan", wrapped around a model."""

    scan = True
