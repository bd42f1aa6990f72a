"""Modes "ghost", "ghost_bk" and "scan": ``loss.backward()`` leaves clipped sums."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.autograd.graph import GradientEdge

from opacus_ext.grad_sample.adapter.criterion import SampleCriterion
from opacus_ext.grad_sample.adapter.forward import ForwardRecord
from opacus_ext.grad_sample.adapter.outputs import Met, met_by
from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.clip import ClippedSum, DenseGrads
from opacus_ext.grad_sample.core.groups import no_autocast
from opacus_ext.grad_sample.core.two_passes import TwoPassSum, digest
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.modes.clipped_loss import ClippedLoss, refuse_reduced
from opacus_ext.grad_sample.modes.common import PrivateMode, Wrapper
from opacus_ext.grad_sample.modes.hooks import other_model, outside
from opacus_ext.grad_sample.parallel.model import ParallelModel
from opacus_ext.refused import Refused, tell

T = torch.Tensor


class GhostMode(PrivateMode):
    """The modes in which ``loss.backward()`` leaves clipped sums."""

    attached = compiles = True
    sum_of: type = TwoPassSum
    calls = 0  # of backward(), with several samples

    def plain_backward(
        self, record: ForwardRecord, grads: Sequence[Optional[T]]
    ) -> List[Optional[T]]:
        """
        An ordinary ``backward()``, of a loss that is not the private one: gradients go
        on to the inputs, and none to the model.

        Raises:
            Refused: if no input wants one
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
        """Per-sample gradient norms ``[B]`` of the last backward pass."""
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> T:
        """Flat clipping factors ``[B]`` of the last backward pass."""
        return (self.max_grad_norm / (self.get_norm_sample() + 1e-6)).clamp(max=1.0)

    def clipped_backward(self, optimizer: Any, losses: T, scale: float = 1.0) -> None:
        """
        Sets ``p.grad`` of every trainable parameter to the sum of the clipped
        per-sample gradients. Nothing is changed if it fails.

        Args:
            optimizer: the DP optimizer, whose clipping is applied
            losses: per-sample losses ``[B]``
            scale: what they are multiplied by on the way back, see clipped_loss.py

        Raises:
            Refused: for what can't be followed exactly, and with
                ``on_nonfinite="raise"`` for gradients that are not finite; for losses
                that are not one a sample; for a scale that is not a positive number
        """
        if not 0 < scale < math.inf:
            raise Refused(
                f"scale must be a positive number, got {scale}.", parameter="scale"
            )
        self._check_ready(optimizer)
        met = met_by([losses])
        records = self._records(met, losses)
        total = self._total(optimizer, len(losses), scale)
        with no_autocast():
            self._add(total, records, met, losses * scale)
        for record in records:
            record.take()
        self._give(optimizer, total)

    def clip(
        self, optimizer: Any, samples: List[Samples], loss: Callable[[Any], T]
    ) -> T:
        """
        Sets ``p.grad`` as :meth:`clipped_backward` does, of the losses of samples,
        without outputs of a batch.

        Args:
            optimizer: the DP optimizer, whose clipping is applied
            samples: of a batch, see ``samples_of`` (core/batch.py); none are a batch
                of none
            loss: of a sample; it calls the model

        Returns:
            the losses ``[B]``, detached
        """
        self._check_ready(optimizer)
        total = self._total(optimizer, sum(some.size for some in samples))
        losses = self.private.clip(samples, loss, total)
        self._give(optimizer, total)
        return losses

    @staticmethod
    def _check_ready(optimizer: Any) -> None:
        if optimizer.ready:
            raise Refused(
                "backward() a second time before optimizer.step(): the clipped sum "
                "of the first batch would be lost.",
                remedy="Call optimizer.step() after each backward(), or use "
                "BatchMemoryManager to accumulate batches.",
            )

    def _total(self, optimizer: Any, size: int, scale: float = 1.0) -> ClippedSum:
        names, kind = self.private.names, self.sum_of
        if isinstance(self.private, ParallelModel):
            kind = self.private.sum_of(kind)
        return kind(
            {names[p]: p for p in optimizer.params},
            size,
            optimizer.clipping_function,
            self.on_nonfinite,
            scale,
        )

    def _give(self, optimizer: Any, total: ClippedSum) -> None:
        names, sums = self.private.names, total.sums()
        self.per_sample_gradient_norms = total.norms
        optimizer.take({p: sums[names[p]] for p in optimizer.params}, total.norms)

    def _records(self, met: Met, losses: T) -> List[ForwardRecord]:
        """The forward passes that losses depend on."""
        private = self.private
        if losses.dim() != 1:
            raise Refused(
                f"The criterion must give one loss a sample, shape [B]; got shape "
                f"{tuple(losses.shape)}.",
                parameter="criterion",
                remedy="Give make_private criterion=opacus_ext.losses.PerSample() and "
                "call criterion(opacus_ext.losses.model_losses(model, batch))"
                ".backward().",
            )
        own = {id(p): name for p, name in private.names.items()}
        for leaf in met.leaves:
            refuse_reduced(leaf)
            if id(leaf) in own:
                raise outside(own[id(leaf)], leaf)
            raise other_model(private, leaf, "the loss is")
        for record in met.records:
            if record.model is not private:
                p = next(iter(record.params.values()), losses)
                raise other_model(private, p, "the loss is")
            if record.done:
                record.take()  # which refuses
            for x in record.trained:
                for p in met_by([x]).leaves:
                    if isinstance(p, nn.Parameter):
                        raise other_model(private, p, "its input is")
            if record.size != len(losses):
                raise Refused(
                    f"The criterion gives {len(losses)} losses for a batch of "
                    f"{record.size} samples.",
                    parameter="criterion",
                    remedy="The privacy unit is the sample: for losses of flattened "
                    "tokens call criterion(logits.flatten(0, 1), targets.flatten(), "
                    "shape=[B, T]).",
                )
        return met.records

    def _add(
        self, total: ClippedSum, records: List[ForwardRecord], met: Met, losses: T
    ) -> None:
        edges: List[GradientEdge] = []
        dims: List[Optional[int]] = []
        places: List[Tuple[ForwardRecord, List[int]]] = []
        for node in met.nodes:
            count = len(node.record.dims)
            places.append((node.record, list(range(len(edges), len(edges) + count))))
            edges += [GradientEdge(node, i) for i in range(count)]
            dims += node.record.dims.values()
        if not edges or not losses.requires_grad:
            return
        found = self._of_outputs(losses, edges, dims)
        if len(records) == 1:
            (record, at), *_ = places
            record.add_gradients(total, [found[i] for i in at])
            return
        if isinstance(self.private, ParallelModel):
            raise Refused(
                "A loss of several forward passes, with experts that are spread over "
                "processes.",
                module=self.private.describe(),
                remedy="Compute it from one pass.",
            )
        # Several passes of one batch: the gradient of a sample is their sum.
        whole = DenseGrads(dict(zip(total.names, total.params)), total.norms.shape[0])
        for record, at in places:
            each = DenseGrads(whole.params, record.size)
            record.add_gradients(each, [found[i] for i in at])
            whole.merge(each)
        samples = {
            id(p): GradSample(p.shape, whole.size, rows.flatten(1))
            for p, rows in whole.found()
        }
        total.add_samples(samples)

    def _of_outputs(
        self, losses: T, edges: List[GradientEdge], places: List[Optional[int]]
    ) -> Sequence[Optional[T]]:
        """
        The gradients of the models' outputs.

        Args:
            edges: of the outputs
            places: the dim of the samples in each

        Raises:
            Refused: if a loss depends on the outputs of another sample, which is looked
                at now and then
        """
        look = len(losses) > 1 and self.calls & (self.calls + 1) == 0
        weights = torch.ones_like(losses)
        if look:
            weights[::2] = -1
            weights *= 1 + torch.arange(len(losses)).to(losses) / len(losses)
        grads = functools.partial(torch.autograd.grad, [losses], edges)
        expected = []
        if look:
            found = grads([weights], retain_graph=True, allow_unused=True)
            expected = [_rows(g, dim) for g, dim in zip(found, places)]
            del found
        found = grads([torch.ones_like(losses)], allow_unused=True)
        for g, dim, rows in zip(found, places, expected):
            if g is not None and not _scaled(_rows(g, dim), weights, rows, g.dtype):
                raise Refused(
                    "The loss of a sample depends on the outputs of others: what is "
                    "computed between the model and the criterion, or by it, mixes "
                    "samples.",
                    parameter="criterion",
                    remedy="Compute the loss of each sample from that sample alone.",
                )
        self.calls += len(losses) > 1
        return found


def _rows(g: Optional[T], dim: Optional[int]) -> Optional[T]:
    """What is compared of each sample's gradient, ``[2, B]``."""
    return None if g is None else digest(g.movedim(dim or 0, 0))


def _scaled(rows: T, weights: T, expected: T, dtype: torch.dtype) -> bool:
    """Whether weighted losses have the gradients of losses, each times its weight."""
    rows = rows * torch.stack([weights.abs(), weights]).to(rows)
    norms = rows[0].nan_to_num(0, 0)
    coarse = 1e-3 if dtype.itemsize >= 4 else 0.03
    gaps = (rows - expected).abs().nan_to_num(0, 0)
    least = torch.finfo(dtype).tiny  # below, float16 has few digits
    return bool((gaps <= coarse * norms + 1e-6 * norms.sum() + least).all())


class BookKeeping(GhostMode):
    """Norms and sums from one pass."""

    attached = False
    sum_of = ClippedSum


class Scan(BookKeeping):
    """One sample after the other."""

    one_by_one = True
    compiles = False


class ClippedCriterion(DPLossFastGradientClipping):
    """
    A criterion whose loss clips per sample: it runs for each sample alone, with its own
    reduction. Outputs and targets of flattened tokens ``[B * T]`` need
    ``shape=[B, T]``, as in Opacus.

    Raises:
        Refused: if a sample's loss depends on other samples
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.by_sample = SampleCriterion(
            self.criterion, self.loss_reduction, self._tell
        )

    def _tell(self, key: str, text: str) -> None:
        tell(self.optimizer, key, text)

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> ClippedLoss:
        private = self.module.private
        size = private.size if shape is None else shape[0]
        losses = self.by_sample(args, kwargs, shape, size)
        return ClippedLoss(self.module, self.optimizer, losses, self.loss_reduction)


class GhostHooks(GhostMode, GradSampleHooksFastGradientClipping):
    """Mode "ghost", attached to a model that is not wrapped."""


class GhostModule(Wrapper, GhostMode, GradSampleModuleFastGradientClipping):
    """Mode "ghost", wrapped around a model."""


class BookKeepingHooks(BookKeeping, GradSampleHooksFastGradientClipping):
    """Mode "ghost_bk", attached to a model that is not wrapped."""


class BookKeepingModule(Wrapper, BookKeeping, GradSampleModuleFastGradientClipping):
    """Mode "ghost_bk", wrapped around a model."""


class ScanHooks(Scan, GradSampleHooksFastGradientClipping):
    """Mode "scan", attached to a model that is not wrapped."""


class ScanModule(Wrapper, Scan, GradSampleModuleFastGradientClipping):
    """Mode "scan", wrapped around a model."""


__all__ = ["Dict"]
