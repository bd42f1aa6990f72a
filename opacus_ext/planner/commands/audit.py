"""``opacus-ext audit``: attacks on single steps and on one run of private training."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from opacus_ext.audit import audit_model, audit_training
from opacus_ext.planner.commands.check import target_of
from opacus_ext.planner.commands.output import print_json


def run(args: argparse.Namespace) -> int:
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
        for name, audit in audits.items():
            findings = [finding._asdict() for finding in audit.findings]
            numbers = {n: getattr(audit, n) for n in "ok epsilon claimed delta".split()}
            content[name] = numbers | {"findings": findings}
        print_json(content)
    else:
        print(*(f"{name}\n{audit}\n" for name, audit in audits.items()), sep="\n")
    return 0 if all(audit.ok for audit in audits.values()) else 1
