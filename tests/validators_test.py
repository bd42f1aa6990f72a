"""Norms that ModuleValidator finds and replaces beside Opacus's own types."""

import textwrap

import pytest
import torch
from opacus.validators import ModuleValidator, register_module_fixer
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from opacus_ext.refused import Refused
from tests.common import check, make_private, square_loss


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's; its own trainable part stays."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = nn.Identity(), nn.PReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Written(nn.BatchNorm2d):
    """Does more than can be told."""

    def forward(self, x):
        return nn.functional.silu(super().forward(x))


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
    (BatchNormAct2d, {}, FIX),
    (Own, {}, FIX),
    (nn.BatchNorm2d, {}, FIX),
    # Opacus looks among layers with parameters only.
    (BatchNormAct2d, dict(affine=False), FIX),
    (nn.BatchNorm2d, dict(affine=False), FIX),
    (nn.InstanceNorm2d, dict(affine=True, **TRACKS), "keeps running"),
    (nn.InstanceNorm2d, TRACKS, "keeps running"),
    (Tracking, TRACKS, "keeps running"),
]


@pytest.mark.parametrize("norm, given, words", NORMS)
def test_found_and_replaced(norm, given, words):
    model = images(norm(4, **given))
    with pytest.raises(UnsupportedModuleError, match=rf"\(1\) .*{words}"):
        make_private(model, "ghost_bk", batch_size=3)
    fixed = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(fixed) and not list(fixed.buffers())
    assert list(model.buffers())  # the user's own stays
    check("ghost_bk", True, fixed, X, square_loss)


def test_what_it_makes():
    """GroupNorm of gcd(32, C) groups, then what timm's layer does; by its arguments."""
    model = images(BatchNormAct2d(4))
    model[1].eval()
    norm, drop, act = ModuleValidator.fix(model)[1]
    assert str(norm).startswith("GroupNorm(4, 4") and norm.weight.dtype is X.dtype
    assert isinstance(act, nn.PReLU) and not norm.training
    assert ModuleValidator.fix(Own(4).to("meta")).weight.is_meta
    assert type(ModuleValidator.fix(nn.SyncBatchNorm(4))) is nn.GroupNorm
    assert ModuleValidator.fix(Own(4), num_groups=2).num_groups == 2
    fixed = ModuleValidator.fix(Own(4), replace_bn_with_in=True)
    assert type(fixed) is nn.InstanceNorm2d
    with pytest.raises(ValueError, match="mutually exclusive"):
        ModuleValidator.fix(model, num_groups=2, replace_bn_with_in=True)


@pytest.mark.parametrize("kind", [BatchNormAct2d, nn.BatchNorm2d])
def test_shared_layers_stay_shared(kind):
    norm = kind(4)
    fixed = ModuleValidator.fix(nn.Sequential(norm, nn.Sequential(norm)))
    assert fixed[0] is fixed[1][0] is not norm
    assert not ModuleValidator.validate(fixed)


def test_what_can_not_be_replaced():
    """It is refused by name; in evaluation mode it trains with its statistics."""
    model = nn.Sequential(images(Written(4)), nn.LazyBatchNorm1d(), nn.Dropout())
    model = ModuleValidator.fix(model)
    errors = [str(error) for error in ModuleValidator.validate(model)]
    names = [("Written (0.1)", "register_module_fixer"), ("LazyBatchNorm1d (1)", "Run")]
    for error, (name, words) in zip(errors, names):
        assert error.startswith(name) and words in error
    with pytest.raises(UnsupportedModuleError, match="Written.*0.1"):
        make_private(model[:1], "ghost_bk", batch_size=3)
    model[0][1].eval()
    nn.init.uniform_(model[0][1].running_var)
    assert not ModuleValidator.validate(model[0])
    check("ghost_bk", True, model[0], X, square_loss)
    assert "model.train()" in str(ModuleValidator.validate(model.eval())[0])


@pytest.mark.parametrize("root", [True, False])
def test_the_fixer_of_an_error_works_when_pasted(monkeypatch, root):
    monkeypatch.setattr(ModuleValidator, "FIXERS", {**ModuleValidator.FIXERS})
    model = Written(4) if root else images(Written(4)).float()
    with pytest.raises(UnsupportedModuleError) as told:
        ModuleValidator.validate(model, strict=True)
    before, *lines, after = str(told.value).split("\n\n")
    assert "Written" in before and "eval()" in after
    names = {"model": model}
    exec(textwrap.dedent("\n\n".join(lines)), names)
    assert not ModuleValidator.validate(names["model"])
    norms = [x for x in names["model"].modules() if isinstance(x, nn.GroupNorm)]
    assert len(norms) == 1
    if not root:
        check("ghost_bk", True, names["model"].double(), X, square_loss)


@pytest.mark.parametrize("norm", [Written, nn.BatchNorm2d])
@pytest.mark.parametrize("size", [1, 3])
def test_frozen_stays(norm, size):
    """And is refused for what it keeps of the data."""
    model = images(norm(4))
    model[1].requires_grad_(False)
    assert type(ModuleValidator.fix(model)[1]) is norm
    private = make_private(model, "ghost_bk", batch_size=size)
    with pytest.raises(Refused, match=r"changes 1\.running_mean") as told:
        private.step(torch.randn(size, 2, 5, 5).double(), square_loss)
    *_, line = told.value.remedy.partition("example: ")  # it runs when pasted
    exec(line, {"model": model, "torch": torch, "Written": Written})
    assert not model[1].training and all(
        x.training for x in (model, model[0], model[3])
    )
    private.step(torch.randn(size, 2, 5, 5).double(), square_loss)


def test_one_line_for_all_layers_of_a_class():
    layers = [nn.BatchNorm2d(4) for _ in range(20)]
    model = nn.Sequential(*layers, nn.InstanceNorm2d(4, **TRACKS), Written(4))
    with pytest.raises(UnsupportedModuleError) as told:
        ModuleValidator.validate(model, strict=True)
    lines = str(told.value).splitlines()[:3]
    kinds = [line.split(" normalizes")[0].split(" keeps")[0] for line in lines]
    assert kinds == [
        "BatchNorm2d (0 and 19 more)",
        "InstanceNorm2d (20)",
        "Written (21)",
    ]
    assert all(len(line) < 300 for line in lines)


def test_what_a_user_registers_counts(monkeypatch):
    def register(kind, fixer):
        monkeypatch.setitem(ModuleValidator.FIXERS, kind, fixer)

    register_module_fixer(Own)(lambda layer, **kwargs: nn.Identity())
    own = Own(4)
    fixed = ModuleValidator.fix(nn.Sequential(own, own))  # each of its names
    assert [type(layer) for layer in fixed] == [nn.Identity] * 2
    del ModuleValidator.FIXERS[Own]
    register(Own, lambda layer, **kwargs: nn.Sequential(layer.norm))
    own.norm, own.scale = nn.BatchNorm1d(4), nn.Parameter(torch.ones(()))
    (child,) = ModuleValidator.fix(own)
    assert type(child) is nn.GroupNorm
    register(nn.BatchNorm2d, lambda layer, **kwargs: nn.GroupNorm(1, 4))
    assert ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(4)))[0].num_groups == 1
