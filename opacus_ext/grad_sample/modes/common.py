"""What all modes share: an engine in the place of Opacus's hooks."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample import adapters
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.grad_sample.rules.embedding import fault_of
from opacus_ext.grad_sample.rules.registry import find_rule, own_parameters
from opacus_ext.grad_sample.samplewise.compiled.settings import skip
from opacus_ext.grad_sample.samplewise.engine import Engine
from opacus_ext.grad_sample.samplewise.gather import Part, RunGradients
from opacus_ext.grad_sample.samplewise.hooks import BACKWARD_HOOK
from opacus_ext.grad_sample.samplewise.native import attach_natives
from opacus_ext.refused import Refused

# By the id of a parameter: which samples, None for all, and their gradients.
Parts = Dict[int, List[Tuple[Optional[torch.Tensor], GradSample]]]

# What make_private was given beyond Opacus's own arguments (registry.py).
_settings: Dict[str, Any] = {}


@contextlib.contextmanager
def settings(**given: Any) -> Iterator[None]:
    """Engines made within take these arguments."""
    before = dict(_settings)
    _settings.update(given)
    try:
        yield
    finally:
        _settings.clear()
        _settings.update(before)


def refuse(module: nn.Module) -> None:
    """
    Raises:
        Refused: if ``module`` holds what can't be trained privately
    """
    adapters.refuse(module)
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise Refused(
                f"Parameter {name} has a hook (register_hook or "
                "register_post_accumulate_grad_hook), which would change or use its "
                "gradient before it is private.",
                parameter=name,
                remedy="Remove the hook, or freeze the parameter.",
            )
        if p.is_complex():
            raise Refused(
                f"Parameter {name} is complex.",
                parameter=name,
                remedy=(
                    "Use one real parameter for the real and one for the imaginary "
                    "part, or freeze it."
                ),
            )
    for name, layer in module.named_modules():
        what = f"{name or 'the model'} ({type(layer).__name__})"
        rule = find_rule(layer) if own_parameters(layer) else None
        reason = rule.refuse(layer) if rule is not None else None
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and own_parameters(layer):
            fault = fault_of(layer.max_norm, layer.scale_grad_by_freq, layer.sparse)
            if fault is not None:
                raise Refused(
                    f"{what}: {fault.reason}",
                    module=what,
                    parameter=fault.parameter,
                    remedy=fault.remedy,
                )
        if reason is not None:
            raise Refused(f"{what}: {reason}.", module=what)
        if layer._backward_hooks or layer._backward_pre_hooks:
            raise Refused(f"{what} {BACKWARD_HOOK}", module=what, remedy="Remove it.")


class Samplewise:
    """Mixed into Opacus's classes of a mode."""

    engine: Engine
    attached = False  # whether gradients of the whole batch are asked for as well
    scan = False

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Takes the place of the model's ``forward``, once."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise Refused(
                "Trying to add hooks twice to the same model: it is private already.",
                remedy="Pass what make_private returned first, or call its cleanup() "
                "before.",
            )
        module = self._module
        refuse(module)
        given = dict(_settings)
        self.on_nonfinite = given.pop("on_nonfinite", "drop")
        self.engine = Engine(
            module, batch_first, self.attached, scan=self.scan, **given
        )
        handles: List[Any] = list(attach_natives(self.engine))
        self.engine.natives = [each.name for each in handles]
        self.engine.attach()
        handles.append(_Handle(self.engine))
        handles += adapters.watch(module)
        module.autograd_grad_sample_hooks = handles
        self.autograd_grad_sample_hooks = handles
        self.engine.expert_group = find_group(module.modules())
        self.enable_hooks()

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> List[Exception]:
        """
        Buffers are fine where the forward pass does not write data into them, and the
        others are refused when that is seen.
        """
        return []

    def disable_hooks(self) -> None:
        """The model is as it was, for a while."""
        super().disable_hooks()
        self.engine.enabled = False

    def enable_hooks(self) -> None:
        """Samples run by themselves again."""
        super().enable_hooks()
        self.engine.enabled = True

    def trainable(self) -> List[nn.Parameter]:
        """The parameters that are trained, each once."""
        return list(self.engine.params.values())


class Wrapped:
    """Mixed into Opacus's wrappers of a model."""

    _module: nn.Module

    @skip
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's; where the user compiles it, that begins there."""
        return self._module(*args, **kwargs)

    def compile(self, **kwargs: Any) -> None:
        """See ``nn.Module.compile``."""
        self._module.compile(**kwargs)


class _Handle:
    def __init__(self, engine: Engine):
        self.engine = engine

    def remove(self) -> None:
        """Gives the model its ``forward`` back."""
        self.engine.detach()


def engine_of(module: nn.Module) -> Optional[Engine]:
    """What runs the samples of a model in training; None if it is not private."""
    handles = getattr(module, "autograd_grad_sample_hooks", ())
    return next((h.engine for h in handles if isinstance(h, _Handle)), None)


class Gather:
    """
    The per-sample gradients of one backward pass, over all runs that it meets.

    Args:
        engine: of the model
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.of_run: Dict[int, RunGradients] = {}
        self.scanned: Dict[int, Tuple[Any, List[Dict]]] = {}
        self.noted_runs: List[Any] = []  # runs that the loss depends on

    def add(self, use: Any, grad: torch.Tensor, saved: tuple) -> List[nn.Parameter]:
        """See :meth:`~samplewise.gather.RunGradients.add`."""
        found = self.of_run.get(id(use.run))
        if found is None:
            found = RunGradients(use.run, self.engine.params)
            self.of_run[id(use.run)] = found
        return found.add(use, grad, saved)

    def add_sample(self, run: Any, b: int, grads: Dict) -> None:
        """The gradients of one sample of a scan."""
        _, rows = self.scanned.setdefault(id(run), (run, [{} for _ in range(run.size)]))
        for p, g in grads.items():
            if g is not None:
                rows[b][p] = rows[b][p] + g if p in rows[b] else g

    def parts(self) -> List[Part]:
        """What was gathered, for some samples of the batch each."""
        found = []
        with self.engine.own_backward():
            for each in self.of_run.values():
                each.finish()
                found.append(Part(each.run.rows, each.samples))
        for run, rows in self.scanned.values():
            samples = {}
            for p in {p for row in rows for p in row}:
                dense = torch.stack(
                    [row[p] if p in row else torch.zeros_like(p) for row in rows]
                )
                samples[id(p)] = GradSample(p.shape, run.size)
                samples[id(p)].add(dense.detach().view(run.size, 1, p.numel()))
            found.append(Part(run.rows, samples))
        return found

    @property
    def sizes(self) -> List[int]:
        """Of the batches whose forward passes were met."""
        runs = [each.run for each in self.of_run.values()]
        runs += [run for run, _ in self.scanned.values()] + self.noted_runs
        return [run.batch for run in runs]


def by_parameter(parts: List[Part], batch_size: int) -> Parts:
    """
    The parts of each parameter, so that no sample is in two of them.

    Returns:
        for each parameter which samples, None for all, and their gradients
    """
    found: Parts = {}
    for part in parts:
        for i, sample in part.samples.items():
            found.setdefault(i, []).append((part.rows, sample))
    for i, each in found.items():
        if len(each) == 1 or _disjoint([rows for rows, _ in each]):
            continue
        first = each[0][1]
        if all(rows is None for rows, _ in each):
            for _, more in each[1:]:
                first.merge(more)
            found[i] = [(None, first)]
            continue
        whole = None
        for rows, sample in each:
            dense = sample.materialise()
            if whole is None:
                whole = dense.new_zeros(batch_size, *first.shape)
            if rows is None:
                whole += dense
            else:
                whole.index_add_(0, rows.to(whole.device), dense)
        joined = GradSample(first.shape, batch_size)
        joined.add(whole.view(batch_size, 1, first.shape.numel()))
        found[i] = [(None, joined)]
    return found


def _disjoint(rows: List[Optional[torch.Tensor]]) -> bool:
    if any(r is None for r in rows):
        return False
    every = torch.cat([r.cpu() for r in rows])
    return len(every) == len(every.unique())


def one_size(sizes: List[int], engine: Engine) -> Optional[int]:
    """
    Raises:
        Refused: if batches of several sizes met in one backward pass
    """
    if any(size != sizes[0] for size in sizes):
        raise Refused(
            f"{engine.describe()} was called with batches of {sorted(set(sizes))} "
            "samples before one backward pass.",
            module=engine.describe(),
            remedy="Use one batch size a pass.",
        )
    return sizes[0] if sizes else None


def layer_gradients(
    layer: nn.Module, activations: List[torch.Tensor], backprops: torch.Tensor
) -> Dict[nn.Parameter, GradSample]:
    """
    The per-sample gradients of one layer, as Opacus's samplers are asked for them.

    Args:
        activations: its inputs, ``[B, ...]``
        backprops: the gradient of its output, ``[B, ...]``
    """
    engine = Engine(layer)
    engine.joins = False
    gather = Gather(engine)

    class Collector:
        def use(self, use: Any, grad: torch.Tensor, saved: tuple) -> None:
            gather.add(use, grad, saved)

        def note_run(self, run: Any) -> None:
            pass

    engine.collector = Collector()
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in activations]
    natives = attach_natives(engine)  # the layer's own rule counts here too
    engine.own = next((each for each in natives if each.layer is layer), None)
    try:
        with torch.enable_grad():
            output = engine(*given)
    finally:
        for native in natives:
            native.remove()
    torch.autograd.grad([output], [engine.anchor], [backprops], allow_unused=True)
    found = {}
    for _, samples in gather.parts():
        found.update(samples)
    return {
        p: found[i] if i in found else GradSample(p.shape, len(backprops))
        for i, p in engine.params.items()
    }
