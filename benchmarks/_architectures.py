"""The networks of Lee & Kifer 2021, and random data of the right shapes for them."""

from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES, VOCABULARY, LENGTH, WIDTH, HIDDEN = 10, 2000, 64, 200, 128
# Channels of VGG's configuration A; 0 is a max pooling.
VGG_11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class Case(NamedTuple):
    """What is run. ``depth`` is for MLP and CNN, ``image`` is the side in pixels."""

    architecture: str
    batch: int = 32
    depth: int = 2
    image: int = 28


class Recurrent(nn.Module):
    """A recurrent layer's output at the last step: [B, T, d] -> [B, width]."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Positions(nn.Module):
    """Adds the sinusoidal encoding of the positions: [B, T, d] -> [B, T, d]."""

    def __init__(self, length: int, width: int):
        super().__init__()
        rates = 1e4 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("encoding", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.encoding


class Mean(nn.Module):
    """Averages over the tokens: [B, T, d] -> [B, d]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Frozen(nn.BatchNorm2d):
    """
    A BatchNorm whose statistics, scale and shift stay as they are, like the paper's.
    It has seen one batch of random images, in the place of pretraining.
    """

    def __init__(self, channels: int):
        super().__init__(channels, momentum=None, affine=False)
        self.frozen = False

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(mode and not self.frozen)


class Residual(nn.Module):
    """ResNet's block of two convolutions, [B, C, H, W]."""

    def __init__(self, channels: int, next_channels: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *convolution(channels, next_channels, 3, stride),
            nn.ReLU(),
            *convolution(next_channels, next_channels, 3),
        )
        self.shortcut = nn.Sequential()
        if channels != next_channels:
            self.shortcut.extend(convolution(channels, next_channels, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(
    channels: int, next_channels: int, size: int, stride: int = 1
) -> List[nn.Module]:
    """Without a bias, and a frozen BatchNorm."""
    layer = nn.Conv2d(channels, next_channels, size, stride, size // 2, bias=False)
    return [layer, Frozen(next_channels)]


def mlp(case: Case) -> List[nn.Module]:
    """Hidden layers of 128, 256, 256, ... units."""
    layers: List[nn.Module] = [nn.Flatten()]
    width = 28 * 28
    for next_width in [128] + [256] * (case.depth - 1):
        layers += [nn.Linear(width, next_width), nn.Sigmoid()]
        width = next_width
    return [*layers, nn.Linear(width, CLASSES)]


def cnn(case: Case) -> List[nn.Module]:
    """
    The paper's two convolutions, each with max pooling, and a hidden linear layer; more
    depth is more convolutions, which keep the size, after them.
    """
    layers: List[nn.Module] = []
    for channels, next_channels in ((1, 20), (20, 50)):
        layers += [nn.Conv2d(channels, next_channels, 5), nn.Sigmoid()]
        layers += [nn.MaxPool2d(2)]
    for _ in range(case.depth - 2):
        layers += [nn.Conv2d(50, 50, 5, padding=2), nn.Sigmoid()]
    side = ((case.image - 4) // 2 - 4) // 2
    layers += [nn.Flatten(), nn.Linear(50 * side * side, 128), nn.Sigmoid()]
    return [*layers, nn.Linear(128, CLASSES)]


def recurrent(cell: Callable[..., nn.RNNBase]) -> Callable[[Case], List[nn.Module]]:
    """One layer over the rows of an image."""

    def build(case: Case) -> List[nn.Module]:
        layer = cell(case.image, HIDDEN, batch_first=True)
        return [Recurrent(layer), nn.Linear(HIDDEN, CLASSES)]

    return build


def transformer(case: Case) -> List[nn.Module]:
    """One encoder block on embeddings of 200 dimensions, which are trained too."""
    block = nn.TransformerEncoderLayer(
        WIDTH, nhead=8, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
    )
    embedding = [nn.Embedding(VOCABULARY, WIDTH), Positions(LENGTH, WIDTH)]
    return [*embedding, block, Mean(), nn.Linear(WIDTH, CLASSES)]


def resnet_18(case: Case) -> List[nn.Module]:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for next_channels in (64, 128, 256, 512):
        stride = next_channels // channels  # 2 where there are more channels
        layers += [Residual(channels, next_channels, stride)]
        layers += [Residual(next_channels, next_channels, 1)]
        channels = next_channels
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]


def vgg_11(case: Case) -> List[nn.Module]:
    """With 512 units in the linear layers, not 4,096, as the images are small."""
    layers: List[nn.Module] = []
    channels = 3
    for next_channels in VGG_11:
        if next_channels:
            layers += [*convolution(channels, next_channels, 3), nn.ReLU()]
            channels = next_channels
        else:
            layers += [nn.MaxPool2d(2)]
    width = channels * (case.image // 32) ** 2
    layers += [nn.Flatten(), nn.Linear(width, 512), nn.ReLU()]
    return [*layers, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)]


NETWORKS: Dict[str, Callable[[Case], List[nn.Module]]] = {
    "MLP": mlp,
    "CNN": cnn,
    "RNN": recurrent(nn.RNN),
    "LSTM": recurrent(nn.LSTM),
    "Transformer": transformer,
    "ResNet-18": resnet_18,
    "VGG-11": vgg_11,
}


def inputs(case: Case) -> torch.Tensor:
    """Images, their rows, or tokens."""
    if case.architecture == "Transformer":
        return torch.randint(VOCABULARY, (case.batch, LENGTH))
    if case.architecture in ("RNN", "LSTM"):
        return torch.rand(case.batch, case.image, case.image)
    channels = 1 if case.architecture in ("MLP", "CNN") else 3
    return torch.rand(case.batch, channels, case.image, case.image)


def model_and_data(case: Case) -> Tuple[nn.Module, TensorDataset]:
    """
    The same for the same case. ``step_time.py``'s loss takes logits [B, tokens,
    classes] and one target a token.
    """
    torch.manual_seed(0)
    layers = NETWORKS[case.architecture](case)
    model = nn.Sequential(*layers, nn.Unflatten(1, (1, CLASSES)))
    with torch.no_grad():
        model(inputs(case._replace(batch=8)))  # the statistics of Frozen
    for layer in model.modules():
        if isinstance(layer, Frozen):
            layer.frozen = True
    targets = torch.randint(CLASSES, (case.batch, 1))
    return model.train(), TensorDataset(inputs(case), targets)
