"""The first step of each kind of input: outputs by sample beside those of the batch.

If they differ, the model's samples are not independent, and it is refused (compare.py);
else it is known how its outputs are put together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, List, Tuple

import torch

from opacus_ext.grad_sample.parallel.group import ProcessFailure
from opacus_ext.grad_sample.samplewise.compare import HELP, first_mixing, joins_of
from opacus_ext.grad_sample.samplewise.inputs import Inputs, read_inputs
from opacus_ext.grad_sample.samplewise.kinds import InputKind
from opacus_ext.grad_sample.samplewise.packed import unpacked
from opacus_ext.grad_sample.samplewise.parts import Parts
from opacus_ext.grad_sample.samplewise.sandbox import sandboxed
from opacus_ext.grad_sample.samplewise.walk import map_tensors, named_leaves
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


def inputs_of(engine: "Engine", args: tuple, kwargs: dict) -> Inputs:
    """The arguments of a call, with lists of samples told from others."""
    inputs = read_inputs(engine, args, kwargs)
    if engine.lists_are_samples or engine.expert_group is not None or not inputs.lists:
        return inputs
    failure = None
    try:
        joins = (known_of(engine, inputs).joins or {}).values()
        if not any(j.how in ("mean", "sum", "number") for each in joins for j in each):
            return inputs
    except Exception as error:
        failure = error
    engine.lists_are_samples = True
    listed = read_inputs(engine, args, kwargs)
    try:
        known_of(engine, listed)
        return listed
    except Exception:
        engine.lists_are_samples = False
    if failure is not None:
        raise failure
    return inputs


def known_of(engine: "Engine", inputs: Inputs) -> InputKind:
    """
    What is known of the kind of some inputs; the first time it is looked at.

    Raises:
        Refused: if samples are not independent
    """
    kind = (
        inputs.kind,
        engine.module.training,
        engine.per_sample is None,
        inputs.size > 1,
    )
    known = engine.kinds.get(kind)
    # Nothing can be told of one sample, but where experts see those of others.
    least = 2 if engine.expert_group is None else 1
    look = known is None and engine.joins and inputs.size >= least
    if engine.expert_group is not None:
        look = engine.expert_group.begin_pass(inputs.size, look, engine.anchor.device)
    if known is None and not look:
        # What is known of larger batches.
        larger = engine.kinds.get((*kind[:-1], True))
        return InputKind(scan=engine.scan) if larger is None else replace(larger)
    if look:
        known = engine.kinds[kind] = InputKind(scan=engine.scan, joins={})
        try:
            compare(engine, inputs, known)
        except BaseException:
            del engine.kinds[kind]
            raise
    return known


def compare(engine: "Engine", inputs: Inputs, known: InputKind) -> None:
    """
    Looks how the outputs of the batch are put together of those of samples, and notes
    it in ``known``.

    Raises:
        Refused: if they are not
    """

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad)

    def again() -> Inputs:  # a model may change its inputs in place
        return read_inputs(engine, *map_tensors(copied, (inputs.args, inputs.kwargs)))

    hooks: Any = engine.hooks_that_return
    try:
        own = _batch_outputs(engine, again(), hooks)
    except Exception:
        # A forward may need what hooks keep: no trace is left in what can be seen.
        hooks = {h for table in engine.hook_tables() for h in table.values()}
        own = _batch_outputs(engine, again(), hooks)
    with sandboxed(engine.module, hooks):
        known.outputs = set()
        try:
            raw = Parts(engine, again(), known, raw=True).run()
        except (Refused, ProcessFailure):
            raise
        except Exception as error:
            where = None
            if engine.expert_group is None:
                where = first_mixing(engine, again())
            raise Refused(
                f"{engine.describe()} runs on the batch, and not on one sample.",
                module=engine.describe(),
                remedy=where or f"{type(error).__name__}: {error}. {HELP}",
            ) from error
        if inputs.size:  # an empty batch takes part where others look
            joins = joins_of(engine, again(), own, raw)
            for kind in known.outputs:
                known.joins[kind] = joins


def _batch_outputs(
    engine: "Engine", inputs: Inputs, hooks: Any
) -> List[Tuple[str, torch.Tensor]]:
    """Those of the model on the batch, and their names."""
    with sandboxed(engine.module, hooks):
        with engine.paused():
            found = engine.forward(*inputs.args, **inputs.kwargs)
        return [(name, unpacked(x).detach()) for name, x in named_leaves(found)]
