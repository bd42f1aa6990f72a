"""Ways to train a small classifier privately, each of which is recorded."""

from typing import Any, Callable, Dict, Optional

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from opacus_ext import Monitor, PrivacyEngine
from opacus_ext.losses import PerSample
from tests.attacks.front_ends import lightning_of, trainer_of

from .recorder import OUT, RECORDS, WIDTH, Records, Trace, recording

SIZE, SIGMA, BOUND, STEPS, LR = 16, 1.5, 0.3, 8, 0.5
RATE = SIZE / RECORDS
DELTA = 1e-3


class Classifier(nn.Module):
    """Without biases, so that a row of zeros has a gradient of zero."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, bias=False)
        self.second = nn.Linear(16, OUT, bias=False)

    def forward(self, x: torch.Tensor, y: Optional[torch.Tensor] = None) -> Any:
        logits = self.second(self.first(x).relu())
        if y is None:
            return logits
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def _outcome(trace: Trace, model: nn.Module, optimizer: Any, engine: Any) -> None:
    """Notes what a user may publish after a run."""
    trace.public["weights"] = dict(model.state_dict())
    trace.public["optimizer"] = optimizer.state_dict()["state"]
    trace.public["optimizer's keys"] = [*optimizer.state_dict()]
    trace.public["statement"] = _alone(engine.privacy_statement(delta=DELTA).content)
    trace.public["epsilon"] = engine.get_epsilon(DELTA)
    trace.history = [*engine.accountant.history]


class Loop:
    """
    A loop of the user around ``make_private``.

    Args:
        physical: whether physical batches are of 5 records
        monitored: whether a monitor is read
        steps: a function that trains, instead of the plain loop
        arguments: of make_private
    """

    def __init__(
        self,
        mode: str,
        physical: bool = False,
        monitored: bool = False,
        secure: bool = False,
        steps: Optional[Callable] = None,
        **arguments: Any,
    ):
        self.mode, self.physical, self.monitored = mode, physical, monitored
        self.secure, self.steps, self.arguments = secure, steps, arguments

    def __call__(self, trace: Trace, data: Records, folder: Any) -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        engine = PrivacyEngine(accountant="prv_bounds", secure_mode=self.secure)
        chosen = {"noise_multiplier": SIGMA, "max_grad_norm": BOUND, **self.arguments}
        module, optimizer, *criterion, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=SIZE),
            criterion=PerSample(),
            grad_sample_mode=self.mode,
            **chosen,
        )
        monitor = Monitor(engine, optimizer, share=0.5) if self.monitored else None

        def step(batch: Any) -> None:
            x, y = batch
            optimizer.zero_grad()
            losses = F.cross_entropy(module(x), y, reduction="none")
            (criterion[0](losses) if criterion else losses.mean()).backward()
            optimizer.step()

        for _ in range(STEPS * SIZE // RECORDS):
            if self.physical:
                with BatchMemoryManager(
                    data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
                ) as batches:
                    for batch in batches:
                        step(batch)
            else:
                for batch in loader:
                    step(batch)
        if monitor is not None:
            trace.public["monitor"] = monitor.read()
        _outcome(trace, model, optimizer, engine)
        engine.save_checkpoint(
            path=str(folder / "checkpoint.pt"), module=module, optimizer=optimizer
        )
        saved = torch.load(folder / "checkpoint.pt", weights_only=False)
        trace.public["checkpoint"] = _alone(saved)


def _alone(tree: Any) -> Any:
    """
    Leaves out what a statement or a checkpoint says of another run with the same seed,
    and keys that are new in each run.
    """
    if isinstance(tree, dict):
        names = (name for name in tree if "noise_of" not in str(name))
        return {name: _alone(tree[name]) for name in names}
    if isinstance(tree, (list, tuple)):
        return [_alone(x) for x in tree if "Seed once" not in str(x)]
    return tree


def by_trainer(trace: Trace, data: Records, folder: Any) -> None:
    data.named, model = True, Classifier()
    trainer = trainer_of(
        *(folder, model, data),
        optimizer=torch.optim.SGD(model.parameters(), LR),
        privacy=dict(
            noise_multiplier=SIGMA,
            accountant="prv_bounds",
            per_sample_max_grad_norm=BOUND,
            log_loss=False,
            privacy_seed=1,
        ),
        max_steps=STEPS,
        logging_steps=2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=SIZE // 2,
    )
    trainer.train()
    _outcome(trace, model, trainer.optimizer, trainer.engine)
    timed = "runtime", "per_second", "flos"
    trace.public["logs"] = [
        {k: v for k, v in entry.items() if not any(t in k for t in timed)}
        for entry in trainer.state.log_history
    ]
    trainer.save_model(str(folder))
    trace.public["files"] = sorted(path.name for path in folder.rglob("*"))


def by_lightning(trace: Trace, data: Records, folder: Any) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    trainer, module, privacy = lightning_of(
        *(model, optimizer),
        steps=STEPS,
        max_grad_norm=BOUND,
        noise_multiplier=SIGMA,
        accountant="prv_bounds",
        seed=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=SIZE))
    _outcome(trace, model, optimizer, privacy.engine)
    trace.public["logged"] = dict(trainer.logged_metrics)


FRONTS: Dict[str, Callable] = {
    **{mode: Loop(mode) for mode in ("hooks", "ghost", "ghost_bk", "scan", "auto")},
    **{mode: Loop(mode) for mode in ("functorch",)},
    "physical": Loop("ghost", physical=True),
    "monitor": Loop("hooks", monitored=True),
    "automatic": Loop("ghost_bk", clipping="automatic"),
    "normalized": Loop("ghost_bk", clipping="normalized"),
    "adaptive": Loop("ghost_bk", clipping="adaptive"),
    "per_layer": Loop("hooks", clipping="per_layer", max_grad_norm=[0.2, 0.3]),
    "secure": Loop("ghost_bk", secure=True),
    "trainer": by_trainer,
    "lightning": by_lightning,
}


def record(front: Callable, data: Records, folder: Any, first: Any = None) -> Trace:
    """A run of a front end on a data set, which is recorded."""
    torch.manual_seed(0)
    folder.mkdir()
    with recording(data, first) as trace:
        front(trace, data, folder)
    return trace


def pair(front: Callable, one: Records, two: Records, folder: Any) -> Any:
    """The runs on two data sets; the second is given what the first released."""
    first = record(front, one, folder / "one")
    return first, record(front, two, folder / "two", first)
