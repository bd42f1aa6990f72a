"""The patches for Opacus in upstream/: numbers, texts, and that they apply."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import opacus
import pytest

UPSTREAM = Path(__file__).parents[1] / "upstream"
PATCHES = sorted(UPSTREAM.glob("*.patch"))
each = pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
of_this_version = pytest.mark.skipif(
    version("opacus") != "1.6.0", reason="they are for Opacus 1.6.0"
)


def apply(patch, place, *options):
    """What ``git apply`` says; git takes no repository around the place for its own."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place.parent)}
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numbers():
    texts = sorted(UPSTREAM.glob("[0-9]*.md"))  # a design has no patch
    names = [path.name[:3] for path in texts]
    assert names == [f"{i:02}-" for i in range(1, len(texts) + 1)] != []
    assert {path.stem for path in PATCHES} <= {path.stem for path in texts}


@each
def test_text(patch):
    """Each has one, with a script that parses, and files of Opacus with tests."""
    text = patch.with_suffix(".md").read_text(encoding="utf-8")
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert scripts and all(map(ast.parse, scripts))
    assert patch.name in text
    changed = re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), re.M)
    assert all(name.startswith("opacus/") for name in changed)
    assert any(name.startswith("opacus/tests/") for name in changed)
    new = patch.read_text().count("new file mode")
    assert patch.read_text().count("+# Licensed under the Apache License") == new


@pytest.fixture
def copy(tmp_path):
    """A folder with a copy of the Opacus that is installed."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(opacus.__file__).parent, tmp_path / "opacus", ignore=ignore)
    return tmp_path


@of_this_version
def test_patches_apply(copy):
    """Each alone, and all together, to the Opacus that is installed."""
    for patch in PATCHES:
        apply(patch, copy, "--check")
    for patch in PATCHES:
        apply(patch, copy)


# Each mode on an Opacus with a registry of modes: its functions are left as they are,
# the classes are ours, the clipped sum is the oracle's, and the noise fits to it.
_REGISTRY = """
import sys, warnings
warnings.simplefilter("ignore")
from opacus import grad_sample, optimizers, privacy_engine
from opacus.grad_sample import modes, utils
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping

def functions():
    return [
        utils.get_gsm_class, grad_sample.get_gsm_class, privacy_engine.get_gsm_class,
        utils.get_hooks_class,
        optimizers.get_optimizer_class, privacy_engine.get_optimizer_class,
    ]

before = functions()
assert utils.__file__.startswith(sys.argv[1])
grad_sample.register_grad_sample_mode(
    "ghost_bk", module=grad_sample.GradSampleModule, hooks=grad_sample.GradSampleHooks)
import torch
from torch import nn
import opacus_ext
from opacus_ext.registry import MODES
from tests.common import check, make_private, square_loss

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
for name, mode in MODES.items():
    for wrap in (True, False):
        check(name, wrap, model, torch.randn(4, 3).double(), square_loss)
        for clipping, std in {"flat": 15, "automatic": 15, "normalized": 3}.items():
            wide = nn.Linear(5000, 1, bias=False)
            old = wide.weight.detach().clone()
            bound = dict(clipping=clipping, noise_multiplier=3.0, max_grad_norm=5.0)
            private = make_private(wide, name, wrap, batch_size=1, **bound)
            assert type(private.handle) is (mode.module if wrap else mode.hooks)
            private.step(torch.zeros(1, 5000), lambda model, x: model(x).squeeze(1))
            assert abs((old - wide.weight).std() / std - 1) < 0.1, (name, clipping)

# An engine with a criterion of its own gets our modes, too.
def handle(mode, engine=privacy_engine.PrivacyEngine, **kwargs):
    model = nn.Linear(3, 2)
    return engine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.randn(4, 3)),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode, **kwargs)[:2]

adaptive = handle("ghost", PrivacyEngineAdaptiveClipping)[0]
assert type(adaptive) is MODES["ghost"].module
assert type(handle("ghost")[0]) is MODES["ghost"].module
adaptive = dict(clipping="adaptive", target_unclipped_quantile=0.5, min_clipbound=0.1,
    clipbound_learning_rate=0.1, max_clipbound=1.0, unclipped_num_std=1.0)
assert type(handle("hooks", **adaptive)[1]) is optimizers.AdaClipDPOptimizer
grad_sample.register_grad_sample_mode("theirs", module=grad_sample.GradSampleModule)
assert type(handle("theirs")[0]) is grad_sample.GradSampleModule
try:
    handle("their")
except opacus_ext.Refused as error:
    assert "Unexpected grad_sample_mode" in str(error)
else:
    raise AssertionError("an unknown mode is not refused")
assert functions() == before

opacus_ext.unregister()  # what was there before is there again
assert modes._MODES.keys() == {"ghost_bk", "theirs"}
assert utils.get_gsm_class("ghost_bk") is grad_sample.GradSampleModule
"""


@of_this_version
@pytest.mark.parametrize(
    "patches",
    [PATCHES[1:2], pytest.param(PATCHES, marks=pytest.mark.thorough)],
    ids=["02", "all"],
)
def test_modes_beside_those_of_the_registry(copy, patches):
    for patch in patches:
        apply(patch, copy)
    path = os.pathsep.join([str(copy), str(UPSTREAM.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _REGISTRY, str(copy)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_pages():
    """Their scripts parse, and their links lead somewhere."""
    for page in UPSTREAM.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
            ast.parse(script)
        text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
            assert (page.parent / link).exists(), (page, link)
