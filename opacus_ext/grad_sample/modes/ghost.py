"""Modes "ghost", "ghost_bk" and "scan": ``loss.backward()`` leaves clipped sums."""

from __future__ import annotations

import functools
import math
import operator
from itertools import islice
from typing import Any, Callable, Sequence

import torch
from opacus.utils import fast_gradient_clipping_utils as stock
from torch import nn
from torch.autograd.graph import GradientEdge

from opacus_ext.grad_sample.adapter.criterion import SampleCriterion
from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.model import PrivateModel, PrivateOptimizer
from opacus_ext.grad_sample.adapter.outputs import (
    Dependencies,
    NotEqual,
    dependencies_of,
)
from opacus_ext.grad_sample.adapter.passes import second_pass
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    DenseGrads,
    digest,
    refuse_no_graph,
)
from opacus_ext.grad_sample.core.gradients import no_autocast
from opacus_ext.grad_sample.core.groups import Samples
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.modes.common import (
    MEMORY_MANAGER,
    PrivateMode,
    feeds_another,
    not_called,
    not_private,
    of_other_sizes,
)
from opacus_ext.private_torch import DisableTorchFunctionSubclass, tree_leaves, tree_map
from opacus_ext.refused import Refused, warn_once
from opacus_ext.tables import in_a_line

T = torch.Tensor

# Functions that apply to each sample's loss; products and quotients are with numbers.
_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "neg", "__neg__"}
_QUOTIENTS = {"div", "__div__", "__truediv__"}
_IN_PLACE = {"add_", "sub_", "mul_", "div_"}
# Functions that do not change a single number.
_SAME = {"mean", "sum", "clone", "squeeze", "to", "cpu", "cuda", "float", "double"}
# Functions that convert to a number, for which the loss is detached.
_NUMBER = {"__float__", "__int__", "__array__", "numpy", "__format__"}
_NO_SAMPLES = {"grad", "register_hook", "retain_grad"}


class ClippedLoss(torch.Tensor, stock.DPTensorFastGradientClipping):
    """
    The mean or sum of per-sample losses, whose ``backward()`` leaves clipped sums in
    ``p.grad``.

    It is a tensor without dims: it can be formatted, compared, logged, moved, stacked.
    Sums and differences of such losses, and products with numbers, are such losses
    again. Any other function loses the samples, and a backward pass through its result
    is refused.

    Example:
        >>> losses = torch.tensor([1.0, 2.0])
        >>> loss = ClippedLoss(None, None, losses) * 2
        >>> f"{loss:.1f}", loss.loss_per_sample.tolist(), loss > 2
        ('3.0', [2.0, 4.0], tensor(True))
    """

    loss_per_sample: T
    divisor: float = 1.0  # the number by which it was divided
    done = False  # True after backward()
    has_graph = True  # False if computed under torch.no_grad()
    sizes: frozenset[int]  # numbers of samples of the losses that it is a sum of

    def __new__(
        cls,
        module: Any,
        optimizer: Any,
        loss_per_sample: T,
        loss_reduction: str = "mean",
        value: T | None = None,
    ) -> ClippedLoss:
        """Takes Opacus's arguments, with losses ``[B]``, and its value if known."""
        if value is None:
            losses = loss_per_sample.detach()
            value = losses.sum() if loss_reduction == "sum" else losses.mean()
        # The value alone has no samples: no gradient may pass through it.
        value = value.detach()
        if loss_per_sample.requires_grad and torch.is_grad_enabled():
            value = _WithoutSamples.apply(value, _anchor)
        return value.as_subclass(cls)

    def __init__(self, *args: Any, value: T | None = None, **kwargs: Any):
        stock.DPTensorFastGradientClipping.__init__(self, *args, **kwargs)
        self.has_graph = torch.is_grad_enabled()
        self.sizes = frozenset([self.loss_per_sample.numel()])

    def backward(  # type: ignore[override]  # its first argument is a number
        self,
        scale: float = 1.0,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[T] | None = None,
        gradient: T | None = None,
    ) -> None:
        """
        Leaves clipped sums in ``p.grad``, as ``clipped_backward`` of the ghost modes.

        Args:
            scale: factor of the losses, by which the gradients are divided before they
                are clipped; keeps small gradients of float16 models from vanishing
            retain_graph: allowed, but a second ``backward()`` before the step is
                refused, as is any other argument of ``Tensor.backward``
        """
        if create_graph or inputs is not None or gradient is not None:
            raise Refused(
                "backward() of a private loss takes no gradient, inputs or "
                "create_graph: it clips the gradients of all parameters by sample.",
                remedy="Call loss.backward(), and multiply the loss itself by numbers.",
            )
        if not self.has_graph and self.loss_per_sample.numel():
            raise Refused(
                "The loss was computed under torch.no_grad(), and has no gradient.",
                remedy="Compute the outputs and the loss outside of torch.no_grad().",
            )
        if self.done:
            raise Refused(
                "backward() a second time through the same loss.",
                remedy="Compute the loss anew, with a forward pass.",
            )
        if len(self.sizes) > 1:
            raise of_other_sizes(self.module.private, self.sizes)
        if self.divisor != 1:
            warn_once(
                self.optimizer,
                "divided",
                f"The loss was divided by {self.divisor:g} before backward(). Each "
                "sample's gradient is clipped after that: the guarantee holds, but "
                f"gradients below max_grad_norm are {self.divisor:g} times smaller "
                "relative to the noise. To accumulate batches leave the division out "
                "and use opacus.utils.batch_memory_manager.BatchMemoryManager.",
            )
        self.module.clipped_backward(self.optimizer, self.loss_per_sample, scale)
        self.done = True
        # The graph can go, also where the user keeps the loss to log it.
        self.loss_per_sample = self.loss_per_sample.detach()

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Applies sums and products to the losses of samples, too."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        losses = [x for x in args if isinstance(x, ClippedLoss) and not x.done]
        if name in _NO_SAMPLES:
            raise _without_samples(f"{name} of a private loss")
        # ``loss += other`` binds the name anew: it is computed out of place.
        if name in _IN_PLACE and isinstance(args[0], ClippedLoss):
            name = name[:-1]
            func = getattr(T, name)

        def plain(argument: Any) -> Any:
            if not isinstance(argument, ClippedLoss):
                return argument
            value = argument.as_subclass(T)
            return value.detach() if argument.done or name in _NUMBER else value

        def of_samples(argument: Any) -> Any:
            if isinstance(argument, ClippedLoss) and not argument.done:
                return argument.loss_per_sample
            return plain(argument)

        with DisableTorchFunctionSubclass():
            value = func(*tree_map(plain, args), **tree_map(plain, kwargs))
            if not (losses and torch.is_grad_enabled() and isinstance(value, T)):
                return value
            if value.dim():
                return value
            per_sample = losses[0].loss_per_sample
            if name not in _SAME:
                if _is_by_sample(name, losses, args):
                    per_sample = func(*map(of_samples, args), **kwargs)
                # A sum over other samples is a loss, too, whose backward() is refused.
                elif name not in _SUMS or not _are_alike(losses):
                    return value
            divisor = 1.0
            if name in _QUOTIENTS and isinstance(args[-1], int) and args[-1] > 1:
                divisor = args[-1]
            return losses[0]._computed(losses, per_sample, value, divisor)

    def _computed(
        self, losses: Sequence[ClippedLoss], per_sample: T, value: T, divisor: float
    ) -> ClippedLoss:
        """Makes the loss that was computed from losses of this model, and divided."""
        loss = ClippedLoss(
            self.module, self.optimizer, per_sample, self.loss_reduction, value=value
        )
        loss.divisor = divisor * max(other.divisor for other in losses)
        loss.sizes = frozenset().union(*(other.sizes for other in losses))
        return loss

    # Opacus's class has one of its own.
    __str__ = torch.Tensor.__str__


def _is_by_sample(name: str, losses: Sequence[ClippedLoss], args: tuple) -> bool:
    """Returns True if a function of losses can be applied to each sample's loss."""
    if len(losses) > 1:
        shapes = {loss.loss_per_sample.shape for loss in losses}
        return name in _SUMS and _are_alike(losses) and len(shapes) == 1
    # A number divided by a loss is no sum over samples.
    return name in _SUMS | _PRODUCTS or name in _QUOTIENTS and args[0] is losses[0]


def _are_alike(losses: Sequence[ClippedLoss]) -> bool:
    """Returns True for losses of one model with one reduction."""
    return len({(loss.module, loss.loss_reduction) for loss in losses}) == 1


class _WithoutSamples(torch.autograd.Function):
    """The identity, whose backward pass is refused."""

    @staticmethod
    def forward(ctx: Any, value: T, anchor: T) -> T:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        raise _without_samples("A backward pass through what is computed from a loss")


_anchor = torch.zeros((), requires_grad=True)


def _without_samples(what: str) -> Refused:
    return Refused(
        f"{what} loses the samples, whose gradients are clipped one by one.",
        remedy="Call backward() on the loss that the private criterion returns. It can "
        "be multiplied by numbers and added (total = total + loss) to losses of the "
        "same samples and model; compute anything else in the criterion. To log a "
        "number use loss.item() or loss.detach().",
    )


class ClippedCriterion(stock.DPLossFastGradientClipping):
    """
    A criterion that returns a :class:`ClippedLoss`. It is evaluated for each sample
    alone, with its own reduction. Outputs and targets of flattened tokens ``[B * T]``
    need ``shape=[B, T]``, as in Opacus.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        warn = functools.partial(warn_once, self.optimizer)
        self.by_sample = SampleCriterion(self.criterion, self.loss_reduction, warn)

    def __repr__(self) -> str:
        return in_a_line(self, repr(self.criterion), loss_reduction=self.loss_reduction)

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> ClippedLoss:
        private = self.module.private
        with private.telling("criterion"):
            # The first dim of flattened tokens is not the number of samples.
            size = private.size if shape is None else shape[0]
            # The criterion may refuse what no call of the model has given: then this
            # is what to tell.
            try:
                losses = self.by_sample(args, kwargs, shape, size)
            except Refused:
                _refuse_other_outputs(private, (args, kwargs))
                raise
            if self.by_sample.alone:
                reason = self.by_sample.alone
                private.ways.note("the criterion one by one", reason)
        return ClippedLoss(self.module, self.optimizer, losses, self.loss_reduction)


def _refuse_other_outputs(private: PrivateModel, arguments: object) -> None:
    """Refuses outputs that do not come from a call of the private model."""
    trained: list[T] = []
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, (ClippedLoss, NotEqual)):
            return
        if isinstance(leaf, T) and leaf.requires_grad:
            trained.append(leaf)
    if torch.is_grad_enabled() and not dependencies_of(trained).nodes:
        raise not_called(private)


class Ghost(PrivateMode):
    """Mode "ghost", and the base of all modes that leave clipped sums."""

    compiles = True
    loss_reduction: str  # of Opacus's classes
    passes = 2  # of ClippedSum
    calls = 0  # of backward() with several samples

    def mean_of(self, record: ForwardRecord, losses: T) -> T:
        """
        Makes the loss that a model returned of its losses ``[B]``. Where inputs get
        gradients it is a plain mean, which gives none to the model.
        """
        optimizer = self.private.optimizer
        if optimizer is None or record.trained:
            return losses.mean()
        return ClippedLoss(self, optimizer, losses, self.loss_reduction)

    def plain_backward(
        self, record: ForwardRecord, grads: Sequence[T | None]
    ) -> list[T | None]:
        """
        Handles ``backward()`` of a loss that the private criterion did not return:
        inputs get gradients, the model none. Refused if no input requires one.
        """
        if not record.trained:
            raise Refused(
                f"{self.private.describe()}: backward() of a loss that the private "
                "criterion did not give. It would add no gradient.",
                module=self.private.describe(),
                remedy="Call the criterion that make_private returned, for a model's "
                "own loss as criterion(opacus_ext.losses.model_losses(model, batch)).",
            )
        return record.of_inputs(grads)

    def get_norm_sample(self) -> T:
        """Returns the gradient norms ``[B]`` of the last backward pass."""
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> T:
        """Returns the flat clipping factors ``[B]`` of the last backward pass."""
        return (self.max_grad_norm / (self.get_norm_sample() + 1e-6)).clamp(max=1.0)

    def clipped_backward(
        self, optimizer: PrivateOptimizer, losses: T, scale: float = 1.0
    ) -> None:
        """
        Sets ``p.grad`` of every trainable parameter to the clipped sum of the
        per-sample gradients of losses ``[B]``. Changes nothing if it is refused. See
        :meth:`ClippedLoss.backward` for ``scale``.
        """
        if not 0 < scale < math.inf:
            reason = f"scale must be a positive number, got {scale}."
            raise Refused(reason, parameter="scale")
        try:
            with self.private.telling("backward pass"), no_autocast():
                sources = dependencies_of([losses])
                self._check(sources, losses)
                if any(isinstance(x, nn.Parameter) for x in sources.before):
                    self._feed(sources, losses)
                    return
                # All that this process can refuse is refused before others wait for it.
                total = self._total(optimizer, losses.numel(), scale)
                self.private.begin_backward(bool(sources.records))
                self._add(total, sources, losses if scale == 1 else losses * scale)
                if not self.private.is_shared_out:
                    refuse_no_graph(total, losses.numel())
        except BaseException:
            self.private.reset()
            raise
        # Only now, as a backward pass that is refused may be tried again.
        for record in sources.records:
            record.mark_done()
        self.private.passes.add(sources.records)
        self._set_grads(optimizer, total)

    def _feed(self, sources: Dependencies, losses: T) -> None:
        """
        Leaves plain gradients of the mean or sum of losses in the models that computed
        inputs (a generator), and none in the private one.
        """
        loss = losses.mean() if self.loss_reduction == "mean" else losses.sum()
        torch.autograd.backward([loss], inputs=sources.before)
        for record in sources.records:
            record.mark_done()
            record.may_not_enter(feeds_another(self.private))
        # A frozen model's pass leaves no gradient for the step to take.
        self.private.passes.add(record for record in sources.records if record.params)

    def clip(
        self,
        optimizer: PrivateOptimizer,
        samples: list[Samples],
        loss: Callable[[Any], T],
    ) -> T:
        """
        Sets ``p.grad`` as :meth:`clipped_backward`, where ``loss`` calls the model with
        a sample. Returns the losses ``[B]``, detached.
        """
        total = self._total(optimizer, sum(part.size for part in samples))
        losses = self.private.clip(samples, loss, total)
        if not self.private.is_shared_out:
            refuse_no_graph(total, losses.numel())
        self._set_grads(optimizer, total)
        return losses

    def _total(
        self, optimizer: PrivateOptimizer, size: int, scale: float = 1.0
    ) -> ClippedSum:
        if optimizer.ready:
            raise second_pass(f"To accumulate batches use {MEMORY_MANAGER}.")
        return self.private.clipped_sum(
            self._by_name(optimizer.params),
            size,
            optimizer.clipping_function,
            self.on_nonfinite,
            scale,
            passes=self.passes,
            scales=optimizer.take_scales(),
        )

    def _by_name(self, params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Returns parameters of the model by name, in the order of the list."""
        named = self.private.params
        # The same order is the rule, and finding it takes less than hashing tensors.
        are_same = map(operator.is_, named.values(), params)
        if len(named) == len(params) and all(are_same):
            return named
        names = self.private.names
        return {names[parameter]: parameter for parameter in params}

    def _set_grads(self, optimizer: PrivateOptimizer, total: ClippedSum) -> None:
        self.per_sample_gradient_norms = total.norms
        sums = zip(optimizer.params, total.sums().values())
        optimizer.set_clipped_sums(sums, total.norms)

    def _check(self, sources: Dependencies, losses: T) -> None:
        """Refuses losses of another shape, or that depend on other models."""
        private = self.private
        if losses.dim() != 1:
            raise Refused(
                f"The criterion must give one loss a sample, shape [B]; got shape "
                f"{tuple(losses.shape)}.",
                parameter="criterion",
                remedy="Give make_private criterion=opacus_ext.losses.PerSample() and "
                "call criterion(opacus_ext.losses.model_losses(model, batch))."
                "backward().",
            )
        for leaf in sources.leaves:
            # The anchor is in losses such as (1 - torch.exp(-loss)) ** 2 * loss.
            if leaf is _anchor:
                raise _without_samples("A product with what is computed from a loss")
            raise not_private(private, leaf, "the loss is")
        for leaf in sources.before:
            is_parameter = private.is_shared_out and isinstance(leaf, nn.Parameter)
            if is_parameter or leaf in private.names:
                raise not_private(private, leaf, "its input is")
        for record in sources.records:
            if record.model is not private:
                leaf = next(iter(record.params.values()), losses)
                raise not_private(private, leaf, "the loss is")
            # A second backward pass is refused.
            if record.done:
                record.mark_done()
            if record.size != len(losses):
                raise Refused(
                    f"The criterion gives {len(losses)} losses for a batch of "
                    f"{record.size} samples.",
                    parameter="criterion",
                    remedy="The privacy unit is the sample: for losses of flattened "
                    "tokens call criterion(logits.flatten(0, 1), targets.flatten(), "
                    "shape=[B, T]).",
                )

    def _add(self, total: ClippedSum, sources: Dependencies, losses: T) -> None:
        if not sources.nodes:
            return
        # Where outputs of a call are inputs of another, the first is passed twice.
        for record in sources.records:
            record.retain_graph = sources.nested
        edges: list[GradientEdge] = []
        dims: list[int | None] = []
        for node in sources.nodes:
            edges += [GradientEdge(node, i) for i in range(len(node.record.dims))]
            dims += node.record.dims.values()
        grads = iter(self._output_grads(losses, edges, dims))
        records = [node.record for node in sources.nodes]
        grads_of = [[*islice(grads, len(record.dims))] for record in records]
        if len(records) == 1:
            records[0].add_gradients(total, grads_of[0])
            return
        if self.private.is_shared_out:
            raise Refused(
                "A loss of several forward passes, with parameters spread over "
                "processes.",
                module=self.private.describe(),
                remedy="Compute it from one forward pass.",
            )
        # The gradient of a sample is the sum over all forward passes.
        dense = DenseGrads(dict(zip(total.names, total.params)), total.norms.shape[0])
        for record, of_outputs in zip(records, grads_of):
            record.add_gradients(dense, of_outputs)
        samples = {}
        for name, rows in dense.rows.items():
            parameter = dense.params[name]
            sample = GradSample(parameter.shape, dense.size, rows.flatten(1))
            samples[id(parameter)] = sample
        total.add_samples(samples)

    def _output_grads(
        self, losses: T, edges: list[GradientEdge], dims: list[int | None]
    ) -> Sequence[T | None]:
        """
        Returns the gradients of the model's outputs, given their edges and batch dims.
        Checks, increasingly rarely, that no loss depends on outputs of other samples.
        """

        def backward(weights: T, keep: bool = False) -> Sequence[T | None]:
            return torch.autograd.grad(
                [losses], edges, [weights], retain_graph=keep, allow_unused=True
            )

        size = len(losses)
        ones = torch.ones_like(losses)
        # Checked are the calls 0, 1, 3, 7 and so on, as it takes a second pass.
        if size < 2 or self.calls & (self.calls + 1):
            self.calls += size > 1
            return backward(ones)
        # Weights differ from sample to sample, in their signs too, so that it shows if
        # the gradient of an output is a sum over samples.
        weights = 1 + torch.arange(size).to(losses) / size
        weights[::2] *= -1
        expected = [*map(_digest, backward(weights, keep=True), dims)]
        grads = backward(ones)
        for grad, dim, weighted in zip(grads, dims, expected):
            plain = _digest(grad, dim)
            if grad is not None and not _scaled(plain, weights, weighted, grad.dtype):
                raise Refused(
                    "The loss of a sample depends on the outputs of others: the "
                    "criterion, or code before it, mixes samples.",
                    parameter="criterion",
                    remedy="Compute the loss of each sample from that sample alone.",
                )
        self.calls += 1
        return grads


def _digest(grad: T | None, dim: int | None) -> Any:
    """Returns the digest of an output's gradients, if it has some."""
    return None if grad is None else digest(grad.movedim(dim or 0, 0))


def _scaled(digests: T, weights: T, expected: T, dtype: torch.dtype) -> bool:
    """Returns True if the gradients of weighted losses are the weighted gradients."""
    digests = digests * torch.stack([weights.abs(), weights]).to(digests)
    norms = digests[0].nan_to_num(0, 0)
    coarse = 1e-3 if dtype.itemsize >= 4 else 0.03
    gaps = (digests - expected).abs().nan_to_num(0, 0)
    # Smaller squares are imprecise, and so are smaller numbers of float16.
    squares = torch.finfo(digests.dtype).tiny ** 0.5
    least = max(torch.finfo(dtype).tiny, 1e3 * squares)
    return bool((gaps <= coarse * norms + 1e-6 * norms.sum() + least).all())


class BookKeeping(Ghost):
    """Mode "ghost_bk": norms and sums from one backward pass."""

    passes = 1


class Scan(BookKeeping):
    """Mode "scan": one sample after the other."""

    one_by_one = True
    compiles = False
