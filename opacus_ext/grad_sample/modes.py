"""The modes of DP-SGD: what is done with the factors that the tape delivers.

=========== ====== ==============================================================
mode        passes per-sample gradients
=========== ====== ==============================================================
"hooks"     1      materialised into ``p.grad_sample`` (Opacus's interface)
"ghost"     2      norms only; then the losses, weighted with the clipping factors,
                   are backpropagated (Lee & Kifer)
"ghost_bk"  1      norms, then the clipped sum, both from the factors
                   (book-keeping, Bu et al. 2023)
=========== ====== ==============================================================
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from torch import nn

from opacus_ext.grad_sample.calls import (
    Call,
    UnknownLayout,
    packed_in,
    tensors_in,
)
from opacus_ext.grad_sample.factors import GradSample, workspace
from opacus_ext.grad_sample.graph import Graph
from opacus_ext.grad_sample.layout import batch_root, packed_root
from opacus_ext.grad_sample.parallel import spread_over
from opacus_ext.grad_sample.tape import Tape
from opacus_ext.optimizers.clipping import (
    Clipping,
    clipping_factors,
    refuse_not_finite,
)

Complete = Callable[[nn.Parameter, GradSample], None]


class _Recording:
    """What all modes share: a tape in the place of Opacus's hooks."""

    tape: Tape

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Attaches the tape to the model, once."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("Trying to add hooks twice to the same model")
        self.tape = Tape(self._module, batch_first=batch_first)
        self._module.autograd_grad_sample_hooks = self.tape.handles
        self.autograd_grad_sample_hooks = self.tape.handles
        self.enable_hooks()

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> List[Exception]:
        """
        Buffers are fine where the forward pass does not change them, and the tape
        refuses the others when it sees that.
        """
        return []

    def disable_hooks(self) -> None:
        """Stops recording."""
        super().disable_hooks()
        self.tape.enabled = False

    def enable_hooks(self) -> None:
        """Starts recording again."""
        super().enable_hooks()
        self.tape.enabled = True

    def trainable(self) -> List[nn.Parameter]:
        """The parameters that are trained, each once."""
        return [p for p in self.tape.names if p.requires_grad]


class _Gather:
    """Collects the factors of one backward pass, parameter by parameter."""

    def __init__(self, tape: Tape, batch_size: int, found: Graph, complete: Complete):
        self.tape = tape
        self.batch_size = batch_size
        self.complete = complete
        self.samples: Dict[nn.Parameter, GradSample] = {}
        # In how many calls a parameter is still to be met. What reentrant
        # checkpointing hides can't be counted.
        self.left: Counter = Counter()
        if not found.reentrant:
            for call in found.records:
                self.left.update(p for p, n in call.claims.items() if n > 0)

    def __call__(self, call: Call, grads: tuple, ctx: Any) -> None:
        for param, factors in self.tape.collect(call, grads, ctx, self.batch_size):
            if param not in self.samples:
                size = call.size(self.batch_size)
                self.samples[param] = GradSample(param.shape, size)
            self.samples[param].add(*factors)
            self.left[id(param)] -= 1
            if self.left[id(param)] == 0:
                self.complete(param, self.samples[param])

    def finish(self) -> None:
        """Completes the parameters of which some calls got no gradient."""
        for param, sample in self.samples.items():
            if self.left[id(param)] != 0:
                self.complete(param, sample)


# -- "hooks" -----------------------------------------------------------------------


class _Hooks(_Recording):
    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        self._gathered: Optional[Dict[nn.Parameter, torch.Tensor]] = None
        self._autograd: Dict[nn.Parameter, torch.Tensor] = {}
        self._half = False
        self.tape.on_forward = self._check_layouts
        self.tape.collector = self._collect
        self._watched: Set[nn.Parameter] = set()
        self._order: Optional[torch.Tensor] = None  # of a packed output's samples

    def _check_layouts(self, output: Any) -> None:
        roots = [x for x in tensors_in(output) if x.requires_grad]
        if not roots:
            return
        for p in self.trainable():
            if p not in self._watched:
                self._watched.add(p)
                hook = functools.partial(self._watch, p)
                self.tape.handles.append(p.register_hook(hook))
        if self.tape.batch_size is None:
            raise RuntimeError(
                "The model was called without a tensor, so the batch size is unknown. "
                "Pass its inputs as tensors with a batch dimension."
            )
        for x in roots:
            x.register_hook(self._begin)
        dim, tape = self.tape.batch_dim, self.tape
        size = roots[0].shape[dim] if roots[0].dim() > dim else None
        if size in tape.sizes and not tape.expanded:
            tape.batch_size = size  # of several inputs, the one the output goes with
        batch_size = tape.batch_size
        self._order = None
        if batch_size > 0 or tape.world is not None:
            packed = packed_in(output)
            self._order = packed[0].sorted_indices if packed else None
            parts = [packed_root(x) for x in packed if x.data.requires_grad]
            data = {id(root.tensor) for root in parts}
            parts += [
                batch_root(x, dim, batch_size) for x in roots if id(x) not in data
            ]
            with torch.autocast(roots[0].device.type, enabled=False):
                self.tape.prepare(parts, batch_size)

    def _watch(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        if self.hooks_enabled and self.tape.collector is not None:
            self._begin()  # of what the loss uses itself, this comes first
            seen = self._autograd.get(p)
            self._autograd[p] = grad.detach() if seen is None else seen + grad

    def _begin(self, grad: Optional[torch.Tensor] = None) -> None:
        # Not while the layouts are probed: then the collector is another one.
        if (
            self.hooks_enabled
            and self._gathered is None
            and self.tape.collector == self._collect
        ):
            self._gathered = {}
            self._autograd.clear()
            self.tape.begin_backward()
            self._half = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _collect(self, call: Call, grads: tuple, ctx: Any) -> None:
        if not self.hooks_enabled:
            return
        self._begin()
        try:
            uses = self.tape.collect(call, grads, ctx, call.batch_size)
        except BaseException:
            self._gathered = None
            raise
        for param, factors in uses:
            sample = GradSample(param.shape, call.size(call.batch_size))
            sample.add(*factors)
            new = sample.materialise()
            old = self._gathered.get(param)
            if old is not None and len(old) != len(new):
                self._gathered = None
                raise RuntimeError(
                    f"{call.name}: called with batches of {len(old)} and {len(new)} "
                    "samples before one backward pass. Use one batch size a pass."
                )
            self._gathered[param] = new if old is None else old.add_(new)
        self._half |= any(g is not None and g.dtype.itemsize < 4 for g in grads)

    def _end(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        self.tape.refuse_dark()
        world = self.tape.world
        sizes = (len(g) for p, g in gathered.items() if spread_over(p) is None)
        batch_size = next(sizes, self.tape.batch_size)
        params = self.trainable()
        for p in params:
            if p not in gathered:
                size = world.batch_size if spread_over(p) else batch_size
                gathered[p] = p.new_zeros(size, *p.shape)
        if batch_size:
            sums = {p: (g.sum(0), _total_norm(g)) for p, g in gathered.items()}
            _compare(self.tape, sums, self._autograd, self._half)
        self._autograd.clear()
        if not self.grad_accumulation_allowed and any(
            getattr(p, "grad_sample", None) is not None for p in params
        ):
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation. "
                "You need to call optimizer.step() after every forward/backward pass "
                "or consider using BatchMemoryManager"
            )
        if world is not None and any(
            getattr(p, "grad_sample", None) is not None for p in params
        ):
            raise RuntimeError(
                "backward() a second time before optimizer.step() and zero_grad(), "
                "which experts that are spread over processes can't take. Call them "
                "after each backward(), or use BatchMemoryManager to accumulate "
                "batches."
            )
        for p in params:
            new = gathered.pop(p)
            if self.loss_reduction == "mean":
                new.mul_(self._scale(p, new, batch_size))
            new = new.to(p.dtype)
            if self._order is not None:  # Opacus has them as they were packed
                new = new[self._order]
            old = getattr(p, "grad_sample", None)
            if old is not None:
                new = [*old, new] if isinstance(old, list) else [old, new]
            p.grad_sample = new

    def _scale(self, p: nn.Parameter, new: torch.Tensor, batch_size: int) -> Any:
        """What a mean over the batch has divided each sample's gradient by."""
        if spread_over(p) is None:
            return batch_size
        scale = p.world.each(p.world.batch_sizes, device=new.device, dtype=new.dtype)
        return scale.view(-1, *(1 for _ in p.shape))


def _total_norm(samples: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(samples.unsqueeze(-1).flatten(1), dim=1).sum()


def _compare(
    tape: Tape,
    sums: Dict[nn.Parameter, Tuple[torch.Tensor, torch.Tensor]],
    autograd: Dict[nn.Parameter, Optional[torch.Tensor]],
    half: bool = False,
) -> None:
    """
    Compares the sums of per-sample gradients with autograd's own gradients.

    Args:
        sums: for each parameter the sum, and the sum of the per-sample norms
        half: whether autograd computed in half precision
    """
    whole = sum(float(norm) for _, norm in sums.values())
    for param, grad in autograd.items():
        if grad is None:
            continue
        grad = grad.detach()
        total, norm = sums.get(param, (torch.zeros_like(grad), torch.zeros(())))
        exact = max(torch.finfo(total.dtype).eps, 1e-10)  # float32 inside float64
        coarse = half or grad.dtype.itemsize < 4
        # Convolutions on CUDA compute in TensorFloat-32 unless told otherwise.
        fine = (1e4 if grad.is_cuda or exact == 1e-10 else 300) * exact
        tolerance = 0.1 if coarse else fine
        # What cancels within a sample leaves rounding errors of what cancelled.
        allowed = tolerance * (float(norm) + float(grad.norm()))
        allowed += (1e-2 if coarse else 100 * exact) * whole
        if float((total - grad.to(total.dtype)).norm()) > allowed:
            raise RuntimeError(
                f"Parameter {tape.names[param]} of shape {tuple(param.shape)}: the "
                "gradients of the samples do not add up to autograd's gradient. Either "
                "it is also used where no layer accounts for it, for example in the "
                "loss itself: use it inside the forward of the module that owns it. Or "
                "the rule of its layer is wrong."
            )


class RecordingHooks(_Hooks, GradSampleHooks):
    """Mode "hooks", attached to a model that is not wrapped."""


class RecordingModule(_Hooks, GradSampleModule):
    """Mode "hooks", wrapped around a model."""


# -- "ghost" and "ghost_bk" --------------------------------------------------------


class _Ghost(_Recording):
    one_pass = False

    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        self._kept_rows: Dict[nn.Parameter, torch.Tensor] = {}  # kept, step after step

    def get_norm_sample(self) -> torch.Tensor:
        """
        Per-sample gradient norms ``[B]`` of the last backward pass.

        Raises:
            RuntimeError: where no process knows them: experts are spread over processes
                and clipping is by parameter
        """
        if self.per_sample_gradient_norms is None:
            raise RuntimeError(
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
            RuntimeError: for what can't be followed exactly, see tape.py, or gradients
                that are not finite
            ValueError: if ``losses`` are not one a sample, or for a scale that is not
                a positive number
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {scale}.")
        if getattr(optimizer, "ready", False):
            raise RuntimeError(
                "backward() a second time before optimizer.step(): the clipped sum of "
                "the first batch would be lost. Call optimizer.step() after each "
                "backward(), or use BatchMemoryManager to accumulate batches."
            )
        batch_size, params = self._batch_size(losses), optimizer.params
        if batch_size == 0 and self.tape.world is None:
            self.per_sample_gradient_norms = losses.detach().new_zeros(0)
            optimizer.take({p: torch.zeros_like(p) for p in params})
            return
        clipping: Clipping = optimizer.clipping
        keep = self.one_pass or clipping.per_parameter
        with torch.autocast(losses.device.type, enabled=False):
            samples, norms = self._norms(losses, batch_size, params, keep, scale)
            refuse_not_finite(norms, [self.tape.names[p] for p in params])
            factors, total = clipping_factors(
                *(clipping, optimizer.clipping_bound, norms),
                list(map(spread_over, params)),
            )
            if keep:
                sums = _weighted_sums(params, samples, [f / scale for f in factors])
            else:
                world = spread_over(params[0])
                own = factors[0] if world is None else factors[0][world.own]
                sums = self._second_pass(losses, own, params, scale)
        self.per_sample_gradient_norms = total
        optimizer.take(sums)

    def _batch_size(self, losses: torch.Tensor) -> int:
        expected = self.tape.batch_size
        if losses.dim() != 1:
            raise ValueError(
                f"The criterion must give one loss a sample, shape [B], when its "
                f'reduction is "none"; got shape {tuple(losses.shape)}. What a model '
                "computes as its own loss is one number for the batch: give "
                "make_private criterion=opacus_ext.losses.PerSample() and call "
                "criterion(opacus_ext.losses.model_losses(model, batch)).backward()."
            )
        n = len(losses)
        # Another input than the first may have led with the batch.
        other = n > 1 and n in self.tape.sizes and not self.tape.expanded
        if expected is not None and n != expected and not other:
            raise ValueError(
                f"The criterion gives {n} losses for a batch of {expected} samples. "
                "The privacy unit is the sample: for losses of flattened tokens call "
                "criterion(logits.flatten(0, 1), targets.flatten(), shape=[B, T]), or "
                'let the criterion return [B] when its reduction is "none".'
            )
        return n

    def _norms(
        self,
        losses: torch.Tensor,
        batch_size: int,
        params: List[nn.Parameter],
        keep: bool,
        scale: float,
    ) -> Tuple[Dict[nn.Parameter, GradSample], List[torch.Tensor]]:
        """
        Backpropagates the sum of the losses, without weight gradients.

        Returns:
            The per-sample gradients times ``scale`` if ``keep``, and the norms of each
            parameter's.
        """
        tape = self.tape
        root = batch_root(losses, 0, batch_size)
        found = tape.prepare([root], batch_size)
        keep = keep or found.reentrant
        squares: Dict[nn.Parameter, torch.Tensor] = {}
        budget = workspace() if self.one_pass else 0

        def complete(param: nn.Parameter, sample: GradSample) -> None:
            nonlocal budget
            buffer = self._kept_rows.get(param)
            squares[param] = sample.squared_norm(keep=budget, reuse=buffer)
            budget -= sample.kept_bytes
            kept = sample.kept
            if kept is not None and (buffer is None or buffer.numel() < kept.numel()):
                self._kept_rows[param] = kept
            if not keep:
                sample.clear()

        def run() -> _Gather:
            gather = _Gather(tape, batch_size, found, complete)
            ones = torch.full_like(losses, scale)
            again = found.reentrant or not self.one_pass
            autograd = tape.backward([losses], [ones], gather, found, again)
            with torch.no_grad():
                gather.finish()
                if autograd:
                    # Reentrant checkpointing hides its uses of parameters.
                    b = torch.ones_like(losses)
                    sums = {
                        p: (s.weighted_sum(b), squares[p].sqrt().sum())
                        for p, s in gather.samples.items()
                    }
                    _compare(tape, sums, autograd)
            return gather

        try:
            gather = run()
        except UnknownLayout:
            if not found.reentrant:
                raise
            # What a checkpoint hides has shapes that were not met before.
            tape.probe([root], batch_size, found)
            gather = run()
        tape.refuse_dark()
        norms = []
        for p in params:
            size = p.world.batch_size if spread_over(p) else batch_size
            zero = losses.new_zeros(size, dtype=_norm_dtype(losses))
            norms.append(squares.get(p, zero).to(zero).sqrt() / scale)
        return gather.samples, norms

    def _second_pass(
        self,
        losses: torch.Tensor,
        weights: torch.Tensor,
        params: List[nn.Parameter],
        scale: float,
    ) -> Dict[nn.Parameter, torch.Tensor]:
        """Backpropagates the losses weighted with the clipping factors."""
        # The tape stays on, with nobody to collect: what a checkpoint recomputes must
        # be what it computed.
        kept = [p.grad for p in params]
        try:
            for p in params:
                p.grad = None
            (weights.to(losses.dtype) * losses).sum().backward(losses.new_tensor(scale))
            found = {p: p.grad for p in params}
        finally:
            for p, grad in zip(params, kept):
                p.grad = grad
        finite = [g.isfinite().all() for g in found.values() if g is not None]
        if finite and not torch.stack(finite).all():
            raise RuntimeError(
                "The clipped gradients are not finite, where the gradients of the "
                "samples were. Where float16 overflows, use bfloat16, or a smaller "
                "scale in loss.backward(scale=...)."
            )
        if scale != 1:
            found = {p: g if g is None else g / scale for p, g in found.items()}
        return {p: torch.zeros_like(p) if g is None else g for p, g in found.items()}


def _norm_dtype(losses: torch.Tensor) -> torch.dtype:
    return torch.float64 if losses.dtype == torch.float64 else torch.float32


def _weighted_sums(
    params: List[nn.Parameter],
    samples: Dict[nn.Parameter, GradSample],
    factors: List[torch.Tensor],
) -> Dict[nn.Parameter, torch.Tensor]:
    """The clipped sums, with each parameter's factors ``[B]``."""
    sums = {}
    for p, factor in zip(params, factors):
        sample = samples.pop(p, None)
        if sample is None:
            sums[p] = torch.zeros_like(p, requires_grad=False)
            continue
        sums[p] = sample.weighted_sum(factor).to(p.dtype)
    return sums


class GhostHooks(_Ghost, GradSampleHooksFastGradientClipping):
    """Mode "ghost", attached to a model that is not wrapped."""


class GhostModule(_Ghost, GradSampleModuleFastGradientClipping):
    """Mode "ghost", wrapped around a model."""


class BookKeepingHooks(GhostHooks):
    """Mode "ghost_bk", attached to a model that is not wrapped."""

    one_pass = True


class BookKeepingModule(GhostModule):
    """Mode "ghost_bk", wrapped around a model."""

    one_pass = True
