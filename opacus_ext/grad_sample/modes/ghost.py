"""Modes "ghost", "ghost_bk" and "scan": ``loss.backward()`` leaves clipped sums."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

from opacus_ext.grad_sample.modes.common import Samplewise, Wrapped
from opacus_ext.grad_sample.modes.loss import (
    refuse_mixing,
    refuse_other_models,
    runs_of,
)
from opacus_ext.grad_sample.modes.program import ProgramStep, TracedStep
from opacus_ext.grad_sample.modes.step import Step
from opacus_ext.grad_sample.samplewise.compiled.programs import CompiledRun
from opacus_ext.refused import Refused


class GhostMode(Samplewise):
    one_pass = False
    new_criterion = False  # whether it was given arguments of a new kind

    def add_hooks(self, **kwargs: Any) -> None:
        self.attached = not self.one_pass
        super().add_hooks(**kwargs)

    def serve(self, optimizer: Any) -> None:
        """Lets programs that are compiled clip as an optimizer says."""
        if not self.scan:
            self.engine.step = StepMaker(self.engine, optimizer)

    def get_norm_sample(self) -> torch.Tensor:
        """
        Per-sample gradient norms ``[B]`` of the last backward pass.

        Raises:
            Refused: where no process knows them: experts are spread over processes
                and clipping is by parameter
        """
        if self.per_sample_gradient_norms is None:
            raise Refused(
                'clipping="per_layer" of experts that are spread over processes does '
                "not compute norms over all parameters.",
                remedy="Use another clipping function.",
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
            Refused: for what can't be followed exactly, and with
                ``on_nonfinite="raise"`` for gradients that are not finite
                and if ``losses`` are not one a sample, or for a scale that is not a
                positive number
        """
        if not 0 < scale < math.inf:
            raise Refused(
                f"scale must be a positive number, got {scale}.", parameter="scale"
            )
        if getattr(optimizer, "ready", False):
            raise Refused(
                "backward() a second time before optimizer.step(): the clipped sum "
                "of the first batch would be lost.",
                remedy=(
                    "Call optimizer.step() after each backward(), or use "
                    "BatchMemoryManager to accumulate batches."
                ),
            )
        if losses.dim() != 1:
            raise Refused(
                f"The criterion must give one loss a sample, shape [B], when its "
                f'reduction is "none"; got shape {tuple(losses.shape)}. What a model '
                "computes as its own loss is one number for the batch:",
                parameter="criterion",
                remedy=(
                    "give make_private criterion=opacus_ext.losses.PerSample() and "
                    "call criterion(opacus_ext.losses.model_losses(model, batch))"
                    ".backward()."
                ),
            )
        if self.new_criterion:
            self.new_criterion = not refuse_mixing(losses)
        with torch.autocast(losses.device.type, enabled=False):
            runs = runs_of(losses)
            refuse_other_models(losses, runs, self.engine)
            step = ProgramStep if self._is_compiled(runs) else Step
            sums, total = step(self, optimizer, losses, scale).run()
        self.per_sample_gradient_norms = total
        optimizer.take(sums, total)

    def _is_compiled(self, runs: List[Any]) -> bool:
        compiled = [run for run in runs if isinstance(run, CompiledRun)]
        if compiled and len(runs) > 1:
            raise Refused(
                f"{self.engine.describe()}: the loss depends on {len(runs)} forward "
                "passes, at least one of them compiled, whose gradients are clipped "
                "within the program.",
                module=self.engine.describe(),
                remedy=(
                    "Pass all that belongs to a sample in one call, or train the "
                    "model without torch.compile."
                ),
            )
        return bool(compiled)


class StepMaker:
    """Makes what clips in a compiled program, as an optimizer says."""

    def __init__(self, engine: Any, optimizer: Any):
        self.engine, self.optimizer = engine, optimizer

    @property
    def key(self) -> tuple:
        """What a program is made for."""
        return tuple(map(id, self.optimizer.params)), self.optimizer.clipping

    def __call__(self, engine: Any, leaves: Dict, probe: torch.Tensor) -> "TracedStep":
        names = [self.engine.names[p] for p in self.optimizer.params]
        return TracedStep(engine, leaves, probe, names, self.optimizer.clipping)


class GhostHooks(GhostMode, GradSampleHooksFastGradientClipping):
    """Mode "ghost", attached to a model that is not wrapped."""


class GhostModule(Wrapped, GhostMode, GradSampleModuleFastGradientClipping):
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
