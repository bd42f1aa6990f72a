"""Registering and its undoing: after ``unregister`` Opacus is as it was shipped."""

import copy
import cProfile
import gc
import inspect
import json
import pickle
import pstats
import subprocess
import sys
import warnings
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    register_grad_sampler,
)
from opacus.grad_sample.utils import register_norm_sampler
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext.grad_sample.modes.ghost import ClippedCriterion
from opacus_ext.grad_sample.rules.registry import RULES
from opacus_ext.registry import MODES
from opacus_ext.runs import runs_of
from tests.common import check, layer_modes, make_private, square_loss

# Everything in Opacus that could be changed: functions and methods of its modules, and
# the entries of its tables.
_STATE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import opacus

def state():
    found, tables = {}, {}
    for name, module in sorted(sys.modules.items()):
        if name != "opacus" and not name.startswith("opacus."):
            continue
        for key, value in vars(module).items():
            if key.startswith("__"):
                continue
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, member in vars(value).items():
                    if attribute not in ("__dict__", "__weakref__", "__doc__"):
                        found[f"{name}.{key}.{attribute}"] = id(member)
                    tables[f"{name}.{key}.{attribute}"] = member
            tables[f"{name}.{key}"] = value
    for name, table in tables.items():
        if isinstance(table, dict):
            found.update({f"{name}[{key}]": id(x) for key, x in table.items()})
    return found
"""


_IMPORT = """
import opacus.privacy_engine, opacus.utils.fast_gradient_clipping_utils
import opacus.utils.batch_memory_manager, opacus.validators, opacus.accountants
import opacus.utils.adaptive_clipping
import torch
torch.set_num_threads(2)
torch.manual_seed(3)

def settings():
    return [
        torch.get_rng_state().tolist(), torch.get_num_threads(),
        str(torch.get_default_dtype()), torch.is_grad_enabled(),
    ]

before, set_before = state(), settings()
import opacus_ext
heavy = "transformers", "lightning", "matplotlib", "prv_accountant"
heavy = [name for name in heavy if name in sys.modules]
same_settings = set_before == settings()
during = state()
opacus_ext.register()
again = state()
opacus_ext.unregister()
opacus_ext.unregister()
after = state()
opacus_ext.register()
print(json.dumps({
    "heavy": heavy,
    "same settings": same_settings,
    "during": sorted(k for k in during if during[k] != before.get(k)),
    "idempotent": during == again,
    "after": sorted(k for k in {*before, *after} if after.get(k) != before.get(k)),
    "comes back": state().keys() == during.keys(),
}))
"""

_ENGINE = "opacus.privacy_engine.PrivacyEngine."
NAMES = "gdp", "prv", "prv_bounds"
REPLACED = [
    *(f"opacus.accountants.registry._ACCOUNTANTS[{name}]" for name in NAMES),
    _ENGINE + "__init__",
    _ENGINE + "__repr__",
    _ENGINE + "_prepare_criterion",
    _ENGINE + "_prepare_data_loader",
    _ENGINE + "_prepare_model",
    _ENGINE + "_prepare_optimizer",
    _ENGINE + "get_epsilon",
    _ENGINE + "load_checkpoint",
    _ENGINE + "make_private",
    _ENGINE + "make_private_with_epsilon",
    _ENGINE + "privacy_statement",
    _ENGINE + "save_checkpoint",
    "opacus.utils.batch_memory_manager.BatchSplittingSampler",
    "opacus.validators.module_validator.ModuleValidator.fix",
    "opacus.validators.module_validator.ModuleValidator.validate",
]


def test_import_and_unregister():
    """
    The import is light (transformers takes seconds) and leaves settings alone;
    unregister restores Opacus, and register comes back.
    """
    command = [sys.executable, "-c", _STATE + _IMPORT]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["heavy"] == [] and found["same settings"]
    assert found["during"] == REPLACED
    assert found["after"] == []
    assert found["idempotent"] and found["comes back"]


@pytest.fixture
def unregistered():
    opacus_ext.unregister()
    yield
    opacus_ext.register()


def _make_private(mode, **kwargs):
    return _of(nn.Linear(3, 2), mode, **kwargs)


def _of(model, mode, engine=None, **kwargs):
    return (engine or PrivacyEngine()).make_private(
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
    # Not "automatic", which Opacus has with upstream/03-clipping-functions.patch.
    with pytest.raises(ValueError, match="normalized"):
        _make_private("hooks", clipping="normalized", wrap_model=wrap)
    handle, optimizer, _ = _make_private("hooks", wrap_model=wrap)
    assert type(handle) is (GradSampleModule if wrap else GradSampleHooks)


@layer_modes
def test_registered_again(mode):
    opacus_ext.unregister()
    opacus_ext.register()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    check(mode, True, model, torch.randn(4, 2, 3).double(), square_loss)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["functorch", "ew", "ghost_fsdp"])
def test_modes_of_opacus_that_are_ours(mode, wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    check(mode, wrap, model, torch.randn(4, 3).double(), square_loss)


# -- rules that are registered after the import ----------------------------------------


@opacus_ext.as_op
def scale(x, weight):
    return weight * x


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return scale(x, self.weight)


def scales():
    return nn.Sequential(nn.Linear(3, 3), Scale(3), nn.Tanh(), Scale(3)).double()


def of_scale(x, weight):
    return opacus_ext.Op((weight,), (x,), lambda backprops, x: [(backprops * x,)])


def of_scale_of_all(x, weight):
    return of_scale(x, weight)._replace(run_all=lambda params, x: x * params[0])


def of_made(x, weight):
    """What the factors are of is no argument: the rule does not apply."""
    return of_scale(x, 1 * weight)


@layer_modes
@pytest.mark.parametrize("rule", [of_scale, of_scale_of_all, of_made])
def test_late_rule_is_found_by_every_mode(mode, rule):
    """Without the rule the op is exact as well."""
    asked = []
    check(mode, True, scales(), torch.randn(4, 3).double(), square_loss)
    noted = lambda *args: asked.append(1) or rule(*args)  # noqa: E731
    opacus_ext.register_rule(scale)(noted)
    try:
        check(mode, True, scales(), torch.randn(4, 3).double(), square_loss)
        assert asked
    finally:
        del RULES[scale]


@opacus_ext.as_op
def power(x, weight, exponent):
    return weight * (x * exponent if type(exponent) is bool else x + exponent)


def of_power(x, weight, exponent, *lists):
    def factors(exponent, lists, backprops, x):
        return [(backprops * (x * exponent if type(exponent) is bool else x + 1),)]

    given = partial(FACTORS.setdefault(0, factors), exponent, *lists)
    return opacus_ext.Op((weight,), (x,), given)


FACTORS = {}


@pytest.mark.parametrize("arguments", [(), [1]])
def test_factors_of_equal_arguments_of_other_types(arguments):
    """1 and True are equal, and a list has no hash."""

    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.rand(3)) for _ in range(2))

        def forward(self, x):
            return power(x, self.one, True) + power(x, self.other, 1)

    opacus_ext.register_rule(power)(
        lambda x, w, exponent: of_power(x, w, exponent, arguments)
    )
    try:
        x = torch.randn(4, 3).double()
        check("ghost_bk", True, Powers().double(), x, square_loss)
    finally:
        del RULES[power]


# By name: a layer, and the most calls of Python that a private forward, and a private
# step, may add to those of a plain forward.
CALLS = {
    "op without a parameter": (lambda: nn.Softplus(), 2, 2),
    "dropout": (lambda: nn.Dropout(0.1), 34, 34),
    "linear": (lambda: nn.Linear(3, 3), 42, 105),
    "norm": (lambda: nn.LayerNorm(3), 66, 132),
}


@pytest.fixture
def no_garbage():
    """No collection of garbage, at which hypothesis has a function called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_layer(name, no_garbage):
    """What a layer costs in eager code, told by that of ten more of them."""
    build, most_of_forward, most_of_step = CALLS[name]

    def counted(function, *args):
        profile = cProfile.Profile()
        result = profile.runcall(function, *args)
        return pstats.Stats(profile).total_calls, result

    def calls(count, private):
        model = nn.Sequential(nn.Linear(3, 3), *(build() for _ in range(count)))
        x = torch.randn(4, 3)
        if not private:
            forward = min(counted(model, x)[0] for _ in range(4))
            return forward, forward
        given = dict(batch_size=4, criterion=nn.MSELoss())
        parts = make_private(model, "ghost_bk", **given)
        turns = []
        # What is decided for these sizes is decided in the first turn.
        for _ in range(4):
            parts.optimizer.zero_grad()
            forward, y = counted(parts.module, x)
            loss = parts.criterion(y, torch.randn(4, 3))
            backward, _ = counted(loss.backward)
            step, _ = counted(parts.optimizer.step)
            turns.append((forward, forward + backward + step))
        return min(turns)[0], min(total for _, total in turns)

    more = [calls(20, private) for private in (False, True)]
    less = [calls(10, private) for private in (False, True)]
    plain, of_forward = (more[i][0] - less[i][0] for i in (0, 1))
    of_step = more[1][1] - less[1][1]
    assert of_forward - plain <= 10 * most_of_forward
    assert of_step - plain <= 10 * most_of_step, (of_step - plain) / 10


class _Own(nn.Linear):
    pass


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "functorch"])
@pytest.mark.parametrize("layer", [nn.Linear, _Own])
@pytest.mark.parametrize("register", [register_grad_sampler, register_norm_sampler])
def test_samplers_of_users_are_told_of(mode, layer, register, monkeypatch):
    """They are not used, also where this package has one; it is told once an engine."""

    for table in (
        GradSampleHooks.GRAD_SAMPLERS,
        GradSampleHooksFastGradientClipping.NORM_SAMPLERS,
    ):
        monkeypatch.setitem(table, layer, table.get(layer))
        if table[layer] is None:
            monkeypatch.delitem(table, layer)

    @register(layer)
    def sampler(layer, activations, backprops):
        raise AssertionError("it is used")

    engine, said = PrivacyEngine(), []
    for _ in range(2):
        model = nn.Sequential(nn.Tanh(), layer(3, 2)).double()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _of(model, mode, engine=engine)
        said += [str(w.message) for w in caught if "sampler" in str(w.message)]
    told = mode != "functorch"
    told = told and not (mode == "hooks" and register is register_norm_sampler)
    assert len(said) == told
    if told:
        assert f"1 ({layer.__name__})" in said[0] and "It is not used" in said[0]
    model = nn.Sequential(nn.Tanh(), layer(3, 2)).double()
    check(mode, True, model, torch.randn(4, 3).double(), square_loss)


def test_no_samplers_of_users(recwarn):
    for mode in MODES:
        _make_private(mode)
    assert not [w for w in recwarn if "sampler was registered" in str(w.message)]


# -- the engine ------------------------------------------------------------------------

ADDED = {
    "sampling",
    "noise",
    "take",
    "shared",
    "on_nonfinite",
    "expected_batch_size",
    "public_records",
}


def test_signature():
    """All arguments of Opacus's with its defaults, and those that are added."""
    own, stock = (
        {p.name: repr(p.default) for p in inspect.signature(make).parameters.values()}
        for make in (
            opacus_ext.PrivacyEngine.make_private,
            PrivacyEngine.make_private,
        )
    )
    assert set(own) - set(stock) - {"rand_on_empty"} == ADDED
    assert stock.items() <= own.items()
    text = opacus_ext.PrivacyEngine.make_private.__doc__
    assert all(f"{argument}:" in text for argument in ADDED)


@pytest.mark.parametrize("engine", [PrivacyEngine, opacus_ext.PrivacyEngine])
def test_added_arguments_with_epsilon(engine):
    """Both engines take them."""
    model = nn.Linear(3, 2)
    made = engine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(80, 3)), batch_size=4),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        grad_sample_mode="auto",
        on_nonfinite="raise",
        shared=("input",),
        rand_on_empty=True,
    )
    assert len(made) == 4 and made[1].on_nonfinite == "raise"
    assert set(made[0].private.inputs.shared) == {"input"}


class Of(PrivacyEngine):
    """A user's engine, with methods of its own before ours and Opacus's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.called = []

    def make_private(self, **kwargs):
        self.called.append("make_private")
        return super().make_private(**kwargs)

    def _prepare_model(self, module, *, wrap_model=True, **kwargs):
        self.called.append("model")
        return super()._prepare_model(module, wrap_model=wrap_model, **kwargs)

    def _prepare_optimizer(self, *, optimizer, **kwargs):
        made = super()._prepare_optimizer(optimizer=optimizer, **kwargs)
        self.called.append(made)
        return made

    def get_epsilon(self, delta):
        return 1 + super().get_epsilon(delta)


class OfOurs(Of, opacus_ext.PrivacyEngine):
    pass


class ByName(Of):
    """It calls Opacus's methods by name, not by super()."""

    def make_private(self, **kwargs):
        self.called.append("make_private")
        return PrivacyEngine.make_private(self, **kwargs)

    def get_epsilon(self, delta):
        return 1 + PrivacyEngine.get_epsilon(self, delta)

    def _prepare_model(self, module, **kwargs):
        self.called.append("model")
        return PrivacyEngine._prepare_model(self, module, **kwargs)

    def _prepare_optimizer(self, **kwargs):
        self.called.append(PrivacyEngine._prepare_optimizer(self, **kwargs))
        return self.called[-1]

    def _prepare_criterion(self, **kwargs):
        return PrivacyEngine._prepare_criterion(self, **kwargs)


class Strange(Of):
    """It asks for its own class, and has attributes and arguments of its own."""

    __slots__ = ("slot",)

    def __init_subclass__(cls, *, word):
        raise AssertionError("nobody makes a subclass")

    def __init__(self, **kwargs):
        self.slot = self._count = self._begin = self._sampling = 0
        super().__init__(**kwargs)

    def __del__(self):
        self.called.append("deleted")

    def make_private(self, **kwargs):
        return super().make_private(tag="mine", **kwargs)

    def _prepare_criterion(self, *, tag, **kwargs):
        assert type(self) is Strange and self.slot == 0 and tag == "mine"
        return super()._prepare_criterion(**kwargs)

    def _prepare_optimizer(self, *, tag, **kwargs):
        return super()._prepare_optimizer(**kwargs)


@pytest.mark.parametrize("kind", [Of, OfOurs, ByName, Strange])
@pytest.mark.parametrize("with_epsilon", [True, False])
def test_an_engine_of_a_user(kind, with_epsilon):
    """Its methods run once each; what they and ours set is the engine's own."""
    engine, model = kind(accountant="prv_bounds"), nn.Linear(3, 2)
    given = dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(80, 3)), batch_size=4),
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
    )
    if with_epsilon:
        budget = dict(target_epsilon=3.0, target_delta=1e-5, epochs=2)
        made = engine.make_private_with_epsilon(**given, **budget)
    else:
        made = engine.make_private(noise_multiplier=1.0, **given)
    assert engine.called == ["make_private", "model", made[1]]
    assert type(engine) is kind and engine.dataset is made[-1].dataset
    for batch in made[-1]:
        made[2](made[0](*batch), torch.zeros(len(batch[0])).long()).backward()
        made[1].step()
        made[1].zero_grad()
    assert sum(n for *_, n in engine.accountant.history) == len(made[-1])
    assert made[1].loop is not None and made[1].run is not None
    spent = engine.get_epsilon(1e-5)
    statement = engine.privacy_statement(1e-5).content
    assert spent == pytest.approx(1 + statement["epsilon"])
    engine.called.clear()  # an optimizer is not copied
    if kind is not Strange:  # pickle does not read its slot
        assert pickle.loads(pickle.dumps(engine)).get_epsilon(1e-5) == spent
    assert copy.deepcopy(engine).get_epsilon(1e-5) == spent


@pytest.mark.parametrize("mode", ["scan", "auto", "ghost"])
def test_a_criterion_of_a_user(mode):
    """One of Opacus's adaptive clipping lets the bound of ours move."""

    class Own(PrivacyEngine):
        def _prepare_criterion(self, **kwargs):
            return super()._prepare_criterion(**kwargs)

    class Adaptive(PrivacyEngine):
        def _prepare_criterion(self, **kwargs):
            return PrivacyEngineAdaptiveClipping._prepare_criterion(self, **kwargs)

    for engine in (Own(), Adaptive()):
        optimizer, criterion = _make_private(mode, engine=engine)[1:3]
        assert type(criterion) is ClippedCriterion
        assert (optimizer.adaptive is not None) == isinstance(engine, Adaptive)


def test_an_engine_of_a_user_that_makes_opacus_s_own_model():
    class Own(PrivacyEngine):
        def _prepare_model(self, module, **kwargs):
            return GradSampleModule(module)

    model = nn.Linear(3, 2)
    with pytest.raises(opacus_ext.Refused, match="_prepare_model of Own"):
        _of(model, "hooks", engine=Own())
    assert not model._forward_hooks and not hasattr(model.weight, "grad_sample")


@pytest.mark.parametrize("part", ["_count", "watch_steps"])
def test_an_error_leaves_all_as_it_was(part, monkeypatch):
    """Also the loader, which poisson_sampling=False returns as it was given."""
    model, engine = nn.Linear(3, 2), PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)))
    before = {**vars(loader)}
    monkeypatch.setattr(opacus_ext.engine, part, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    assert vars(loader) == before and engine.dataset is None
    assert not runs_of(engine) and not hasattr(model, "autograd_grad_sample_hooks")


def test_the_engine_without_the_registry(unregistered):
    model = nn.Linear(3, 2)
    with pytest.raises(opacus_ext.Refused, match="unregister"):
        opacus_ext.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(torch.zeros(4, 3))),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapper_has_what_the_model_has(mode):
    class Model(nn.Linear):
        config = {"width": 3}

        def generate(self, x):
            return self(x)

    model = Model(3, 2)
    made = _of(model, mode)[0]
    assert made.config is model.config and made.bias is model.bias
    with torch.no_grad():
        assert made.generate(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        made.nothing_like_this
