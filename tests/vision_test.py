"""Vision models of other libraries are exact: timm, torchvision, diffusers.

Tiny ones. Where a model has BatchNorm, ``ModuleValidator.fix`` replaces it.
"""

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn

from tests.common import check, square_loss

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
torchvision = pytest.importorskip("torchvision")


def images(size, channels=3, count=2):
    return torch.randn(count, channels, size, size).double()


def exact(model, batch, loss_fn=square_loss):
    model = ModuleValidator.fix(model.double().train())
    assert not ModuleValidator.validate(model)
    check("ghost_bk", True, model, batch, loss_fn)


# -- timm ----------------------------------------------------------------------------

TIMM = {
    "test_resnet": 32,  # BatchNorm beside activations
    "test_efficientnet": 32,  # BatchNormAct2d, depthwise, squeeze and excite
    "test_nfnet": 32,  # standardised weights
    "test_convnext": 32,
    "test_vit": 160,
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    exact(timm.create_model(name, num_classes=2), images(TIMM[name]))


def test_frozen_norms_of_timm():
    """FrozenBatchNormAct2d has buffers alone, which no sample changes."""
    model = timm.create_model("test_efficientnet", num_classes=2)
    model = timm.layers.freeze_batch_norm_2d(model)
    kinds = {type(m).__name__ for m in model.modules()}
    assert "FrozenBatchNormAct2d" in kinds
    assert not ModuleValidator.validate(model)
    assert {type(m).__name__ for m in ModuleValidator.fix(model).modules()} == kinds
    exact(model, images(32))


@pytest.mark.parametrize(
    "kind", ["StdConv2d", "ScaledStdConv2d", "ScaledStdConv2dSame"]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_standardised_weights(kind, groups):
    """The weight is computed of parameters alone, with the same Jacobian for all."""
    conv = getattr(timm.layers, kind)(4, 6, 3, groups=groups, bias=True)
    nn.init.normal_(conv.bias)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), conv, nn.Flatten(), nn.LazyLinear(2))
    model.double()(images(6))
    exact(model, images(6, count=3))


# -- torchvision -----------------------------------------------------------------------


def _torchvision():
    models = torchvision.models
    block = models.convnext.CNBlockConfig
    return {
        "resnet": lambda: models.ResNet(
            models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=2, width_per_group=64
        ),
        "vit": lambda: models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=2),
        "convnext": lambda: models.ConvNeXt(
            [block(8, 16, 1), block(16, None, 1)], num_classes=2
        ),
        "swin": lambda: models.SwinTransformer(
            [4, 4], 8, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=2
        ),
    }


@pytest.mark.parametrize("name", ["resnet", "vit", "convnext", "swin"])
def test_torchvision(name):
    exact(_torchvision()[name](), images(32))


# -- diffusers ------------------------------------------------------------------------

UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def test_unet():
    """The noise and the timestep are the sample's own."""
    model = diffusers.UNet2DModel(
        in_channels=1,
        out_channels=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **UNET,
    )
    steps = torch.tensor([3, 500])
    noise = images(8, 1)
    noisy = diffusers.DDPMScheduler().add_noise(images(8, 1), noise, steps)

    def loss_fn(model, batch):
        noisy, steps, noise = batch
        made = model(noisy, steps, return_dict=False)[0]
        return (made - noise).square().flatten(1).mean(1)

    exact(model, (noisy, steps, noise), loss_fn)


def test_conditional_unet():
    model = diffusers.UNet2DConditionModel(
        in_channels=2,
        out_channels=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=6,
        attention_head_dim=2,
        **UNET,
    )

    def loss_fn(model, batch):
        noisy, steps, text = batch
        made = model(noisy, steps, encoder_hidden_states=text)
        return made.sample.square().flatten(1).mean(1)

    batch = images(8, 2), torch.tensor([3, 500]), torch.randn(2, 5, 6).double()
    exact(model, batch, loss_fn)
