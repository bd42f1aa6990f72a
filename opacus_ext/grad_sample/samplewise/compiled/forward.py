"""The forward pass of a compiled model, where one of its programs can take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from torch import nn

from opacus_ext.grad_sample.samplewise.compare import Join
from opacus_ext.grad_sample.samplewise.compiled.programs import Programs
from opacus_ext.grad_sample.samplewise.compiled.settings import Settings, is_off
from opacus_ext.grad_sample.samplewise.functorch import replace_tensor
from opacus_ext.grad_sample.samplewise.inputs import Inputs
from opacus_ext.grad_sample.samplewise.kinds import InputKind, joins_for
from opacus_ext.grad_sample.samplewise.states import carries, data_in_buffers
from opacus_ext.grad_sample.samplewise.walk import leaves_in, tensors_in
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


def programs_for(engine: "Engine", settings: Optional[Settings]) -> Optional[Programs]:
    """
    The programs of a model as it is now; None if it is not compiled.

    Raises:
        Refused: with ``fullgraph=True`` where nothing can be compiled
    """
    if settings is None or is_off() or engine.expert_group is not None:
        return None
    if engine.step is None:
        if settings.fullgraph:
            raise Refused(
                f"{engine.describe()}: torch.compile(fullgraph=True) is for modes "
                '"ghost" and "ghost_bk" and one process.',
                remedy="Leave fullgraph out.",
            )
        return None
    forward = engine.plain_forward()
    each = getattr(engine.per_sample, "key", None) or engine.per_sample
    key = getattr(forward, "__func__", forward), each, engine.step.key
    for known in engine.programs:
        if known.settings == settings and known.key == key:
            return known
    engine.programs = [p for p in engine.programs if p.key[1] != each]
    engine.programs.append(Programs(engine, settings, key))
    return engine.programs[-1]


def run_program(
    engine: "Engine", programs: Programs, inputs: Inputs, known: InputKind
) -> Any:
    """
    The output of a compiled program.

    Raises:
        NotCompiled: where there is none for these inputs
        Changed: if parameters have taken the places of others
    """
    part = inputs.part
    engine.made_of_data.sweep()
    engine.current = engine  # the model's own forward within
    try:
        output, run = programs.forward(part, (inputs.kind, engine.module.training))
    finally:
        engine.current = None
    run.joins = joins_for(engine, known, output, part.size, programs.shape)
    run.fed_by = inputs.made_by
    leaves = list(leaves_in(output))
    for x, join in zip(leaves, run.joins or ()):
        raw = programs.raw(x)
        if raw is not None and join != Join(name=join.name):
            one = join.how and engine.per_sample is None
            y = join(raw, engine)
            one = one and (join.how != "only" or not y.dim())
            replace_tensor(x, run.release(y, None if one else join.dim or 0))
    engine.add_runs([run])
    for x in tensors_in(output):
        if not isinstance(x, nn.Parameter):
            engine.made_of_data.add(x)
    programs.forget()
    for name in data_in_buffers(engine):
        raise carries(engine, name)
    return output
