"""Worker processes by spawn, as on Windows and macOS, from a folder with spaces.

There is no fork: what workers use is pickled, and each imports the script again. The
script's output is in the code page 1252.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.data import UserRecords

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext

if __name__ == "__main__":
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(24, 3), torch.zeros(24).long())
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            data, batch_size=8, num_workers=1, multiprocessing_context="spawn"
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="auto",
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    torch.save(model.state_dict(), "the weights.pt")
    print("epsilon", engine.get_epsilon(1e-3))
"""


@pytest.mark.slow
def test_training_with_workers(tmp_path):
    """Each worker imports torch and the package, which takes seconds."""
    folder = tmp_path / "a folder" / "with spaces"
    folder.mkdir(parents=True)
    (folder / "train it.py").write_text(SCRIPT, encoding="utf-8")
    settings = dict(PYTHONUTF8="0", PYTHONIOENCODING="cp1252", LC_ALL="C")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train it.py"],
        cwd=folder,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr
    assert done.stdout.startswith("epsilon ") and (folder / "the weights.pt").exists()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"])
def test_what_workers_get(mode):
    """A loader gives them the data set and the function that collates."""
    model = nn.Linear(3, 2)
    records = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.zeros(8).long())
    users = UserRecords(records, [0, 0, 1, 1, 2, 2, 3, 3])
    *_, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(users, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    given = loader.dataset, loader.collate_fn, loader.worker_init_fn
    dataset, collate, _ = pickle.loads(pickle.dumps(given))
    inputs, _ = collate([dataset[number] for number in (0, 3)])
    assert inputs.shape == (2, 3)
