"""The module in which samples begin to depend on each other."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn

from opacus_ext.checks.subject import Subject, T, close
from opacus_ext.private_torch import tree_leaves

_MODULE = (
    "Let it compute each sample by itself: GroupNorm in the place of BatchNorm (opacus."
    "validators.ModuleValidator.fix puts it there); an expert's capacity counted in "
    "each sequence, as opacus_ext.layers.SwitchFeedForward does."
)
_LOSS = (
    "Compute one loss a sample, [B]: opacus_ext.losses.model_losses(model, batch) "
    "makes them by the model's own code. In the place of a balancing loss over the "
    "batch add opacus_ext.layers.balancing_loss to the losses, or freeze the routers "
    "with opacus_ext.layers.freeze_routers."
)


Key = Tuple[str, int]  # a module, and how many of its calls came before
Tensors = List[T]


def _calls(
    subject: Subject, batch: Any, opened: List[str]
) -> Dict[Key, Tuple[Tensors, Tensors]]:
    """
    Runs a batch, and returns the tensors that went into and came out of each call.
    ``opened`` has the modules that have not ended, if the run fails.
    """
    model, numbers = subject.model(), Counter[str]()
    calls: Dict[Key, Tuple[Tensors, Tensors]] = {}
    for path, module in model.named_modules():
        name = f"{path or 'the model'} ({type(module).__name__})"
        module.register_forward_pre_hook(lambda *_, name=name: opened.append(name))

        def end(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            name = opened.pop()
            calls[name, numbers[name]] = _copies((args, kwargs)), _copies(output)
            numbers[name] += 1

        module.register_forward_hook(end, with_kwargs=True)
    subject.run(model, batch)
    return calls


def _copies(value: object) -> Tensors:
    return [x.detach().clone() for x in tree_leaves(value) if isinstance(x, T)]


def first_leak(subject: Subject) -> str:
    """
    Names the first call that has the same inputs in the batch as for each sample alone,
    and other outputs; and what to do.
    """
    opened: List[str] = []
    together, alone = _calls(subject, subject.batch, opened), []
    for sample in subject.samples:
        try:
            alone.append(_calls(subject, sample, opened))
        except Exception as error:
            where = opened[-1] if opened else "the model"
            return f"{where}: it can't run one sample alone ({error}). {_MODULE}"
    for key, (inputs, outputs) in together.items():
        calls = [ended[key] for ended in alone if key in ended]
        if len(calls) == len(alone):
            ins, outs = zip(*calls)
            if _same(inputs, ins) and not _same(outputs, outs):
                return (
                    f"{key[0]}: its output for a sample changes with another in the "
                    f"batch. {_MODULE}"
                )
    return f"loss_fn: a sample's loss depends on other samples. {_LOSS}"


def _same(together: Tensors, columns: Sequence[Tensors]) -> bool:
    """True for the samples' values, and if structures differ: they can't be compared"""
    if {len(column) for column in columns} != {len(together)}:
        return True
    return all(_holds(y, xs) for y, xs in zip(together, zip(*columns)))


def _holds(y: T, xs: Sequence[T]) -> bool:
    """
    True if a tensor holds the samples' values in any order, or equals each sample's;
    also if lengths differ, and nothing can be compared.
    """
    tolerance = {8: 1e-5, 4: 1e-3}.get(y.dtype.itemsize, 0.1)
    if not y.dim() or all(close(x, y, tolerance) for x in xs):
        return True
    flat = torch.cat([x.flatten() for x in xs])
    if flat.numel() != y.numel():
        return len({x.shape for x in xs}) > 1
    return close(flat.to(y).sort().values, y.flatten().sort().values, tolerance)
