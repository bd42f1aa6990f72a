"""Tests of trainers share the draws of a seed, the oracle of a run, and settings."""

import torch
from torch.distributed.tensor import DTensor

from opacus_ext.data.logical import derive_seed

from . import tiny
from .common import clipped_sum, norms_of, oracle

#: TrainingArguments of a short run.
SHORT = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
SHORT |= {"optim": "sgd", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
SHORT |= {"save_strategy": "no"}


def private(**kwargs):
    from opacus_ext.trainer import PrivacyArguments

    chosen = {"noise_multiplier": 1.0, "target_delta": 1e-3, "privacy_seed": 3}
    chosen |= {"accountant": "prv_bounds", "repeat_noise": True}
    return PrivacyArguments(**(chosen | {"grad_sample_mode": "ghost_bk"} | kwargs))


def tokenizer(*names):
    """A tokenizer of words w0, w1, ... with special tokens, unk among them."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {f"{name}_token": f"[{name.upper()}]" for name in names}
    words = {f"w{i}": i for i in range(tiny.V - len(names))}
    words |= {token: len(words) + i for i, token in enumerate(special.values())}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def drawn(seed, step, records, size):
    """The records of a step, each drawn with probability ``size / records``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "draw", step))
    keys = torch.rand(records, generator=generator, dtype=torch.float64)
    return (keys < size / records).nonzero()[:, 0]


def train_alone(
    model,
    optimizer,
    draws,
    loss_of,
    size,
    bound,
    clipping="flat",
    noise=(0.0, None, torch.float32),
):
    """
    Trains on the clipped gradients of records alone. Returns how many were longer than
    ``bound``.

    ``loss_of(model, i)`` is the loss of record ``i``, ``size`` the expected batch size,
    and ``noise`` the standard deviation of the noise, its generator and dtype.
    """
    names = {p: name for name, p in model.named_parameters()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    sizes, clipped = [p.numel() for p in order], 0
    for numbers in draws:
        grads = oracle(model, numbers, lambda model, i: [loss_of(model, int(i))])
        sums = clipped_sum(grads, clipping, bound)
        clipped += int((norms_of(grads) > bound).sum())
        std, generator, dtype = noise
        kind = {"generator": generator, "dtype": dtype}
        parts = torch.normal(0, std, (sum(sizes),), **kind).split(sizes)
        for p, x in zip(order, parts):
            p.grad = (sums[names[p]] + x.view_as(p)) / size
        optimizer.step()
    return clipped


def weights(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def distance(a, b):
    """The largest difference of two models' weights."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)
