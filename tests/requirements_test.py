"""What an installation without extras can do: transformers and others are not there."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys

lightning = "lightning", "pytorch_lightning"
for name in ("transformers", "accelerate", "matplotlib", "peft", *lightning):
    sys.modules[name] = None  # an import of it fails

import importlib
import pkgutil

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext.losses import PerSample

needs_extras = []
for module in pkgutil.walk_packages(opacus_ext.__path__, "opacus_ext."):
    try:
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    except ImportError as error:
        assert "pip install opacus_ext[" in str(error) or "None in sys" in str(error)
        needs_extras.append(module.name)
print(*needs_extras)

for mode in ("hooks", "ghost", "ghost_bk", "scan", "auto"):
    layer = torch.nn.Linear(2, 1)
    model, optimizer, *criterion, _ = PrivacyEngine().make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
        criterion=PerSample(),
        data_loader=DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    losses = model(torch.ones(4, 2)).squeeze(1)
    (criterion[0] if criterion else PerSample())(losses).backward()
    optimizer.step()
opacus_ext.unregister()
"""
ALLOWED = {
    "opacus_ext.lightning",
    "opacus_ext.trainer",
}


def test_without_extras():
    """A module that needs them fails; all others import, and every mode trains."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert "opacus_ext.trainer" in done.stdout.split()
    assert set(done.stdout.split()) <= ALLOWED
