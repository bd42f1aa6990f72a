"""Models that are sharded by ``fully_shard`` (FSDP2), by TrainingArguments or before.

Trainer and accelerate see a model that is prepared already. So accelerate wraps and
casts nothing, and Trainer writes and reads complete tensors, as in a single process.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from opacus_ext.private_torch import tree_map_only
from opacus_ext.refused import Refused

_BY_CLASS, _WHOLE = "TRANSFORMER_BASED_WRAP", "NO_WRAP"
_CLASSES = "transformer_layer_cls_to_wrap"
#: Keys of fsdp_config with the values that are taken; None for any.
_KEYS: Dict[str, Any] = {
    **dict.fromkeys(("cpu_offload", "activation_checkpointing"), (False,)),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), (False,)),
    "cpu_ram_efficient_loading": (False,),
    "version": (2,),
    "state_dict_type": ("FULL_STATE_DICT",),
    "reshard_after_forward": (True, False),
    "auto_wrap_policy": (_BY_CLASS, _WHOLE),
    "min_num_params": (0,),
    _CLASSES: None,
}
_REMEDIES = {
    "cpu_offload": "Leave it out: weights and the optimizer's state are spread over "
    "the processes.",
    "activation_checkpointing": "Give TrainingArguments its own argument for it "
    "(activation_checkpointing, gradient_checkpointing).",
    "cpu_ram_efficient_loading": "Leave it out: each process loads the weights, and "
    "those of process 0 are taken.",
    "version": "Give 2, for fully_shard.",
    "state_dict_type": "Leave it out: checkpoints are whole.",
    "auto_wrap_policy": f"Name classes of layers by {_CLASSES!r}, or give {_WHOLE!r}.",
}


def _value(value: Any) -> Any:
    """Returns a value of fsdp_config, which may be a word from a command line."""
    known = {"true": True, "false": False, "2": 2}
    return known.get(value.lower(), value) if isinstance(value, str) else value


def refuse_config(config: Dict[str, Any]) -> None:
    """Refuses entries of ``fsdp_config`` that would not be followed."""
    for key, value in config.items():
        taken = _KEYS.get(key, ())
        if taken is not None and _value(value) not in taken:
            raise Refused(
                f"fsdp_config[{key!r}]={value!r} is not supported.",
                parameter="fsdp_config",
                remedy=_REMEDIES.get(key, "Leave it out."),
            )


# -- sharding --------------------------------------------------------------------------


def shard(model: nn.Module, args: Any, precision: str) -> None:
    """
    Shards a model by ``fully_shard`` as ``fsdp_config`` of TrainingArguments says, with
    the weights of process 0.
    """
    config = {key: _value(value) for key, value in args.fsdp_config.items()}
    layers = _layers(model, config)
    whole = model.state_dict() if args.process_index == 0 else {}
    dtype = torch.bfloat16 if precision == "bf16" else None
    sharding: Any = dict(mesh=init_device_mesh(args.device.type, (args.world_size,)))
    sharding["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype)
    reshards = config.get("reshard_after_forward", True)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshards, **sharding)
    fully_shard(model, **sharding)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    for x in model.buffers():  # state dicts leave some out
        dist.broadcast(x, 0)


def _layers(model: nn.Module, config: Dict[str, Any]) -> List[nn.Module]:
    """
    Returns the layers that are sharded separately, inner layers first. A layer that
    shares a parameter with other layers (tied embeddings) is sharded with the model.
    """
    if config.get("auto_wrap_policy") == _WHOLE:
        return []
    every, uses = list(model.modules()), _uses(model)
    present = {type(m).__name__ for m in every}
    known = (getattr(m, "_no_split_modules", None) for m in every)
    usual = present.intersection(next(filter(None, known), ()))
    names = set(config.get(_CLASSES) or usual)
    if not names or names - present:
        missing = ", ".join(sorted(names - present)) or "layers to shard"
        raise Refused(
            f"{type(model).__name__} has no {missing}.",
            parameter="fsdp_config",
            remedy=f"Name classes of its layers by {_CLASSES!r}, or shard the model as "
            f'one by fsdp_config={{"auto_wrap_policy": {_WHOLE!r}}}.',
        )
    named = [m for m in every[:0:-1] if type(m).__name__ in names]
    return [m for m in named if all(uses[p] == n for p, n in _uses(m).items())]


def _uses(module: nn.Module) -> Counter:
    """Counts how often each parameter occurs in the modules of a model."""
    every = (m._parameters.values() for m in module.modules())
    return Counter(p for some in every for p in some if p is not None)


# -- what Trainer sees -----------------------------------------------------------------


def adopt(model: nn.Module, inner: nn.Module) -> None:
    """
    Makes accelerate take a sharded model as it is, and makes ``inner``, the model that
    Trainer loads and saves, take the complete tensors of a checkpoint. The class keeps
    its name from before sharding, by which Trainer decides whether labels are next
    tokens.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            name = type(unit).__name__.removeprefix("FSDP")
            vars(unit)["_get_name"] = partial(str, name)
    setattr(model, "_is_accelerate_prepared", True)
    inner.register_load_state_dict_pre_hook(partial(_to_shards, model))


def reshard(model: nn.Module) -> None:
    """Frees the complete parameters that an evaluation has gathered."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _to_shards(
    root: nn.Module, module: nn.Module, state: Dict[str, Any], prefix: str, *args: Any
) -> None:
    reshard(root)
    for name, p in module.state_dict(keep_vars=True).items():
        if prefix + name in state:
            state[prefix + name] = _shard_of(state[prefix + name], p)


def _shard_of(x: Any, p: Any) -> Any:
    """Returns this process's shard of a complete tensor, cut as the parameter is."""
    if not isinstance(p, DTensor) or isinstance(x, DTensor) or x.shape != p.shape:
        return x
    x = x.to(p.device)
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def whole(state: Any, keep: bool) -> Any:
    """
    Returns a state dict with complete tensors on the CPU, or with None for each tensor
    if not ``keep``. All processes must call it. A parameter that occurs twice (tied
    weights) is one tensor.
    """
    tensors: Dict[int, Any] = {}

    def of(x: torch.Tensor) -> Any:
        if id(x) not in tensors:
            y = x.detach()
            y = y.full_tensor() if isinstance(y, DTensor) else y
            tensors[id(x)] = y.cpu() if keep else None
        return tensors[id(x)]

    return tree_map_only(torch.Tensor, of, state)


def saves_whole(optimizer: torch.optim.Optimizer, keep: bool) -> Any:
    """Within it, an optimizer's state dict is whole; all processes must ask for it."""
    return optimizer.register_state_dict_post_hook(lambda _, state: whole(state, keep))


def loads_whole(optimizer: torch.optim.Optimizer) -> Any:
    """Within it, an optimizer takes a state dict that is whole, in all processes."""

    def to_shards(optimizer: Any, state: Dict[str, Any]) -> Dict[str, Any]:
        groups = state["param_groups"], optimizer.param_groups
        ids, params = ([x for g in some for x in g["params"]] for some in groups)
        of = dict(zip(ids, params))
        shards = {
            i: {name: _shard_of(x, of[i]) for name, x in values.items()}
            for i, values in state["state"].items()
        }
        return {**state, "state": shards}

    return optimizer.register_load_state_dict_pre_hook(to_shards)
