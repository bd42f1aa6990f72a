"""Which classes of transformers are trained exactly: the check, and the table of it.

``python -m tests.compatibility`` checks every class that the auto classes map and
writes docs/compatibility.md; with names of classes, families or tasks it prints theirs.
"""

import contextlib
import importlib
import inspect
import pkgutil
import sys

import torch
import transformers
from opacus.validators import ModuleValidator
from torch.nn import functional as F

from tests import tiny
from tests.common import (
    CRASHES,
    MODES,
    assert_same,
    clipped_sum,
    half_clipped,
    oracle,
    run_mode,
)

BATCHES = {"padded": (3, 8), "T=B": (4, 4), "B=1": (1, 8)}


@contextlib.contextmanager
def all_double():
    """What models compute in float32 they compute in float64, to be told to 1e-8."""
    importlib.import_module("safetensors.torch")  # not while it is patched
    before = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        torch.float32, torch.float, torch.Tensor.float = before


def batch_of(model, task, kind):
    """A batch for the model, and which of its entries have a batch dimension."""
    config, (B, T) = model.config, BATCHES[kind]
    torch.manual_seed(10 * B + T)
    known = inspect.signature(model.forward).parameters
    main = model.main_input_name
    if task == "image-classification" and "pixel_values" in known:
        part = getattr(config, "vision_config", config)
        size = getattr(part, "image_size", 32) or 32
        size = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(config, "num_channels", 3)
        batch = {"pixel_values": torch.randn(B, channels, *size)}
        if "spatial_shapes" in known:  # patches already
            patch = part.patch_size**2 * part.num_channels
            batch = {
                "pixel_values": torch.randn(B, 16, patch),
                "pixel_attention_mask": torch.ones(B, 16, dtype=torch.long),
                "spatial_shapes": torch.full((B, 2), 4),
            }
    elif main == "input_features":
        batch = {"input_features": torch.randn(B, 8, 128)}
    else:
        batch = {"input_ids": torch.randint(3, tiny.V, (B, T))}
        if kind == "padded" and "attention_mask" in known:
            mask = torch.ones(B, T, dtype=torch.long)
            mask[1, T - 2 :] = 0
            batch["attention_mask"] = mask
            batch["input_ids"] = batch["input_ids"] * mask
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in batch:
        batch["input_ids"][:, 2] = 2  # classifiers look for the end
        batch["decoder_input_ids"] = torch.randint(3, tiny.V, (B, T))
    return {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}


def loss_fn(model, batch):
    """A cross-entropy [B] over all logits, whatever they are for."""
    own = getattr(model, "_module", model)
    known = inspect.signature(own.forward).parameters
    given = {"use_cache": False} if "use_cache" in known else {}
    logits = model(**batch, **given)["logits"]
    rows = logits.reshape(len(logits), -1, logits.shape[-1])
    target = torch.arange(rows.shape[1]) * 7 % rows.shape[2]
    losses = F.cross_entropy(
        rows.transpose(1, 2), target.expand(len(rows), -1), reduction="none"
    )
    return losses.mean(1)


def check_class(task, family, cls, modes=MODES, wraps=(True, False), kinds=BATCHES):
    """
    Trains a tiny model for a step in every mode and compares it with single samples.

    Returns:
        "exact", "refused", "wrong", "crash" or "unbuilt", and why.
    """
    try:
        with all_double():
            model = tiny.build(task, family, cls).double()
    except Exception as error:
        return "unbuilt", f"{type(error).__name__}: {error}"
    errors = ModuleValidator.validate(model)
    if errors:
        return "refused", str(errors[0])
    try:
        with all_double():
            batches = {kind: batch_of(model, task, kind) for kind in kinds}
            grads = {kind: oracle(model, b, loss_fn) for kind, b in batches.items()}
    except Exception as error:
        return "unbuilt", f"{type(error).__name__}: {error}"
    refusal = None
    for kind, batch in batches.items():
        c = half_clipped(grads[kind])
        expected = clipped_sum(grads[kind], "flat", c)
        for mode in modes:
            for wrap in wraps:
                where = f"{mode}, {kind}, {'wrapped' if wrap else 'not wrapped'}"
                try:
                    with all_double():
                        got = run_mode(mode, wrap, model, batch, loss_fn, "flat", c)
                    assert_same(got, expected, 1e-8, where)
                except AssertionError as error:
                    return "wrong", str(error) or "assertion"
                except CRASHES as error:
                    return "crash", f"{where}: {type(error).__name__}: {error}"
                except Exception as error:
                    refusal = refusal or f"{where}: {type(error).__name__}: {error}"
    return ("refused", refusal) if refusal else ("exact", "")
