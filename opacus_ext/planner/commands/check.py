"""``opacus-ext check``, ``audit`` and ``statement``: what needs a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Tuple

import torch
from torch import nn

from opacus_ext.audit import audit_model, audit_training
from opacus_ext.checks.check import check_per_sample_gradients, refuse_alike
from opacus_ext.data.sampling import Poisson
from opacus_ext.losses import model_losses
from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.measure import made_by
from opacus_ext.refused import Refused
from opacus_ext.statement import SPENT, find_spent, read_statement


def statement(args: argparse.Namespace) -> int:
    """Prints the privacy statement of a checkpoint; 1 if no guarantee is known."""
    file = find_spent(args.checkpoint)
    folder = os.path.dirname(file)
    if os.path.isdir(args.checkpoint) and not os.path.samefile(folder, args.checkpoint):
        print(f"The last checkpoint there: {folder}", file=sys.stderr)
    found = read_statement(file, args.delta, unit=args.unit)
    print(found.json() if args.json else found.text.rstrip("\n"))
    return int(found.content["holds"] == "no")


def audit(args: argparse.Namespace) -> int:
    """Audits a model's training; 1 if something contradicts the claims."""
    model, batch, loss = target_of(args)
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if isinstance(loss, nn.Module):
            inputs, targets = batch
            return loss(model(inputs), targets)
        return loss(model, batch)

    run = _settings_of_run(args)
    common: Any = dict(
        max_grad_norm=args.max_grad_norm or run.get("max_grad_norm", 1.0),
        grad_sample_mode=args.mode or run.get("grad_sample_mode", "ghost_bk"),
        clipping=run.get("clipping", "flat"),
        delta=args.delta,
        confidence=args.confidence,
    )
    noise = args.noise_multiplier or run.get("noise_multiplier")
    single = dict(noise_multiplier=noise or 0.5, trials=args.trials)
    steps = audit_model(model, loss_fn, batch, **single, **common)
    whole: Any = dict(canaries=min(args.canaries, entries))
    if run:
        short = min(16, run["steps"])
        whole["sampling"] = Poisson(sample_rate=run["sample_rate"], steps=short)
        whole["noise_multiplier"] = noise
    once = audit_training(model, loss_fn, batch, **whole, **common)
    audits = {"single steps": steps, "one run": once}
    scope = _SCOPE_OF_RUN.format(**run) if run else _SCOPE
    if args.json:
        content: Dict[str, Any] = {"scope": scope}
        names = "ok verdict epsilon claimed delta canaries most".split()
        for name, found in audits.items():
            findings = [finding._asdict() for finding in found.findings]
            numbers = {n: getattr(found, n) for n in names}
            content[name] = numbers | {"findings": findings}
        print_result(content, True)
    else:
        shown = [f"{name.capitalize()}. {found}\n" for name, found in audits.items()]
        print(*shown, scope, sep="\n")
    return int(not (steps.ok and once.ok))


_SCOPE = """\
Audited are steps, and a fresh run of 16 steps, of this architecture on random records:
the code that trains, not a run that was made. A checkpoint of PrivateTrainer is
audited with the settings of its run."""
_SCOPE_OF_RUN = """\
Audited are steps, and a fresh run of at most 16 steps on random records, with settings
of this run: noise multiplier {noise_multiplier:.4g}, sample rate {sample_rate:.4g}.
Its own {steps} steps are not repeated: their records are not in the folder."""


def _settings_of_run(args: argparse.Namespace) -> Dict[str, Any]:
    """The settings of a run whose checkpoint the target is; none of other targets."""
    if not Path(args.target, SPENT).is_file():
        return {}
    content = read_statement(args.target, args.delta).content
    known = [run for run in content["runs"] if run.get("grad_sample_mode")]
    if not (known and content["phases"]):
        return {}
    settings = {**known[-1], **content["phases"][-1]}
    if not isinstance(settings["max_grad_norm"], (int, float)):
        raise Refused(
            f"target {args.target}: a clipping bound for each parameter "
            f"({settings['max_grad_norm']}) is not audited.",
            parameter="target",
            remedy="Copy the model without privacy.json: it is audited with one bound.",
        )
    return settings


def check(args: argparse.Namespace) -> int:
    """Checks per-sample gradients, and lists modules that mix samples; 1 if any do."""
    model, batch, loss = target_of(args)
    refuse_alike(batch)
    report = check_per_sample_gradients(
        model,
        batch,
        loss,
        modes=tuple(args.modes),
        dtype=torch.float32 if args.float32 else torch.float64,
        verbose=False,
    )
    if args.json:
        cells = {
            name: {mode: str(cell) for mode, cell in row.items()}
            for name, row in report.cells.items()
        }
        found = dict(ok=report.ok, parameters=cells, refused=report.refused)
        found |= dict(findings=report.findings, leaks=report.leaks)
        print_result(found, True)
    else:
        print(report)
    return int(not report.ok)


def target_of(args: argparse.Namespace) -> Tuple[Any, Any, Any]:
    """Model, batch and loss of a command's target, a folder or module:function."""
    path = Path(args.target)
    if path.is_dir():
        return _checkpoint(path, args.batch_size, args.length)
    sys.path.insert(0, "")
    try:
        case = made_by(args.target, "target")
    finally:
        sys.path.remove("")
    if not isinstance(case, Iterable) or len(case := list(case)) != 3:
        raise Refused(
            f"target {args.target!r} must return a model, a batch and a loss_fn.",
            parameter="target",
        )
    return tuple(case)


def _checkpoint(path: Path, batch_size: int, length: int) -> Tuple[Any, Any, Any]:
    """A model of transformers from a folder, and random tokens of several lengths."""
    if (path / "adapter_config.json").is_file():
        model, name = _adapter(path)
    else:
        model, name = _whole(path)
    config = model.config
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (batch_size, length))
    if hasattr(model, "score") or "Classification" in name:
        labels = torch.arange(batch_size) % config.num_labels
    else:
        labels = ids.clone()
        labels[-1, length // 2 :] = -100
    return model, {"input_ids": ids, "labels": labels}, model_losses


def _whole(path: Path) -> Tuple[Any, str]:
    """A model of transformers and the name of its class, from a folder."""
    import transformers

    names = transformers.AutoConfig.from_pretrained(path).architectures or []
    found = [getattr(transformers, n) for n in names if hasattr(transformers, n)]
    if not found:
        raise Refused(
            f"target {path}: its config names no class of transformers ({names}).",
            parameter="target",
            remedy="Save the model with transformers, or write a module:function.",
        )
    return found[0].from_pretrained(path), names[0]


def _adapter(path: Path) -> Tuple[Any, str]:
    """A model with an adapter of peft, which is trained, from the adapter's folder."""
    import peft
    import transformers

    settings = peft.PeftConfig.from_pretrained(str(path))
    base = str(settings.base_model_name_or_path)
    inside = path / base  # a relative path may be meant from the adapter
    folder = next((x for x in (Path(base), inside) if x.is_dir()), None)
    if folder is None:
        raise Refused(
            f"target {path}: its adapter_config.json names the base model {base!r}, "
            "which is no folder here.",
            parameter="target",
            remedy="Save the base model into a folder, and write its path to "
            "base_model_name_or_path there.",
        )
    if settings.task_type == "SEQ_CLS":
        kind = transformers.AutoModelForSequenceClassification
        model, name = kind.from_pretrained(folder), "Classification"
    else:
        model, name = _whole(folder)
    return peft.PeftModel.from_pretrained(model, str(path), is_trainable=True), name
