"""PrivateTrainer by DDP or with models sharded by ``fully_shard``: two processes
against one.

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

from opacus_ext.strategies import Banded, LambdaCGD  # noqa: E402
from tests import processes  # noqa: E402
from tests import tiny  # noqa: E402
from tests.processes import (  # noqa: E402
    as_torchrun,
    assert_close,
    assert_refused,
    refusal,
    refusals,
)
from tests.trainer_test import SAVING, gpt2, padded, private, sentences  # noqa: E402
from tests.trainer_test import trainer as a_trainer  # noqa: E402

SIZE = 12  # records of a logical batch, of 1, 2 and 3 processes
LOGGED = ("loss", "eval_loss", "expected_batch_size", "sample_rate", "train_loss")


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


def trainer(
    folder,
    make=gpt2,
    noise=0.0,
    size=SIZE,
    dtype=torch.double,
    change=None,
    strategy="independent",
    **given,
):
    """In several processes sharded by Trainer, unless ``change`` says otherwise."""
    as_torchrun()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(dtype)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    config = given.pop("config", {})
    if processes > 1 and change is not None:
        model = change(model)
    elif processes > 1:
        given.update(fsdp=True, fsdp_config=dict(config))
    accumulate = 2 if size == SIZE else 1
    settings = dict(SAVING, logging_steps=1, learning_rate=0.5)
    settings.update(gradient_accumulation_steps=accumulate)
    settings.update(per_device_train_batch_size=size // accumulate // processes)
    settings.update(per_device_eval_batch_size=4 // processes)
    settings.update(padded("DataCollatorForLanguageModeling", mlm=False), **given)
    privacy = private(
        noise_multiplier=noise,
        privacy_seed=7,
        per_sample_max_grad_norm=0.5,
        noise=strategy,
    )
    data = sentences()[:32]
    return a_trainer(folder, model, data, privacy, eval_dataset=data[:8], **settings)


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
DDP = dict(change=lambda model: model)
CASES = {
    "gpt2": dict(eval_strategy="steps", eval_steps=1),
    "lora": LORA,
    "adam": ADAM,
    "smoothed": dict(label_smoothing_factor=0.2),
    "smoothed lora": dict(label_smoothing_factor=0.2, **LORA),
    "empty shares": dict(size=2, max_steps=8),
    "one unit": dict(config={"auto_wrap_policy": "NO_WRAP"}),
    "recomputed": dict(
        config={"fsdp_reshard_after_forward": "false"}, gradient_checkpointing=True
    ),
    "data parallel": dict(DDP, noise=0.7, learning_rate=1.0),
    "by user": dict(change=by_user),
    "copies": dict(change=lambda model: by_user(model, (2, 1))),
    "best": dict(
        **dict(eval_strategy="steps", eval_steps=1, save_steps=1, learning_rate=4.0),
        **dict(load_best_model_at_end=True),
    ),
    "noise": dict(noise=0.7, **ADAM),
    "correlated": dict(noise=0.7, strategy=Banded(2, 4), **ADAM),
    "correlated replicas": dict(DDP, noise=0.7, strategy=LambdaCGD(4, 0.5)),
}
# Each shard has noise of its own, and not that of one process.
NOISY = "noise", "correlated"
SAVED = "checkpoint-2"
RESUMED = ("adam", "lora", *NOISY, "data parallel", "correlated replicas")
REPLICAS = "data parallel", "correlated replicas"


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
    **{"auto_wrap_policy": "SIZE_BASED_WRAP", "limit_all_gathers": True},
}
GONE = {"transformer_layer_cls_to_wrap": "Gone"}
REFUSED = {
    **{
        name: (functools.partial(trainer, "no", config={name: value}), f"['{name}']")
        for name, value in CONFIGS.items()
    },
    "layer": (lambda: trainer("no", config=GONE), "has no Gone"),
    "tensor parallel": (
        lambda: trainer("no", change=tensor_parallel),
        "Tensor parallelism is not supported",
    ),
    "layers alone": (
        lambda: trainer("no", change=layers_alone),
        "Parts of the model are sharded",
    ),
    "bf16": (
        lambda: trainer("no", change=by_user, bf16=True),
        "bf16=True, and the model is sharded",
    ),
    "optimizer": (lambda: with_optimizer("no"), "The optimizer was made before"),
}


def jobs(folder, size):
    if size == 3:
        given = dict(resume=f"{folder}/adam/{SAVED}", **ADAM)
        other = f"{folder}/correlated/{SAVED}"
        given_noise = {"resume": other, **CASES["correlated"]}
        return {
            "adam": lambda: trained(f"{folder}/three", **given),
            "fewer": lambda: refusal(trained, f"{folder}/fewer", **given_noise),
        }
    made = {
        name: functools.partial(trained, f"{folder}/{name}", **given)
        for name, given in CASES.items()
    }
    for name in RESUMED:
        path = f"{folder}/{name}/{SAVED}"
        call = functools.partial(trained, f"{folder}/again", path, **CASES[name])
        made[f"resumed {name}"] = call
    path = f"{folder}/alone adam/{SAVED}"
    made["from one"] = lambda: trained(f"{folder}/from one", path, **ADAM)
    made["bf16"] = lambda: bf16(f"{folder}/bf16")
    made["refused"] = lambda: refusals(REFUSED)
    return made


# -- what two processes have found -----------------------------------------------------

group = processes.groups(jobs)


@pytest.fixture(scope="module")
def alone(group):
    """Runs of one process, by case; one is gone on with by two."""

    @functools.cache
    def found(name):
        return trained(f"{group.folder}/alone {name}", **CASES[name])

    found("adam")
    return found


def assert_same(found, expected, atol=1e-10):
    assert_close([found[0]], expected[0], atol)
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", [n for n in CASES if n not in NOISY])
def test_two_processes_train_as_one(name, alone, group):
    expected, start = alone(name), CASES[name].get("make", gpt2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = start().double().state_dict()
    assert any((before[n] - x).abs().max() > 1e-3 for n, x in expected[0].items())
    for found in group(2).of(name):
        assert_same(found, expected)
        units = {"one unit": 1, **dict.fromkeys(REPLICAS, 0)}.get(name, 3)
        assert len(found[3]) == units
    logs = group(2).of(name)[0][1]
    assert len(logs) == len(expected[1])
    for entry, other in zip(logs, expected[1]):
        assert entry == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("name", NOISY)
def test_processes_share_one_noise(name, alone, group):
    one, other = group(2).of(name)
    assert_same(one, other, atol=0)
    assert one[2] == alone(name)[2]
    spread = [(x - alone("adam")[0][n]).abs().max() for n, x in one[0].items()]
    assert min(spread) > 1e-4  # of each parameter


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_by_two(name, alone, group):
    """Bit for bit; DDP adds up in another order in its first step."""
    atol = 1e-12 if name in REPLICAS else 0
    for found, expected in zip(group(2).of(f"resumed {name}"), group(2).of(name)):
        assert_same(found, expected, atol)


@pytest.mark.parametrize("name", ["adam", "data parallel"])
def test_resumed_by_one(name, alone, group, tmp_path):
    path, expected = f"{group.folder}/{name}/{SAVED}", alone(name)
    group(2).of(name)
    assert_same(trained(str(tmp_path), path, **CASES[name]), expected)


def test_resumed_by_three_and_by_two_from_one(alone, group):
    expected = alone("adam")
    for found in [*group(2).of("from one"), *group(3).of("adam")]:
        assert_same(found, expected)


def test_correlated_noise_of_fewer_shards_is_refused(alone, group):
    group(2).of("correlated")
    *others, missing = group(3).of("fewer")
    assert "noise_2.pt is missing" in missing and "as many processes" in missing
    assert all("another share of the model" in said for said in others)


@pytest.mark.parametrize("name", ["gpt2", "lora", "by user"])
def test_saved_whole(name, alone, group):
    """Files of two processes are those of one, and load by from_pretrained."""
    from safetensors.torch import load_file

    expected, folder = alone(name)[0], group.folder
    group(2).of(name)
    for part in (SAVED, "model"):
        one, both = f"{folder}/alone {name}/{part}", f"{folder}/{name}/{part}"
        skipped = {"rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"}
        assert {*os.listdir(one)} - skipped == {*os.listdir(both)} - skipped
        (file,) = (x for x in os.listdir(one) if x.endswith(".safetensors"))
        written = load_file(f"{one}/{file}")
        assert_close([load_file(f"{both}/{file}")], written, 1e-10)
    if name == "lora":
        import peft

        loaded = peft.PeftModel.from_pretrained(gone_back(), f"{folder}/lora/model")
    else:
        loaded = type(gpt2()).from_pretrained(f"{folder}/{name}/model")
    assert_close([loaded.double().state_dict()], expected, 1e-6)


def gone_back():
    """The model that "lora" adds adapters to."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.build("causal-lm", "llama", "LlamaForCausalLM")


def test_bf16_is_that_of_a_model_sharded_for_it(alone, group, tmp_path):
    expected = trained(str(tmp_path), dtype=torch.float32)
    for found, by_user in group(2).of("bf16"):
        assert_same(found, by_user, atol=0)
        apart = max((x - expected[0][n]).abs().max() for n, x in found[0].items())
        assert 0 < apart < 0.02
        assert {x.dtype for x in found[0].values()} == {torch.float32}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, alone, group):
    assert_refused(group(2), name, REFUSED[name][1])
