"""``opacus-ext check``, ``audit`` and ``statement``: what needs a model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Iterable, Tuple

import torch
from torch import nn

from opacus_ext.audit import audit_model, audit_training
from opacus_ext.checks.check import check_per_sample_gradients, refuse_alike
from opacus_ext.losses import model_losses
from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.measure import made_by
from opacus_ext.refused import Refused
from opacus_ext.statement import find_spent, read_statement


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

    common: Any = dict(
        max_grad_norm=args.max_grad_norm,
        delta=args.delta,
        confidence=args.confidence,
        grad_sample_mode=args.mode,
    )
    each = dict(noise_multiplier=args.noise_multiplier, trials=args.trials)
    steps = audit_model(model, loss_fn, batch, **each, **common)
    canaries = min(args.canaries, entries)
    once = audit_training(model, loss_fn, batch, canaries=canaries, **common)
    audits = {"single steps": steps, "one run": once}
    if args.json:
        content = {}
        for name, found in audits.items():
            findings = [finding._asdict() for finding in found.findings]
            numbers = {n: getattr(found, n) for n in "ok epsilon claimed delta".split()}
            content[name] = numbers | {"findings": findings}
        print_result(content, True)
    else:
        print(*(f"{name}\n{found}\n" for name, found in audits.items()), sep="\n")
    return int(not (steps.ok and once.ok))


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
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    names = config.architectures or []
    found = [getattr(transformers, n) for n in names if hasattr(transformers, n)]
    if not found:
        raise Refused(
            f"target {path}: its config names no class of transformers ({names}).",
            parameter="target",
            remedy="Save the model with transformers, or write a module:function.",
        )
    model = found[0].from_pretrained(path)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (batch_size, length))
    if hasattr(model, "score") or "Classification" in names[0]:
        labels = torch.arange(batch_size) % config.num_labels
    else:
        labels = ids.clone()
        labels[-1, length // 2 :] = -100
    return model, {"input_ids": ids, "labels": labels}, model_losses
