"""Models that are sharded by ``fully_shard`` (FSDP2), by TrainingArguments or before.

Trainer and accelerate see a model that is prepared already. So accelerate wraps and
casts nothing, and what Trainer writes and reads are whole tensors, as of one process.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, Optional, Set

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from opacus_ext.refused import Refused

_BY_CLASS, _BY_SIZE, _NONE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
#: Keys of fsdp_config with the values that are taken; None for any.
_KEYS: Dict[str, Any] = {
    **dict.fromkeys(("cpu_offload", "activation_checkpointing"), (False,)),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), (False,)),
    "cpu_ram_efficient_loading": (False,),
    "version": (2,),
    "state_dict_type": ("FULL_STATE_DICT",),
    "reshard_after_forward": (True, False),
    "auto_wrap_policy": (_BY_CLASS, _BY_SIZE, _NONE),
    "transformer_layer_cls_to_wrap": None,
    "min_num_params": None,
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
}
_WRAPS = {"transformer_layer_cls_to_wrap": _BY_CLASS, "min_num_params": _BY_SIZE}


def _value(value: Any) -> Any:
    """Returns a value of fsdp_config, which may be a word from a command line."""
    known = {"true": True, "false": False, "2": 2}
    return known.get(value.lower(), value) if isinstance(value, str) else value


def refuse_config(config: Dict[str, Any]) -> None:
    """Refuses what is not done as ``fsdp_config`` says."""
    policy = config.get("auto_wrap_policy", _BY_CLASS)
    for key, value in config.items():
        value, reason, remedy = _value(value), "", _REMEDIES.get(key, "Leave it out.")
        taken = _KEYS.get(key, ())
        if taken is not None and value not in taken:
            reason = "is not supported" if taken else "is no key of FSDP2"
        elif value and _WRAPS.get(key, policy) != policy:
            reason = f"has no part in auto_wrap_policy={policy!r}"
            remedy = f"Leave it out, or give {_WRAPS[key]!r}."
        if reason:
            raise Refused(
                f"fsdp_config[{key!r}]={value!r} {reason}.",
                parameter="fsdp_config",
                remedy=remedy,
            )


def refuse_split(model: nn.Module) -> None:
    """Refuses a model whose parameters are split within a computation."""
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        return
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise Refused(
                f"Parameter {name} is a DTensor and not sharded by fully_shard: the "
                "model is split within a computation (tensor parallel, experts).",
                parameter=name,
                remedy="Load it whole and give TrainingArguments(fsdp=True), or train "
                "it by make_private in a loop of your own.",
            )


# -- sharding --------------------------------------------------------------------------


def shard(model: nn.Module, args: Any, precision: str) -> None:
    """
    Shards a model by ``fully_shard`` as ``fsdp_config`` of TrainingArguments says, with
    the weights of process 0. Layers with a parameter that others have too (tied
    embeddings) belong to the whole model, which is sharded last.
    """
    config = {key: _value(value) for key, value in args.fsdp_config.items()}
    layers = _layers(model, config)
    _take_weights_of_first(model, args.device)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    dtype = torch.bfloat16 if precision == "bf16" else None
    given: Any = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    reshards = config.get("reshard_after_forward", True)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshards, **given)
    fully_shard(model, **given)


def _layers(model: nn.Module, config: Dict[str, Any]) -> List[nn.Module]:
    """Returns the layers that are sharded by themselves, the inner ones first."""
    policy, least = config.get("auto_wrap_policy", _BY_CLASS), 0
    every = list(model.modules())
    given = config.get("transformer_layer_cls_to_wrap")
    names: Set[str] = set([given] if isinstance(given, str) else given or ())
    present = {type(m).__name__ for m in every}
    if policy == _BY_CLASS:
        known = (getattr(m, "_no_split_modules", None) for m in every)
        names = names or set(next(filter(None, known), ())) & present
        if not names or names - present:
            what = ", ".join(sorted(names - present)) or "layers to shard"
            raise Refused(
                f"{type(model).__name__} has no {what}.",
                parameter="fsdp_config",
                remedy="Name classes of its layers in fsdp_config="
                f'{{"transformer_layer_cls_to_wrap": [...]}}, or give {_NONE!r} as '
                "auto_wrap_policy to shard the model as one.",
            )
    elif policy == _BY_SIZE:
        least = int(config.get("min_num_params") or 0)
        if least < 1:
            raise Refused(
                f"auto_wrap_policy={_BY_SIZE!r} without min_num_params.",
                parameter="fsdp_config",
                remedy="Give the size from which a layer is sharded by itself.",
            )
    found, uses = [], _uses(model)
    for layer in reversed(every[1:]):
        own = _uses(layer)
        large = least and sum(p.numel() for p in own) > least
        runs = not isinstance(layer, (nn.ModuleList, nn.ModuleDict))
        if (type(layer).__name__ in names or large and runs) and own:
            if all(uses[p] == count for p, count in own.items()):
                found.append(layer)
    return found


def _uses(module: nn.Module) -> Counter:
    """Counts the places that each parameter has in the modules of one."""
    every = (m._parameters.values() for m in module.modules())
    return Counter(p for some in every for p in some if p is not None)


def _take_weights_of_first(model: nn.Module, device: torch.device) -> None:
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.is_meta:
            raise Refused(
                f"{name} has no values (it is on the meta device).",
                parameter=name,
                remedy="Load the weights in each process, by from_pretrained.",
            )
        own = x.detach()
        whole = own.to(device).contiguous()
        dist.broadcast(whole.flatten().view(torch.uint8), 0)
        if whole.data_ptr() != own.data_ptr():
            own.copy_(whole)


# -- what Trainer sees -----------------------------------------------------------------


def adopt(model: nn.Module, inner: nn.Module) -> None:
    """
    Makes accelerate take a sharded model as it is, and ``inner``, the model that
    Trainer loads and saves, take the whole tensors of a checkpoint.
    """
    setattr(model, "_is_accelerate_prepared", True)
    inner.register_load_state_dict_pre_hook(partial(_to_shards, model))


def reshard(model: nn.Module) -> None:
    """Puts shards in the place of what an evaluation has gathered."""
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
    """Returns this process's shard of a tensor that all have, as of a parameter."""
    if not isinstance(p, DTensor) or isinstance(x, DTensor) or x.shape != p.shape:
        return x
    mesh, x = p.device_mesh, x.to(p.device)
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=p.placements)


def _whole(x: Any, keep: bool) -> Any:
    """Returns a whole tensor on the CPU, or nothing; called by all processes."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.cpu() if keep else None


def whole_state(root: nn.Module, inner: nn.Module, keep: bool) -> Dict[str, Any]:
    """
    Returns the state dict of ``inner`` with whole tensors where ``keep`` is set, empty
    elsewhere; called by all processes. Tied weights are one tensor.
    """
    reshard(root)
    whole: Dict[int, Any] = {}
    state = inner.state_dict(keep_vars=True)
    for x in state.values():
        if id(x) not in whole:
            whole[id(x)] = _whole(x, keep)
    return {name: whole[id(x)] for name, x in state.items()} if keep else {}


@contextmanager
def whole_optimizer(
    optimizer: Optional[torch.optim.Optimizer], keep: bool
) -> Iterator[None]:
    """
    Within it, the state dict of an optimizer has whole tensors where ``keep`` is set;
    all processes must ask for it. What is loaded is whole in all.
    """
    if optimizer is None:
        yield
        return

    def gather(optimizer: Any, state: Dict[str, Any]) -> Dict[str, Any]:
        whole = {
            i: {name: _whole(x, keep) for name, x in own.items()}
            for i, own in state["state"].items()
        }
        return {**state, "state": whole}

    def scatter(optimizer: Any, state: Dict[str, Any]) -> Dict[str, Any]:
        groups = state["param_groups"], optimizer.param_groups
        ids, params = ([x for g in some for x in g["params"]] for some in groups)
        own = {
            i: {name: _shard_of(x, p) for name, x in state["state"][i].items()}
            for i, p in zip(ids, params)
            if i in state["state"]
        }
        return {**state, "state": own}

    handles = [
        optimizer.register_state_dict_post_hook(gather),
        optimizer.register_load_state_dict_pre_hook(scatter),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
