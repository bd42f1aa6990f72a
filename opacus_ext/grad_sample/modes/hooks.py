"""Mode "hooks": one backward pass leaves ``p.grad_sample``, as in Opacus."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleModule
from torch import nn

from opacus_ext.grad_sample.modes.common import (
    Gather,
    Samplewise,
    Wrapped,
    by_parameter,
    one_size,
)
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.refused import Refused


class _Hooks(Samplewise):
    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        self.engine.collector = _Collector(self)
        self._watched: Set[nn.Parameter] = set()
        self._watch()

    def enable_hooks(self) -> None:
        super().enable_hooks()
        self._watch()

    def _watch(self) -> None:
        """Refuses uses of parameters that no sample's run has seen."""
        for p in self.trainable() if hasattr(self, "_watched") else ():
            if p not in self._watched:
                self._watched.add(p)
                hook = _Watch(self.engine, self.engine.names[p], tuple(p.shape))
                self.autograd_grad_sample_hooks.append(p.register_hook(hook))

    def finish(self, gather: Gather) -> None:
        """Sets ``p.grad_sample`` of every trainable parameter."""
        engine, group = self.engine, self.engine.expert_group
        batch_size = one_size(gather.sizes, engine) or 0
        found = by_parameter(gather.parts(), batch_size)
        params = self.trainable()
        if not self.grad_accumulation_allowed and any(
            getattr(p, "grad_sample", None) is not None for p in params
        ):
            raise Refused(
                "Poisson sampling is not compatible with grad accumulation.",
                remedy=(
                    "You need to call optimizer.step() after every forward/backward "
                    "pass or consider using BatchMemoryManager"
                ),
            )
        if group is not None and any(
            getattr(p, "grad_sample", None) is not None for p in params
        ):
            raise Refused(
                "backward() a second time before optimizer.step() and zero_grad(), "
                "which experts that are spread over processes can't take.",
                remedy=(
                    "Call them after each backward(), or use BatchMemoryManager to "
                    "accumulate batches."
                ),
            )
        for p in params:
            size = group.batch_size if group_of(p) else batch_size or 0
            new = _dense(found.pop(id(p), []), p, size)
            if self.loss_reduction == "mean":
                new = new * self._scale(p, new, batch_size)
            new = new.to(p.dtype)
            old = getattr(p, "grad_sample", None)
            if old is not None:
                new = [*old, new] if isinstance(old, list) else [old, new]
            p.grad_sample = new

    def _scale(self, p: nn.Parameter, new: torch.Tensor, batch_size: int) -> Any:
        """What a mean over the batch has divided each sample's gradient by."""
        group = group_of(p)
        if group is None:
            return batch_size
        scale = group.per_sample(group.batch_sizes, device=new.device, dtype=new.dtype)
        return scale.view(-1, *(1 for _ in p.shape))


def _dense(parts: List, p: nn.Parameter, size: int) -> torch.Tensor:
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1].materialise()
    whole = p.detach().new_zeros(size, *p.shape)
    for rows, sample in parts:
        dense = sample.materialise()
        whole = whole.to(torch.promote_types(whole.dtype, dense.dtype))
        whole[rows.to(whole.device)] = dense.to(whole.dtype)
    return whole


class _Watch:
    """On a parameter: no gradient may reach it but through the runs of samples."""

    def __init__(self, engine: Any, name: str, shape: tuple):
        self.engine, self.name, self.shape = engine, name, shape

    def __call__(self, grad: torch.Tensor) -> None:
        engine = self.engine
        if engine.enabled and not engine.in_own_backward:
            raise Refused(
                f"Parameter {self.name} of shape {self.shape} is also used outside "
                "of the model's forward, for example in the loss itself, where its "
                "gradient can't be told apart by sample.",
                parameter=self.name,
                remedy="Use it inside the forward of the module that owns it; if only "
                "a part of the model is called, make that part private.",
            )


class _Collector:
    """Keeps what a backward pass shows, until it is known to be one."""

    def __init__(self, mode: _Hooks):
        self.mode = mode
        self._shown: Dict[int, List[tuple]] = {}
        self._begun: Set[int] = set()

    def _add(self, kind: str, *what: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._shown:
            self._shown = {task: []}  # others, of autograd.grad, are over
        self._shown[task].append((kind, what))

    def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
        """A use of a parameter."""
        self._add("use", use, grad, saved)

    def sample(self, run: Any, b: int, grads: Dict) -> None:
        """A sample of a scan."""
        self._add("sample", run, b, grads)

    def note_run(self, run: Any) -> None:
        """A run that the loss depends on."""
        self._add("run", run)

    def complete(self, grad: Optional[torch.Tensor]) -> None:
        """``backward()`` has passed all uses."""
        mode = self.mode
        shown = self._shown.pop(torch._C._current_graph_task_id(), [])
        self._shown = {}
        if not (mode.hooks_enabled and mode.engine.enabled):
            return
        gather = Gather(mode.engine)
        device = mode.engine.anchor.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            for kind, what in shown:
                if kind == "run":
                    gather.noted_runs.append(what[0])
                elif kind == "use":
                    gather.add(*what)
                else:
                    gather.add_sample(*what)
            shown.clear()
            mode.finish(gather)


class RecordingHooks(_Hooks, GradSampleHooks):
    """Mode "hooks", attached to a model that is not wrapped."""


class RecordingModule(Wrapped, _Hooks, GradSampleModule):
    """Mode "hooks", wrapped around a model."""
