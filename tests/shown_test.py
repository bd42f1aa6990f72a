"""What objects show of themselves: a line in a log, a table in a notebook."""

import html
import subprocess
import sys

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import Monitor, UserRecords, check_per_sample_gradients
from opacus_ext.audit.report import Audit, Finding
from opacus_ext.data import Poisson
from opacus_ext.planner import Budget, Candidates, LossModel

X, Y = torch.randn(32, 3), torch.randint(0, 2, (32,))


def make_private(engine=opacus_ext.PrivacyEngine, **kwargs):
    model = nn.Linear(3, 2)
    engine = engine(accountant="prv_bounds")
    given = {
        "module": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(TensorDataset(X, Y), batch_size=8),
        "noise_multiplier": 1.5,
        "max_grad_norm": 0.1,
        "grad_sample_mode": "ghost_bk",
        **kwargs,
    }
    return engine, *engine.make_private(**given)


@pytest.mark.parametrize("kind", [opacus.PrivacyEngine, opacus_ext.PrivacyEngine])
def test_lines(kind):
    engine, model, optimizer, criterion, loader = make_private(kind)
    monitor = Monitor(engine, optimizer, delta=1e-5)
    shown = {
        optimizer: "GhostDPOptimizer(AdamW, grad_sample_mode=ghost_bk, "
        "noise_multiplier=1.5, max_grad_norm=0.1, clipping=flat, "
        "expected_batch_size=8, last_step=none)",
        criterion: "ClippedCriterion(CrossEntropyLoss(), loss_reduction=mean)",
        loader: "PoissonLoader(TensorDataset, records=32, expected_batch_size=8, "
        "batches=4)",
        monitor: "Monitor(steps=0, delta=1e-05, share=0.01, last_step=none)",
        engine: "PrivacyEngine(accountant=prv_bounds, steps=0, secure_mode=False)",
        engine.accountant: "PRVBoundsAccountant(steps=0, phases=0)",
    }
    assert {value: repr(value) for value in shown} == shown
    criterion(model(X[:8]), Y[:8]).backward()
    optimizer.step()
    assert repr(optimizer).endswith("last_step=eager at once)")
    assert repr(monitor).startswith("Monitor(steps=1, ")
    assert repr(engine) == shown[engine].replace("steps=0", "steps=1")
    line = "PRVBoundsAccountant(steps=1, noise_multiplier=1.5, sample_rate=0.25)"
    assert repr(engine.accountant) == line
    engine.accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    assert repr(engine.accountant) == "PRVBoundsAccountant(steps=2, phases=2)"
    statement = engine.privacy_statement(1e-5)
    assert repr(statement).startswith("PrivacyStatement(holds=yes, epsilon=")
    assert statement._repr_markdown_() == str(statement)


def test_lines_of_others():
    _, _, optimizer, loader = make_private(
        grad_sample_mode="hooks",
        clipping="per_layer",
        max_grad_norm=[1.0, 2.0],
        sampling=Poisson(expected_batch_size=4),
    )
    assert "max_grad_norm=one a parameter, clipping=per_layer" in repr(optimizer)
    line = "DrawnLoader(TensorDataset, records=32, expected_batch_size=4, batches=8)"
    assert repr(loader) == line
    users = UserRecords([{"by": i % 3} for i in range(9)], "by", None)
    assert repr(users) == "UserRecords(users=3, records=9, records_per_step=all)"


def test_tables_of_notebooks():
    """They say what the text says, and what is not theirs is escaped."""
    report = check_per_sample_gradients(
        nn.Linear(3, 2), (X, Y), nn.CrossEntropyLoss(), modes=["hooks"], verbose=False
    )
    report.findings.append("a < b")
    table = report._repr_html_()
    assert "<td>weight</td><td>ok " in table and "<p>! a &lt; b</p>" in table
    assert table.count("<tr>") == 3 and str(report).splitlines()[-1][:6] in table
    finding = Finding("noise", "step 1", 1.0, 1.0, "C", False)
    audit = Audit(0.5, 8.0, 1e-5, 0.95, [finding])
    table = audit._repr_html_()
    assert "<td>noise</td>" in table and "No fault was seen" in table


def test_table_of_a_plan():
    budget = Budget(users=1e7, epsilon=4)
    plan = Candidates(budget, LossModel.of_paper()).best()
    table = plan._repr_html_()
    assert f"<td>steps</td><td>{plan.steps}</td>" in table
    assert all(html.escape(note) in table for note in (*plan.caveats, *plan.notes()))


def test_imports_without_transformers():
    """
    ``from opacus_ext import *`` works without the trainer. Tools that import every
    module of a package (pydoc, coverage) run no command.
    """
    code = (
        "import importlib.util as util, sys\n"
        "find, sys.argv = util.find_spec, ['opacus-ext', 'plan']\n"
        "util.find_spec = lambda name, *package: "
        "None if name == 'transformers' else find(name, *package)\n"
        "from opacus_ext import *\n"
        "import opacus_ext.__main__\n"
        "assert 'transformers' not in sys.modules\n"
        "assert dir(opacus_ext) == sorted(opacus_ext.__all__)\n"
        "assert 'PrivateTrainer' not in dir(opacus_ext) and clipped_grads"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
