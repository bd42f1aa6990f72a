"""Which classes of transformers are trained exactly: the check, and the table of it.

``python -m tests.compatibility`` checks every class that the auto classes map and
writes docs/reference/compatibility.md; with names of classes, families or tasks it
prints theirs.
"""

import collections
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import pathlib
import random
import sys
import warnings
from unittest import mock

import torch
import tqdm
import transformers
from opacus.validators import ModuleValidator
from torch.nn import functional as F

from opacus_ext import clipped_grads
from opacus_ext.grad_sample.core.clipped_grads import _Losses
from tests import tiny
from tests.common import (
    CRASHES,
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
        size = getattr(part, "image_size", 64) or 64
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
    output = model(**batch, **given)
    logits = output["logits"] if "logits" in output else output[0]
    rows = logits.reshape(len(logits), -1, logits.shape[-1])
    target = torch.arange(rows.shape[1]) * 7 % rows.shape[2]
    losses = F.cross_entropy(
        rows.transpose(1, 2), target.expand(len(rows), -1), reduction="none"
    )
    return losses.mean(1)


# Not to be tried, and why; what needs a package that is missing says so itself.
NOT_ALONE = {
    "gemma4_assistant": "drafts for another model, on whose keys and values it runs",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it "
    "takes",
    "musicgen": "takes codebooks as rows, [B * codebooks, T], within a larger model",
    "musicgen_melody": "takes codebooks as rows, [B * codebooks, T], within a larger "
    "model",
    "shieldgemma2": "takes images and text only with its processor's tokens",
    "voxtral_realtime": "takes sound in step with its text",
}
FORMS = ("whole", "half frozen", "embeddings frozen", "LoRA")


def changed(model, form, seed=0):
    """The model with a part of it frozen, or with adapters."""
    layers = [m for m in model.modules() if m._parameters]
    if form == "half frozen":
        chosen = random.Random(seed).sample(layers, len(layers) // 2)
    else:
        kind = torch.nn.Embedding if form == "embeddings frozen" else ()
        chosen = [m for m in layers if isinstance(m, kind)]
    for layer in chosen:
        for p in layer.parameters(recurse=False):
            p.requires_grad_(False)
    if form == "LoRA":
        import peft

        config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.1 * torch.randn_like(p)
    return model


def check_model(model, task, modes=("ghost_bk",), wraps=(True,), kinds=tuple(BATCHES)):
    """
    Compares the clipped sums of a model with single samples, by ``clipped_grads`` and
    by a step in some modes.

    Returns:
        "exact", "refused", "wrong", "crash" or "not tried"; why; and how its samples
        are run: "at once", "split" or "one by one", and why.
    """
    errors = ModuleValidator.validate(model)
    if errors:
        fixed = ModuleValidator.fix(model).double()
        if not ModuleValidator.validate(fixed):
            result, _, how = check_model(fixed, task, modes, wraps, kinds)
            if result == "exact":
                layer = str(errors[0]).split()[0]  # such as BatchNorm
                return "refused", f"{layer}; exact after ModuleValidator.fix", how
        return "refused", str(errors[0]), ""
    try:
        with all_double():
            batches = {kind: batch_of(model, task, kind) for kind in kinds}
            grads = {kind: oracle(model, b, loss_fn) for kind, b in batches.items()}
    except Exception as error:
        return "not tried", f"{type(error).__name__}: {error}", ""
    refusals, hows = {}, []
    for kind, batch in batches.items():
        c = half_clipped(grads[kind])
        expected = clipped_sum(grads[kind], "flat", c)

        def by_function():
            sums, how = clipped(model, batch, c)
            hows.append(how)
            return sums

        ways = {f"clipped_grads, {kind}": by_function}
        for mode, wrap in itertools.product(modes, wraps):
            where = f"{mode}, {kind}, {'wrapped' if wrap else 'not wrapped'}"
            ways[where] = functools.partial(
                run_mode, mode, wrap, model, batch, loss_fn, "flat", c
            )
        for where, run in ways.items():
            try:
                with all_double():
                    assert_same(run(), expected, 1e-8, where)
            except AssertionError as error:
                return "wrong", str(error) or where, ""
            except CRASHES as error:
                return "crash", f"{where}: {type(error).__name__}: {error}", ""
            except Exception as error:
                refusals.setdefault(run is by_function, str(error))
    if True in refusals:
        return "refused", refusals[True], ""
    order = "one by one", "split", "at once"
    how = min(hows, key=lambda how: order.index(how.partition(":")[0]))
    if refusals:
        return (
            "exact",
            f"by clipped_grads; make_private refuses: {refusals[False]}",
            how,
        )
    return "exact", "", how


def clipped(model, batch, bound):
    """The clipped sums of a batch, and how its samples have run."""
    model = copy.deepcopy(model)  # its forward may leave something on it
    at_once, sizes = _Losses.at_once, []

    def noted(run, samples):
        at_once(run, samples)
        sizes.append(samples.size)

    def loss(sample):
        return loss_fn(model, sample)[0]

    with mock.patch.object(_Losses, "at_once", noted), warnings.catch_warnings(
        record=True
    ) as said:
        warnings.simplefilter("always")
        found = clipped_grads(loss, dict(model.named_parameters()), batch, bound)
    told = [str(w.message) for w in said if "vmap can't run" in str(w.message)]
    if told:
        reason = told[0].partition("vmap can't run ")[2].partition(". That is exact")[0]
        return found.sums, f"one by one: {reason}"
    size = len(found.norms)
    return found.sums, "at once" if size == 1 or size in sizes else "split"


def check_class(task, family, cls, form="whole", **kwargs):
    """:func:`check_model` of a class of transformers."""
    if family in NOT_ALONE:
        return "not tried", NOT_ALONE[family], ""
    try:
        with all_double():
            model = tiny.build(task, family, cls).double()
            model = changed(model, form, len(cls))
    except ImportError as error:
        return "not tried", " ".join(str(error).split(". ")[0].split()), ""
    except Exception as error:
        return "not tried", f"{type(error).__name__}: {error}", ""
    return check_model(model, task, **kwargs)


# -- the table ---------------------------------------------------------------------

TABLE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"
HEAD = """# Models of transformers {version}

Every class that `AutoModelForCausalLM`, `AutoModelForMaskedLM`,
`AutoModelForSeq2SeqLM`, `AutoModelForSequenceClassification` and
`AutoModelForImageClassification` map, tiny and with random weights: the clipped sums of
`opacus_ext.clipped_grads` and of a step in "ghost_bk", on a padded batch, on one whose
length is the batch size and on a single sample, compared with single samples by
plain autograd, in float64, to 1e-8. Dropout is off. Models for several kinds of input
are given text, or images where they classify them.

"Exact": all of them are equal, or `clipped_grads` is and `make_private` raises the
error that is given. "Refused": `clipped_grads` does, too; none of those that run is
wrong. How the samples of a batch are run: "at once"
under vmap; "split", at once in parts that take the same branches on data; or "one by
one", with the line that vmap can't run. Written by `python -m tests.compatibility`.

{counts}
"""


def _row(job):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        return (*job, *check_class(*job))
    except Exception as error:  # of the check itself
        return (*job, "crash", f"{type(error).__name__}: {error}", "")


def _in_a_cell(text):
    text = " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
    return text.replace(f"{pathlib.Path(transformers.__file__).parents[1]}/", "")


def write_table(rows):
    """Writes the table from rows (task, family, class, result, reason, how)."""
    counts = collections.Counter(row[3] for row in rows)
    tried = len(rows) - counts["not tried"]
    said = ", ".join(f"{n} {result}" for result, n in counts.most_common())
    share = f"{100 * counts['exact'] / tried:.1f} % of those tried are exact"
    lines = [
        HEAD.format(version=transformers.__version__, counts=f"**{said}: {share}.**")
    ]
    for task in tiny.TASKS:
        lines += [
            f"\n## {task}\n",
            "| family | class | result | how |",
            "| --- | --- | --- | --- |",
        ]
        for _, family, cls, result, *more in (r for r in rows if r[0] == task):
            reason, how = (_in_a_cell(text) for text in more)
            tail = f": {reason}" if reason else ""
            lines.append(f"| {family} | {cls} | {result}{tail} | {how} |")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_table():
    """Version of transformers; result and way of each (task, family, class)."""
    text = TABLE.read_text(encoding="utf-8")
    found, task = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            task = line[3:]
        elif line.startswith("| ") and task and not line.startswith(("| ---", "| fam")):
            family, cls, rest = (part.strip() for part in line[2:-1].split(" | ", 2))
            result, _, way = rest.rpartition("|")
            found[task, family, cls] = result.strip(), way.strip()
    return text.split()[4], found


def main():
    jobs = list(tiny.classes())
    if sys.argv[1:]:
        for job in jobs:
            if set(sys.argv[1:]) & set(job):
                print(*_row(job))
        return
    with concurrent.futures.ProcessPoolExecutor() as pool:
        rows = list(tqdm.tqdm(pool.map(_row, jobs, chunksize=4), total=len(jobs)))
    write_table(rows)


if __name__ == "__main__":
    main()
