"""A program as users write it, which mypy checks with the package (see setup.cfg)."""

from typing import Any, Callable, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import opacus_ext
from opacus_ext.checks import PerSampleGradientReport
from opacus_ext.optimizers.optimizer import ClippingOptimizer
from opacus_ext.statement import PrivacyStatement

Made = Tuple[Any, ClippingOptimizer, "DataLoader[Any]"]
MadeWithCriterion = Tuple[Any, ClippingOptimizer, Callable[..., Any], "DataLoader[Any]"]


def train(model: nn.Module, loader: "DataLoader[Any]", mode: str) -> None:
    """Three values by default, four in the modes that return a criterion."""
    engine = opacus_ext.PrivacyEngine(accountant="prv_bounds")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = engine.make_private(
        module=model,
        optimizer=sgd,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert_type(made, Made)
    with_criterion = engine.make_private_with_epsilon(
        module=model,
        optimizer=sgd,
        criterion=None,
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=[1.0, 1.0],
        clipping="per_layer",
        grad_sample_mode="auto",
    )
    assert_type(with_criterion, MadeWithCriterion)
    unknown = engine.make_private(
        module=model,
        optimizer=sgd,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    assert_type(unknown, Any)
    private, optimizer, criterion, drawn = with_criterion
    for batch in drawn:
        optimizer.zero_grad()
        criterion(opacus_ext.losses.model_losses(private, batch)).backward()
        optimizer.step()
        print(optimizer.ran, private.generate(batch))
    assert_type(engine.get_epsilon(delta=1e-5), float)
    assert_type(engine.privacy_statement(), PrivacyStatement)
    report = opacus_ext.check_per_sample_gradients(
        model, next(iter(loader)), opacus_ext.model_losses
    )
    assert_type(report, PerSampleGradientReport)


def names() -> None:
    """Parts of the package are found without a second import."""
    assert_type(opacus_ext.trainer.PrivacyArguments(1e-5), opacus_ext.PrivacyArguments)
    assert_type(opacus_ext.losses.PerSample(), opacus_ext.PerSample)
    assert_type(opacus_ext.data.Poisson(sample_rate=0.1).steps, "int | None")
