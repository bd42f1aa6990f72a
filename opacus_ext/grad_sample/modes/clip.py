"""From what autograd shows of parameters' uses to norms and clipped sums."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from opacus_ext.grad_sample.factors import GradSample, known, workspace
from opacus_ext.grad_sample.modes.common import Gather, Parts, by_parameter, one_size
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.grad_sample.samplewise.gather import SMALL

Sums = Dict[nn.Parameter, torch.Tensor]


class Clip:
    """
    From what autograd shows to norms and clipped sums.

    Args:
        engine: of the model
        params: those that are clipped
        like: of the device and, if that is wide, the dtype of the norms
        size: number of samples
        one_pass: whether clipped sums will be asked for as well
    """

    side_by_side = True  # whether all samples have run side by side
    keep_gradients = True  # whether gradients are kept from norms to sums

    def __init__(
        self,
        engine: Any,
        params: List[nn.Parameter],
        like: torch.Tensor,
        size: int,
        one_pass: bool = True,
    ):
        self.engine, self.params, self.like, self.size = engine, params, like, size
        self.expert_group = engine.expert_group
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.one_pass = one_pass
        self.reset()

    def reset(self) -> None:
        """Nothing is known yet."""
        self.gather = Gather(self.engine)
        self.squares: Dict[int, torch.Tensor] = {}
        self.bundle: Optional[Tuple[List[nn.Parameter], torch.Tensor]] = None
        self.budget = workspace() if self.one_pass else 0

    def note_run(self, run: Any) -> None:
        """A run that the losses depend on."""

    def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
        """A use of a parameter, as autograd comes by it."""
        for p in self.gather.add(use, grad, saved):
            if self.side_by_side:
                sample = self.gather.of_run[id(use.run)].samples[id(p)]
                if not _is_small(sample):  # others together, in the end
                    self._square(p, sample)

    def _square(self, p: nn.Parameter, sample: GradSample) -> None:
        self.squares[id(p)] = sample.squared_norm(cache=self.budget)
        self.budget -= sample.cached_bytes
        if not self.keep_gradients:
            sample.clear()

    def norms(self) -> Tuple[Parts, Union[torch.Tensor, List[torch.Tensor]]]:
        """All parts, and for each parameter the samples' norms."""
        parts = by_parameter(self.gather.parts(), self.size)
        one_size(self.gather.sizes, self.engine)
        squares: List[torch.Tensor] = []
        if self.expert_group is None and not self.clipping.per_parameter:
            squares += self._bundled(parts)
        bundled = () if self.bundle is None else set(map(id, self.bundle[0]))
        for p in self.params:
            if id(p) not in bundled:
                squares.append(self._squares_of(p, parts.get(id(p), [])))
        if self.expert_group is not None:
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
        size = group_of(p).batch_size if group_of(p) else self.size
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


def _is_small(sample: GradSample) -> bool:
    """Whether a gradient is small, and there without more computation."""
    return known(sample.numel) <= SMALL and sample.flat() is not None
