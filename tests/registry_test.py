"""Registering and its undoing: after ``unregister`` Opacus is as it was shipped."""

import json
import subprocess
import sys

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext.grad_sample import samplers
from opacus_ext.grad_sample.rules.registry import TABLE
from tests.common import check, every_mode, square_loss

# Everything in Opacus that could be changed: functions and methods of its modules, and
# the samplers by layer.
_STATE = """
import importlib, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import opacus
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping

def state():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name != "opacus" and not name.startswith("opacus."):
            continue
        for key, value in vars(module).items():
            if key.startswith("__"):
                continue
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__.startswith("opacus."):
                for attribute, member in vars(value).items():
                    if not attribute.startswith("__"):
                        found[f"{name}.{key}.{attribute}"] = id(member)
    for owner in (GradSampleHooks, GradSampleHooksFastGradientClipping):
        for table in ("GRAD_SAMPLERS", "NORM_SAMPLERS"):
            for layer, sampler in getattr(owner, table, {}).items():
                key = f"{layer.__module__}.{layer.__name__}"
                found[f"{owner.__name__}.{table}.{key}"] = id(sampler)
    return found
"""


def _python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


def test_unregister_restores_opacus_and_register_comes_back():
    changed = json.loads(_python(_STATE + """
import opacus.privacy_engine, opacus.utils.fast_gradient_clipping_utils
import opacus.utils.batch_memory_manager, opacus.validators, opacus.accountants
before = state()
import opacus_ext
during = state()
opacus_ext.register()
again = state()
opacus_ext.unregister()
opacus_ext.unregister()
after = state()
opacus_ext.register()
samplers = lambda s: sorted(k for k in s if "SAMPLERS" in k)
print(json.dumps({
    "during": [k for k in before if during.get(k) != before[k]],
    "idempotent": during == again,
    "after": [k for k in before if after.get(k) != before[k]],
    "left": [k for k in after if k not in before and "SAMPLERS" in k],
    "comes back": samplers(state()) == samplers(during),
}))
"""))
    assert changed["during"], "importing changes nothing: this test sees nothing"
    assert changed["after"] == []
    assert changed["left"] == []
    assert changed["idempotent"] and changed["comes back"]


def test_import_is_light_and_leaves_settings_alone():
    """transformers takes seconds to import; most users of this package have no need."""
    found = json.loads(_python("""
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, opacus
torch.set_num_threads(2)
torch.manual_seed(3)

def settings():
    return [
        torch.get_rng_state().tolist(), torch.get_num_threads(),
        str(torch.get_default_dtype()), torch.is_grad_enabled(),
    ]

before = settings()
import opacus_ext
heavy = "transformers", "lightning", "matplotlib", "prv_accountant"
print(json.dumps([before == settings(), [m for m in heavy if m in sys.modules]]))
"""))
    assert found == [True, []]


@pytest.fixture
def unregistered():
    opacus_ext.unregister()
    yield
    opacus_ext.register()


def _make_private(mode, **kwargs):
    model = nn.Linear(3, 2)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(4, 3))),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **kwargs,
    )


@pytest.mark.parametrize("wrap", [True, False])
def test_unregistered(unregistered, wrap):
    """The mode and the clipping functions are unknown, and the stock modes stock."""
    with pytest.raises(ValueError, match="ghost_bk"):
        _make_private("ghost_bk", wrap_model=wrap)
    with pytest.raises(ValueError, match="automatic"):
        _make_private("hooks", clipping="automatic", wrap_model=wrap)
    handle, optimizer, _ = _make_private("hooks", wrap_model=wrap)
    assert type(handle) is (GradSampleModule if wrap else GradSampleHooks)


def test_samplers_of_other_packages_survive():
    """What someone else registers in between is not thrown away."""

    class Theirs(nn.Linear):
        pass

    def sampler(layer, activations, backprops):
        raise NotImplementedError

    tables = (
        GradSampleHooks.GRAD_SAMPLERS,
        GradSampleHooksFastGradientClipping.GRAD_SAMPLERS,
    )
    try:
        for table in tables:
            table[Theirs] = sampler
        opacus_ext.unregister()
        assert all(table[Theirs] is sampler for table in tables)
        opacus_ext.register()
        assert all(table[Theirs] is sampler for table in tables)
    finally:
        opacus_ext.register()
        for table in tables:
            table.pop(Theirs, None)


@every_mode
def test_registered_again(mode):
    opacus_ext.unregister()
    opacus_ext.register()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    check(mode, True, model, torch.randn(4, 2, 3).double(), square_loss)


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_modes_of_opacus_still_work(mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    check(mode, True, model, torch.randn(4, 3).double(), square_loss)


# -- rules that are registered after the import ----------------------------------------


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.weight * x


class Wider(Scale):
    """Keeps the ``forward``, so that it has the rule too."""


class Other(Scale):
    def forward(self, x):
        return self.weight**2 * x


NAME = f"{__name__}.Scale"
TABLES = {
    "grad": GradSampleHooks.GRAD_SAMPLERS,
    "norm": GradSampleHooksFastGradientClipping.NORM_SAMPLERS,
}


@pytest.fixture(params=[Scale, NAME], ids=["type", "name"])
def late_rule(request):
    """A rule by type or by name; how often it was asked is noted."""
    asked = []

    @opacus_ext.register_rule(request.param)
    def scale(layer, activations, backprops):
        asked.append(1)
        return {layer.weight: (backprops * activations,)}

    yield asked
    opacus_ext.unregister()
    del TABLE.rules[request.param]
    opacus_ext.register()


def scales():
    return nn.Sequential(nn.Linear(3, 3), Scale(3), nn.Tanh(), Wider(3)).double()


@every_mode
def test_late_rule_is_found_by_every_mode(mode, late_rule):
    check(mode, True, scales(), torch.randn(4, 3).double(), square_loss)
    assert late_rule or mode == "scan"  # which lets autograd compute each sample


@pytest.mark.parametrize(
    "stock", [GradSampleModule, GradSampleModuleFastGradientClipping]
)
def test_late_rule_reaches_the_tables_of_opacus(stock, late_rule):
    model, x = scales(), torch.randn(4, 3).double()
    other = nn.Sequential(Other(3)).double()
    stock(model, loss_reduction="sum")
    model(x).square().sum().backward()
    assert late_rule
    for kind in (Scale, Wider):
        for table in TABLES.values():
            assert table[kind].__module__ == samplers.__name__
    stock(other, loss_reduction="sum")
    assert all(Other not in table for table in TABLES.values())
    for b in range(4):
        alone = scales()
        alone.load_state_dict(model.state_dict())
        alone(x[b : b + 1]).square().sum().backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            if stock is GradSampleModule:
                torch.testing.assert_close(p.grad_sample[b], q.grad)
            else:
                torch.testing.assert_close(p._norm_sample[b], q.grad.norm())


def test_late_rule_leaves_with_unregister(late_rule):
    GradSampleModule(scales())
    opacus_ext.unregister()
    for table in TABLES.values():
        assert Scale not in table and Wider not in table
    opacus_ext.register()
    GradSampleModule(scales())
    assert TABLES["grad"][Scale] is samplers.grad_sampler


def test_late_rule_goes_before_a_sampler_of_opacus(late_rule):
    """As the order of the table says; with ``unregister`` the sampler is back."""

    def sampler(layer, activations, backprops):
        raise AssertionError("the rule is first")

    TABLES["grad"][Scale] = sampler
    try:
        opacus_ext.register_rule(Scale)(TABLE.rule_of(Scale(3)).fn)
        check("hooks", True, scales(), torch.randn(4, 3).double(), square_loss)
        assert TABLES["grad"][Scale] is not sampler
        opacus_ext.unregister()
        assert TABLES["grad"][Scale] is sampler
    finally:
        if NAME in TABLE.rules:
            TABLE.rules.pop(Scale)
        TABLES["grad"].pop(Scale, None)
        opacus_ext.register()


def test_rules_are_asked_in_the_order_of_the_table():
    """A stand-in, a rule, a sampler of Opacus, a substitute; then functions."""
    layer, rule = Scale(3), lambda layer, activations, backprops: {}
    found = []

    def order():
        forward, of_layer = TABLE.forward_of(layer), TABLE.rule_of(layer)
        return forward, of_layer, TABLE.substitute_of(layer)

    @opacus_ext.register_forward(Scale)
    def stand_in(layer, record, x):
        found.append("forward")
        w = layer.weight
        return record(w * x, x, [w], lambda x, g: {w: (g * x,)})

    opacus_ext.register_rule(Scale)(rule)
    try:
        assert order() == (stand_in, TABLE.rules[Scale], None)
        model = nn.Sequential(Scale(3)).double()
        check("ghost_bk", True, model, torch.randn(4, 3).double(), square_loss)
        assert found  # and the rule, which gives nothing, was not asked
        layer.forward = lambda x: x
        assert order() == (None, None, None)
    finally:
        opacus_ext.unregister()
        del TABLE.forwards[Scale], TABLE.rules[Scale]
        opacus_ext.register()
