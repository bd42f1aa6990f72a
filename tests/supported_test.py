"""The table of what is supported: each run is tried, and the page is made of it."""

import itertools
import os
import pathlib
import runpy
import warnings

import pytest
import torch
import torch.distributed as dist
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from opacus_ext import PrivacyEngine, Refused
from opacus_ext.distributed import expert_parallel
from opacus_ext.layers import TopKFeedForward
from opacus_ext.optimizers import Banded
from opacus_ext.supported import CHOICES, GAPS, Run, every_run, find_gap, kind_of
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

ROOT = pathlib.Path(__file__).parent.parent
ADAPTIVE = dict(
    target_unclipped_quantile=0.5,
    clipbound_learning_rate=0.2,
    max_clipbound=10.0,
    min_clipbound=0.1,
    unclipped_num_std=1.0,
)


@pytest.fixture(scope="module", autouse=True)
def one_process_of_one():
    """Models of several processes, of which there is one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Experts(nn.Module):
    """Two layers, of which one has experts."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = TopKFeedForward(3, 4, num_experts=2), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.experts(x[:, None])[:, 0])


def model_of(kind):
    torch.manual_seed(0)
    if kind == "expert_parallel":
        return expert_parallel(Experts())
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    if kind == "DistributedDataParallel":
        return DDP(model)
    if kind == "fully_shard":
        return fully_shard(model)
    if kind == "fully_shard of parts":
        fully_shard(model[0])
    if kind == "tensor parallel":
        plan = {"0": ColwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    if kind == "DataParallel":
        return nn.DataParallel(model)
    return model


def train(run):
    """Trains for an epoch. Returns how many weights have moved."""
    model = model_of(run.model)
    params = list(model.parameters())
    before = [p.detach().clone() for p in params]
    data = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
    per_layer = run.clipping == "per_layer"
    by_itself = run.front_end == "PrivacyEngineAdaptiveClipping"
    engine = (PrivacyEngineAdaptiveClipping if by_itself else PrivacyEngine)(
        secure_mode=run.noise == "secure"
    )
    adaptive = by_itself and run.mode not in ("hooks", "functorch")
    adaptive = adaptive or run.clipping == "adaptive"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(params, lr=0.1),
            data_loader=DataLoader(data, batch_size=4),
            noise_multiplier=0.01,
            max_grad_norm=[1.0] * len(params) if per_layer else 1.0,
            grad_sample_mode=run.mode,
            clipping=run.clipping,
            noise=Banded(2, 4) if run.noise == "banded" else "independent",
            criterion=nn.CrossEntropyLoss(),
            **(ADAPTIVE if adaptive else {}),
        )
        if run.mode == "no_op":
            return len(params)
        model, optimizer, *criterion, loader = made
        for x, y in itertools.islice(loader, 2):
            optimizer.zero_grad()
            loss = (criterion or [nn.CrossEntropyLoss()])[0](model(x), y)
            loss.backward()
            optimizer.step()
    return sum(not torch.equal(p, old) for p, old in zip(params, before))


@pytest.mark.parametrize("model", CHOICES["model"])
@pytest.mark.parametrize("engine", ["make_private", "PrivacyEngineAdaptiveClipping"])
def test_every_run_of_an_engine(engine, model):
    """What the table has is refused in its words, and all else is trained."""
    assert kind_of(model_of(model)) == model
    for run in every_run(front_end=engine, model=model):
        gap = find_gap(run)
        if gap is None:
            assert train(run) == len(list(model_of(model).parameters())), run
            continue
        with pytest.raises(Refused) as info:
            train(run)
        assert gap.reason in str(info.value) and gap.remedy in str(info.value), run
        assert info.value.parameter == gap.parameter


@pytest.mark.parametrize("model", CHOICES["model"])
def test_every_run_of_private_trainer(model, tmp_path):
    quiet = dict(save_strategy="no", report_to=[])
    for run in every_run(front_end="PrivateTrainer", model=model):

        def make():
            privacy = PrivacyArguments(
                target_delta=1e-3,
                noise_multiplier=1.0,
                grad_sample_mode=run.mode,
                clipping=run.clipping,
                secure_mode=run.noise == "secure",
                noise=Banded(2, 4) if run.noise == "banded" else "independent",
            )
            args = TrainingArguments(os.fspath(tmp_path), **quiet)
            data = [{"x": torch.full((3,), i)} for i in range(4)]
            return PrivateTrainer(
                model_of(model), args, train_dataset=data, privacy=privacy
            )

        gap = find_gap(run)
        if gap is None:
            make()
            continue
        with pytest.raises(Refused) as info:
            make()
        assert gap.reason in str(info.value) or run.clipping == "adaptive"


def test_no_gap_is_hidden_by_others():
    """Each is the reason why some run is refused."""
    runs = [*every_run(), *every_run(mode="no_op")]
    assert {id(find_gap(run)) for run in runs} >= set(map(id, GAPS))


@pytest.mark.parametrize(
    "parts", [{"noise": "banded"}, {"noise": "secure"}, {"clipping": "automatic"}]
)
def test_what_the_mode_of_opacus_does_not_have(parts):
    with pytest.raises(Refused, match='Mode "no_op"'):
        train(Run(mode="no_op", **parts))


def test_the_page_is_that_of_the_table():
    page = runpy.run_path(os.fspath(ROOT / "docs" / "supported.py"))["page"]()
    assert (ROOT / "docs" / "reference" / "supported.md").read_text() == page
