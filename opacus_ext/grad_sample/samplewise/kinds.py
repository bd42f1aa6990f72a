"""What is known of each kind of input: how its samples run, how outputs are joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set

import torch

from opacus_ext.grad_sample.samplewise.compare import ONLY, Join, NewOutput, kind_of
from opacus_ext.grad_sample.samplewise.walk import tensors_in

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


@dataclass
class InputKind:
    """
    What is known of one kind of input.

    Attributes:
        scan: whether its samples run one after the other
        joins: for each kind of output, how its tensors are put together; None where
            nothing was compared, as the batch was of one sample
        split: whether its samples have taken different branches
        outputs: the kinds of output that samples gave when they were compared
    """

    scan: bool = False
    joins: Optional[Dict[tuple, List[Join]]] = None
    split: bool = False
    outputs: Set[tuple] = field(default_factory=set)


def joins_for(
    engine: "Engine",
    known: InputKind,
    output: Any,
    size: int,
    shape: Callable[[torch.Tensor], Any] = lambda x: x.shape,
) -> Optional[List[Join]]:
    """
    How the tensors of an output are put together.

    Args:
        output: as samples give it
        size: of the batch
        shape: of a tensor, as samples give it

    Raises:
        NewOutput: if it has to be compared first
    """
    if size == 1:
        return [ONLY] * sum(1 for _ in tensors_in(output))
    if known.joins is None:
        return None
    found = known.joins.get(kind_of(output, shape))
    if engine.expert_group is not None and known.joins and found is None:
        found = next(iter(known.joins.values()))  # others would not look again
    if found is None and size:
        raise NewOutput()
    return found
