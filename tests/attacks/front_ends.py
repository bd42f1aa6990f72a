"""PrivateTrainer and Lightning around a model, for a few private steps."""

import pytest
import torch
from torch import nn

from tests.training import SHORT

PRIVACY = dict(noise_multiplier=1.0, target_delta=1e-3, grad_sample_mode="ghost_bk")


def trainer_of(
    folder, model, data, *callbacks, cls=None, optimizer=None, privacy={}, **arguments
):
    """
    A PrivateTrainer, or a subclass that ``cls`` makes of it.

    Args:
        privacy: of PrivacyArguments
        arguments: of TrainingArguments
    """
    transformers = pytest.importorskip("transformers")
    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    return (cls or PrivateTrainer)(
        model,
        transformers.TrainingArguments(str(folder), **{**SHORT, **arguments}),
        train_dataset=data,
        optimizers=(optimizer, None),
        privacy=PrivacyArguments(**{**PRIVACY, **privacy}),
        callbacks=[*callbacks],
    )


def lightning_of(model, optimizer, *callbacks, steps=4, automatic=True, **privacy):
    """A trainer, its module and its PrivacyCallback, with arguments ``privacy``."""
    L = pytest.importorskip("lightning.pytorch")
    from opacus_ext.lightning import PrivacyCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.criterion = model, nn.CrossEntropyLoss()
            self.automatic_optimization = automatic

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, i):
            loss = self.criterion(self(batch[0]), batch[1])
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self):
            return optimizer or torch.optim.SGD(self.parameters(), 0.1)

    callback = PrivacyCallback(**{**PRIVACY, **privacy})
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    off.update(accelerator="cpu", enable_model_summary=False, max_epochs=9)
    trainer = L.Trainer(callbacks=[callback, *callbacks], max_steps=steps, **off)
    return trainer, Module(), callback
