"""Norms that ModuleValidator finds and replaces beside Opacus's own types."""

import copy
import io

import pytest
import torch
from opacus.validators import ModuleValidator, batch_norm, register_module_fixer
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.nn import functional as F

from opacus_ext.refused import Refused
from tests.common import check, make_private, square_loss


class WithAct(nn.BatchNorm2d):
    """Calls its base; its own trainable part and dropout stay."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.act = nn.PReLU()

    def forward(self, x, gain=1.0):
        return gain * self.act(super().forward(x))


class Written(nn.BatchNorm2d):
    """Calls F.batch_norm itself, as timm's BatchNormAct2d does."""

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.1,
            self.eps,
        )
        return F.silu(y, inplace=True)


class Columns(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.mT).mT


class ByHand(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean(0)) * self.weight[:, None, None]


class Tracking(nn.InstanceNorm2d):
    pass


class Own(nn.BatchNorm2d):
    pass


X = torch.randn(3, 2, 5, 5).double()


def images(norm):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), norm, nn.Flatten(), nn.Linear(36, 2)
    ).double()


FIX, TRACKS = "ModuleValidator.fix", dict(track_running_stats=True)
NORMS = [
    (WithAct, {}, FIX),
    (Written, {}, FIX),
    (nn.BatchNorm2d, {}, FIX),
    # Opacus looks among layers with parameters only.
    (Written, dict(affine=False), FIX),
    (nn.BatchNorm2d, dict(affine=False), FIX),
    (nn.InstanceNorm2d, dict(affine=True, **TRACKS), "keeps running"),
    (nn.InstanceNorm2d, TRACKS, "keeps running"),
    (Tracking, TRACKS, "keeps running"),
]


@pytest.mark.parametrize("norm, given, words", NORMS)
def test_found_and_replaced(norm, given, words):
    model = images(norm(4, **given))
    with pytest.raises(UnsupportedModuleError, match=rf"1 \(\w+\).*{words}"):
        make_private(model, "ghost_bk", batch_size=3)
    model = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(model) and not list(model.buffers())
    check("ghost_bk", True, model, X, square_loss)


def test_what_it_computes():
    """GroupNorm of gcd(32, C) groups, then what the subclass does."""
    layer = WithAct(6)
    torch.nn.init.normal_(layer.weight)
    fixed = ModuleValidator.fix(layer)
    x = torch.randn(3, 6, 2, 2)
    expected = 2.0 * layer.act(F.group_norm(x, 2))
    assert torch.allclose(fixed(x, gain=2.0), expected, atol=1e-6)
    assert torch.equal(fixed.eval()(x, gain=2.0), fixed.train()(x, gain=2.0))
    assert [name for name, _ in fixed.named_parameters()] == [
        "norm.weight",
        "norm.bias",
        "layer.act.weight",
    ]
    assert not list(fixed.buffers())
    assert isinstance(layer.running_mean, torch.Tensor)  # the user's own stays


def test_arguments_of_fix():
    fixed = ModuleValidator.fix(images(Written(4)), num_groups=2)
    assert fixed[1].norm.num_groups == 2
    fixed = ModuleValidator.fix(images(Columns(4)), replace_bn_with_in=True)
    assert type(fixed[1].norm) is nn.InstanceNorm1d
    with pytest.raises(ValueError, match="mutually exclusive"):
        ModuleValidator.fix(images(Written(4)), num_groups=2, replace_bn_with_in=True)


def test_of_other_shapes():
    model = nn.Sequential(Columns(4), nn.Flatten(), nn.Linear(12, 2)).double()
    model = ModuleValidator.fix(model)
    check("ghost_bk", True, model, torch.randn(3, 3, 4).double(), square_loss)


def test_device_type_and_mode_stay():
    model = images(Written(4))
    model[1].eval()
    fixed = ModuleValidator.fix(model)
    assert fixed[1].norm.weight.dtype == torch.float64
    assert not fixed[1].layer.training and fixed.training
    assert ModuleValidator.fix(Written(4).to("meta")).norm.weight.is_meta


def test_shared_layers_stay_shared():
    for kind in (WithAct, nn.BatchNorm2d):
        norm = kind(4)
        model = nn.Sequential(norm, nn.Sequential(norm))
        fixed = ModuleValidator.fix(model)
        assert fixed[0] is fixed[1][0] is not norm
        assert not ModuleValidator.validate(fixed)


def test_inner_and_outer():
    """A subclass within another, and one that is the model."""
    outer = WithAct(4)
    outer.act = Written(4)
    fixed = ModuleValidator.fix(outer)
    x = torch.randn(2, 4, 3, 3)
    once = F.group_norm(x, 4)
    assert torch.allclose(fixed(x), F.silu(F.group_norm(once, 4)))
    again = ModuleValidator.fix(fixed)
    assert str(again) == str(fixed)


def test_copied_saved_and_compiled():
    fixed = ModuleValidator.fix(images(WithAct(4)))
    file = io.BytesIO()
    torch.save(fixed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(fixed), loaded):
        assert torch.equal(other(X), fixed(X))
    compiled = torch.compile(fixed, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(X), fixed(X))


def test_errors_name_the_layer_and_what_to_do():
    model = nn.Sequential(images(Written(4)), nn.BatchNorm1d(2), nn.Dropout())
    first, second = ModuleValidator.validate(model)
    for error, name in ((first, "0.1 (Written)"), (second, "1 (BatchNorm1d)")):
        assert str(error).startswith(name) and "ModuleValidator.fix" in str(error)
    with pytest.raises(UnsupportedModuleError, match="0.1.*Written"):
        make_private(model, "ghost_bk", batch_size=3)
    model.eval()
    assert "training mode" in str(ModuleValidator.validate(model)[0])


def test_what_can_not_be_replaced():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    (error,) = ModuleValidator.validate(ModuleValidator.fix(model))
    assert str(error).startswith("0 (LazyBatchNorm2d) does not know")
    assert type(ModuleValidator.fix(nn.SyncBatchNorm(4))) is nn.GroupNorm
    model = ModuleValidator.fix(images(ByHand(4)))
    with pytest.raises(Refused, match="ByHand.*0 times"):
        model(X)


def test_in_evaluation_mode_it_trains_as_it_is():
    """With the statistics that it has, a sample does not see the others."""
    model = images(Written(4))
    model[1].eval()
    torch.nn.init.uniform_(model[1].running_var)
    assert not ModuleValidator.validate(model)
    check("ghost_bk", True, model, X, square_loss)


@pytest.mark.parametrize("norm", [Written, nn.BatchNorm2d])
@pytest.mark.parametrize("size", [1, 3])
def test_frozen_stays(norm, size):
    """And is refused for what it keeps of the data."""
    model = images(norm(4))
    model[1].requires_grad_(False)
    assert type(ModuleValidator.fix(model)[1]) is norm
    private = make_private(model, "ghost_bk", batch_size=size)
    with pytest.raises(Refused, match=r"changes 1\.running_mean"):
        private.step(torch.randn(size, 2, 5, 5).double(), square_loss)


def test_what_a_user_registers_counts():
    register_module_fixer(Own)(lambda layer, **kwargs: nn.Identity())
    own = Own(4)
    fixed = ModuleValidator.fix(nn.Sequential(own, own))  # each of its names
    assert [type(layer) for layer in fixed] == [nn.Identity] * 2
    ModuleValidator.FIXERS[Own] = lambda layer, **kwargs: nn.Sequential(layer.norm)
    block = Own(4)
    block.norm, block.scale = nn.BatchNorm1d(4), nn.Parameter(torch.ones(()))
    (child,) = ModuleValidator.fix(block)
    assert type(child) is nn.GroupNorm
    register_module_fixer(nn.BatchNorm2d)(lambda layer, **kw: nn.GroupNorm(1, 4))
    try:
        fixed = ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(4), Written(4)))
    finally:
        del ModuleValidator.FIXERS[Own]
        ModuleValidator.FIXERS[nn.BatchNorm2d] = batch_norm.fix
    assert fixed[0].num_groups == 1 and fixed[1].norm.num_groups == 1
