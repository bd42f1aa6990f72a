"""PrivateTrainer with models sharded by ``fully_shard``: two processes against one.

One process draws the same logical batches. Float64, so that two sums of the same
gradients differ by rounding alone.
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests import tiny  # noqa: E402
from tests.processes import as_torchrun, refusal, run  # noqa: E402

SIZE = 12  # records of a logical batch, of 1, 2 and 3 processes
LOGGED = ("loss", "eval_loss", "expected_batch_size", "sample_rate", "train_loss")
DROPS = dict(resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)


def gpt2():
    """Its embeddings are tied."""
    return tiny.build("causal-lm", "gpt2", "GPT2LMHeadModel", **DROPS)


def lora():
    import peft

    model = tiny.build("causal-lm", "llama", "LlamaForCausalLM")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)  # zeros would leave lora_A as it is
    return model


def by_user(model, shape=(2,), **kwargs):
    names = ("copies", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def padded(records):
    """Pads to the longest one."""
    longest = max(map(len, records))

    def put(value, make=lambda x: x):
        rows = [
            nn.functional.pad(make(x), (0, longest - len(x)), value=value)
            for x in records
        ]
        return torch.stack(rows)

    mask = put(0, torch.ones_like)
    return {"input_ids": put(0), "labels": put(-100), "attention_mask": mask}


def data(count=32):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, tiny.V, (count, 7), generator=generator)
    return [x[: 3 + i % 5] for i, x in enumerate(ids)]


def trainer(folder, make=gpt2, noise=0.0, size=SIZE, cls=None, **kwargs):
    from transformers import TrainingArguments

    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    as_torchrun()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(kwargs.pop("dtype", torch.double))
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes > 1 and "change" in kwargs:
        model = kwargs.pop("change")(model)
    elif processes > 1:
        config = kwargs.pop("config", {})
        kwargs = {"fsdp": True, "fsdp_config": dict(config), **kwargs}
    kwargs = {k: v for k, v in kwargs.items() if k not in ("change", "config")}
    accumulate = 2 if size == SIZE else 1
    given = dict(max_steps=4, save_steps=2, logging_steps=1, learning_rate=0.5)
    given.update(use_cpu=True, report_to=[], disable_tqdm=True, optim="sgd")
    given.update(gradient_accumulation_steps=accumulate, remove_unused_columns=False)
    given.update(per_device_train_batch_size=size // accumulate // processes)
    given.update(per_device_eval_batch_size=2)
    return (cls or PrivateTrainer)(
        model,
        TrainingArguments(folder, **{**given, **kwargs}),
        train_dataset=data(),
        eval_dataset=data(5),
        data_collator=padded,
        privacy=PrivacyArguments(
            **dict(noise_multiplier=noise, target_delta=1e-3, privacy_seed=7),
            **dict(per_sample_max_grad_norm=0.5, repeat_noise=True),
        ),
    )


def trained(folder, resume=None, **kwargs):
    """Whole weights, logs and the accountant of four steps."""
    made = trainer(folder, **kwargs)
    made.train(resume_from_checkpoint=resume)
    made.save_model(f"{folder}/model")
    units = [n for n, m in made.model.named_modules() if isinstance(m, FSDPModule)]
    state = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in made.model.state_dict().items()
    }
    history = [
        {k: v for k, v in entry.items() if k in LOGGED or k == "step"}
        for entry in made.state.log_history
    ]
    return state, history, made.engine.accountant.history, units


ADAM = dict(optim="adamw_torch", learning_rate=0.01)
LORA = dict(make=lora, **ADAM)
CASES = {
    "gpt2": dict(eval_strategy="steps", eval_steps=1),
    "lora": LORA,
    "adam": ADAM,
    "empty shares": dict(size=2, max_steps=8),
    "one unit": dict(config={"auto_wrap_policy": "NO_WRAP"}),
    "kept": dict(config={"fsdp_reshard_after_forward": "false"}),
    "recomputed": dict(gradient_checkpointing=True),
    "by user": dict(change=by_user),
    "copies": dict(change=lambda model: by_user(model, (2, 1))),
    "best": dict(
        **dict(eval_strategy="steps", eval_steps=1, save_steps=1, learning_rate=4.0),
        **dict(load_best_model_at_end=True),
    ),
    "noise": dict(noise=0.7, **ADAM),
}
SAVED = "checkpoint-2"
RESUMED = {"adam": ADAM, "lora": LORA, "noise": CASES["noise"]}


def bf16(folder):
    found = trained(folder, dtype=torch.float32, bf16=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given = dict(dtype=torch.float32, change=lambda m: by_user(m, mp_policy=policy))
    return found, trained(folder, **given)


# -- what is refused -------------------------------------------------------------------


def tensor_parallel(model):
    mesh, p = init_device_mesh("cpu", (2,)), model.transformer.h[0].mlp.c_fc.weight
    model.transformer.h[0].mlp.c_fc.weight = nn.Parameter(
        distribute_tensor(p.detach(), mesh, [Shard(1)])
    )
    return model


def layers_alone(model):
    fully_shard(model.transformer.h[0])
    return model


def meta():
    with torch.device("meta"):
        return gpt2()


def with_optimizer(folder):
    from opacus_ext.trainer import PrivateTrainer

    class Early(PrivateTrainer):
        def __init__(self, model, *args, **kwargs):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            super().__init__(model, *args, optimizers=(optimizer, None), **kwargs)

    return trainer(folder, cls=Early)


CONFIGS = {
    **dict.fromkeys(("cpu_offload", "activation_checkpointing"), True),
    **dict.fromkeys(("cpu_ram_efficient_loading", "xla_fsdp_grad_ckpt"), "true"),
    **{"version": 1, "state_dict_type": "SHARDED_STATE_DICT", "min_num_params": 9},
    **{"auto_wrap_policy": "SIZE_BASED_WRAP", "transformer_layer_cls_to_wrap": "Gone"},
    "limit_all_gathers": True,
}
REFUSED = {
    **{f"fsdp_config['{k}']": dict(config={k: v}) for k, v in CONFIGS.items()},
    "fsdp_config['transformer_layer_cls_to_wrap']": None,
    "has no Gone": dict(config={"transformer_layer_cls_to_wrap": "Gone"}),
    "mlp.c_fc.weight is a DTensor": dict(change=tensor_parallel),
    "h.0.attn.c_attn.weight is a DTensor": dict(change=layers_alone),
    "bf16=True, and the model is sharded": dict(change=by_user, bf16=True),
}
REFUSED = {k: v for k, v in REFUSED.items() if v}


def jobs(folder, processes):
    if processes == 3:
        given = dict(resume=f"{folder}/adam/{SAVED}", **ADAM)
        return {"adam": lambda: trained(f"{folder}/three", **given)}
    made = {
        name: functools.partial(trained, f"{folder}/{name}", **given)
        for name, given in CASES.items()
    }
    for name, given in RESUMED.items():
        path = f"{folder}/{name}/{SAVED}"
        call = functools.partial(trained, f"{folder}/again", path, **given)
        made[f"resumed {name}"] = call
    path = f"{folder}/alone/{SAVED}"
    made["from one"] = lambda: trained(f"{folder}/from one", path, **ADAM)
    made["bf16"] = lambda: bf16(f"{folder}/bf16")
    for name, given in REFUSED.items():
        made[name] = functools.partial(refusal, trainer, f"{folder}/no", **given)
    made["optimizer"] = lambda: refusal(with_optimizer, f"{folder}/no")
    return made
