"""What is supported with what: one table, from which errors and a page are made."""

from __future__ import annotations

from itertools import product
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.refused import Refused


class Run(NamedTuple):
    """
    What a run is made of, by the words of :data:`CHOICES`.

    Attributes:
        front_end: what makes the model private: ``make_private`` of PrivacyEngine or
            of an engine with a criterion of its own, or a trainer
        model: what the model is wrapped in, or how processes share it
        mode: ``grad_sample_mode``; "no_op" is Opacus's own
        clipping: ``clipping``; what a user has registered counts as "flat"
        noise: "independent" from step to step; "banded", which is correlated; or
            "secure", drawn in the secure mode of the engine
    """

    front_end: str = "make_private"
    model: str = "one process"
    mode: str = "hooks"
    clipping: str = "flat"
    noise: str = "independent"


_PER_SAMPLE = "hooks", "functorch"
_GHOST = "ghost", "ghost_bk", "scan", "auto"
ADAPTIVE_ENGINE = "PrivacyEngineAdaptiveClipping"
_TRAINERS = "PrivateTrainer", "PrivacyCallback"
_SEVERAL = "DistributedDataParallel", "fully_shard", "expert_parallel"

#: The words for each part of a run.
CHOICES: Dict[str, Tuple[str, ...]] = {
    "front_end": ("make_private", ADAPTIVE_ENGINE, *_TRAINERS),
    "model": (
        "one process",
        *_SEVERAL,
        "fully_shard of parts",
        "tensor parallel",
        "DataParallel",
    ),
    "mode": (*_PER_SAMPLE, *_GHOST),
    "clipping": ("flat", "per_layer", "automatic", "normalized", "adaptive"),
    "noise": ("independent", "banded", "secure"),
}


class Gap(NamedTuple):
    """
    Runs that are refused.

    Attributes:
        runs: these have one of the given words in each given part
        parameter: the argument that the error names
        reason: why, in a sentence
        remedy: what to do instead
    """

    runs: Mapping[str, Tuple[str, ...]]
    parameter: str
    reason: str
    remedy: str

    def has(self, run: Run) -> bool:
        """Returns True if the run is one of these."""
        return all(getattr(run, part) in words for part, words in self.runs.items())


GAPS = (
    Gap(
        {"model": ("DataParallel",)},
        "module",
        "DataParallel loses per-sample gradients with the copies of the model that it "
        "makes.",
        "Pass the model itself. For several devices start one process for each, with "
        "DistributedDataParallel.",
    ),
    Gap(
        {"model": ("tensor parallel",)},
        "module",
        "Tensor parallelism is not supported: a process computes with a part of a "
        "parameter, and norms would be those of the part.",
        "Leave parallelize_module (a tp_plan, tp_size or ep_size of transformers) out, "
        "and use fully_shard or DDP.",
    ),
    Gap(
        {"model": ("fully_shard of parts",)},
        "module",
        "Parts of the model are sharded by fully_shard, and the model itself is not.",
        "Call fully_shard on the whole model, last.",
    ),
    Gap(
        {"front_end": ("PrivacyCallback",), "model": ("fully_shard",)},
        "strategy",
        "Lightning does not train models that fully_shard has sharded here.",
        "Train it by opacus_ext.trainer.PrivateTrainer with "
        "TrainingArguments(fsdp=True), or in a loop of your own by fully_shard and "
        "make_private.",
    ),
    Gap(
        {
            "front_end": _TRAINERS,
            "model": ("expert_parallel",),
        },
        "model",
        "Trainers share the records of a draw out over processes, and experts that are "
        "spread over processes need as many physical batches in each.",
        "Write the training loop yourself, with make_private, or leave expert_parallel "
        "out.",
    ),
    Gap(
        {"model": ("fully_shard",), "mode": _PER_SAMPLE},
        "grad_sample_mode",
        "fully_shard leaves each process a part of the parameters, and this mode has "
        "whole gradients of every sample.",
        'Use grad_sample_mode="ghost_bk".',
    ),
    Gap(
        {"model": ("expert_parallel",), "mode": (*_PER_SAMPLE, "scan", "auto")},
        "grad_sample_mode",
        "Experts that are spread over processes are trained where all samples of a "
        "process run at once, and no process needs whole gradients of a sample.",
        'Choose grad_sample_mode="ghost_bk" or "ghost", or train the model without '
        "opacus_ext.distributed.expert_parallel.",
    ),
    Gap(
        {"model": _SEVERAL, "noise": ("secure",)},
        "secure_mode",
        "A model of several processes has no secure mode.",
        "Leave it out, or train in one process.",
    ),
    Gap(
        {"clipping": ("adaptive",), "noise": ("banded",)},
        "clipping",
        "Correlated noise is accounted for one bound in all steps, which adaptive "
        "clipping moves.",
        'Choose another clipping, or noise="independent".',
    ),
    Gap(
        {"front_end": (ADAPTIVE_ENGINE,), "mode": _GHOST, "noise": ("banded",)},
        "noise",
        "Correlated noise is accounted for one bound in all steps, which this engine "
        "moves.",
        "Take opacus.PrivacyEngine.",
    ),
    Gap(
        {
            "front_end": (ADAPTIVE_ENGINE,),
            "mode": _GHOST,
            "clipping": ("per_layer", "automatic", "normalized"),
        },
        "clipping",
        "The adaptive clipping of Opacus is flat.",
        "Leave clipping out.",
    ),
    Gap(
        {"mode": ("no_op",), "noise": ("banded", "secure")},
        "grad_sample_mode",
        'Mode "no_op" draws its noise in Opacus, where it is independent and not '
        "secure.",
        "Choose another mode.",
    ),
    Gap(
        {"mode": ("no_op",), "clipping": ("automatic", "normalized")},
        "clipping",
        'Mode "no_op" has the clipping of Opacus alone.',
        'Choose another mode, or "flat", "per_layer" or "adaptive".',
    ),
)


def kind_of(module: nn.Module) -> str:
    """Returns the word of :data:`CHOICES` for a model."""
    parts = list(module.modules())
    if any(isinstance(part, nn.DataParallel) for part in parts):
        return "DataParallel"
    sharded = any(isinstance(part, FSDPModule) for part in parts)
    if sharded and not isinstance(module, FSDPModule):
        return "fully_shard of parts"
    if any(_is_split(parameter, sharded) for parameter in module.parameters()):
        return "tensor parallel"
    if sharded:
        return "fully_shard"
    if find_group(parts) is not None:
        return "expert_parallel"
    if isinstance(module, (DDP, DPDDP)):
        return "DistributedDataParallel"
    return "one process"


def _is_split(parameter: nn.Parameter, sharded: bool) -> bool:
    """Returns True if it is split beyond what ``fully_shard`` does."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    split = sum(not placement.is_replicate() for placement in placements)
    return split > 1 if sharded else bool(placements)


def find_gap(run: Run) -> Optional[Gap]:
    """Returns why a run is refused; None for one that is supported."""
    return next((gap for gap in GAPS if gap.has(run)), None)


def refuse(run: Run, module: Optional[str] = None) -> None:
    """
    Refuses a run that is not supported.

    Args:
        module: the name of the model's class, for the error
    """
    gap = find_gap(run)
    if gap is not None:
        met = ", ".join(f"{part}={getattr(run, part)!r}" for part in gap.runs)
        raise Refused(
            f"{f'{module}: ' if module else ''}{gap.reason} Got {met}.",
            module=module,
            parameter=gap.parameter,
            remedy=gap.remedy,
        )


def every_run(**parts: str) -> Iterator[Run]:
    """Yields all runs that have the given parts."""
    words = ((parts[p],) if p in parts else CHOICES[p] for p in Run._fields)
    return (Run(*chosen) for chosen in product(*words))
