"""What the planner's functions refuse: a table of calls with what can't be."""

import dataclasses
import json
import math

import numpy as np
import pytest

from opacus_ext.planner import (
    CHINCHILLA,
    Budget,
    Candidates,
    LossModel,
    Measurements,
    byte_transformers,
    hold_out,
    laws,
)
from opacus_ext.planner.cost import Device
from opacus_ext.planner.loss_model import MEASURED
from opacus_ext.planner.measure import find_family, measure
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.planner.surface import Surface
from opacus_ext.refused import Refused

NAN, INF = math.nan, math.inf
TEXT = b"To be, or not to be: that is the question. " * 20


def fit(loss=(5.0, 4, 3, 2.5, 3, 2), **changed):
    rows = dict(parameters=[1e6, 1e7, 1e8, 1e9, 1e9, 1e8], tokens=[1e9, 1e10, 1e8] * 2)
    return laws.chinchilla.fit(loss, **{"descents": 1, **rows, **changed})


def law(**changed):
    return laws.chinchilla.of(**{**CHINCHILLA.parameters, **changed})


def plan(**changed):
    known = LossModel(np.add, (1e4, 1e6), (100, 3200), 16, 32, MEASURED, "made up")
    budget = Budget(users=1e5, epsilon=4, delta=1e-6, flops=1e14, tokens=16)
    return Candidates(dataclasses.replace(budget, **changed), known)


RUN = NoiseFree([0, 200, 400, 600], [2.4, 1.8, 1.7, 1.65])
TUNING = Budget(
    5e4, 8, 1e-6, 1e19, parameters=(1e9, 1e9), trainable=1e6, steps=(500, 2000)
)


def tuned(law=None, **changed):
    law = law or LossModel.of_noise_free(RUN, "made up")
    return Candidates(dataclasses.replace(TUNING, **changed), law)


def grid(**changed):
    given = dict(ratios=[0, 0.1], steps=4, every=2, batch_size=4, progress=False)
    measure(
        byte_transformers(TEXT, 8, ["8x1"]), "/nowhere/runs", **{**given, **changed}
    )


def rows(**changed):
    made = dict(parameters=[1e3, 1e3], steps=[1, 2], ratio=[0, 0], loss=[5.0, 4.0])
    return Measurements(**{**made, **changed})


def runs(of=dict, steps=(20, 40, 60), sizes=(1e5, 1e6, 1e7)):
    """A grid of runs; ``of`` changes its columns."""
    m, r, t = (x.ravel() for x in np.meshgrid(sizes, [0.0, 1e-3, 1e-2], steps))
    made = dict(parameters=m, steps=t, ratio=r, loss=2 + 3 * t**-0.5 + r)
    return Measurements(**{**made, **of(made)})


def surface(of=dict, steps=(20, 40, 60), **options):
    return Surface.fit(runs(of, steps), **{"min_steps": 20, "window": 1, **options})


def query(parameters=1e5, steps=40, ratio=0, **more):
    return surface().loss(parameters, steps, ratio, **more)


def held_out(**which):
    return hold_out(runs(), min_steps=20, window=1, **which)


def curve(steps=(0, 1, 2, 3), loss=(4.0, 3, 2, 1)):
    return NoiseFree(steps, loss)


def device(**given):
    return Device(**{"flops": 1, **given})


def rank(rank):
    return tuned().by_rank(rank)


def written(tmp_path, *lines, name="runs.jsonl"):
    path = tmp_path / name
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    )
    return path


#: Each call with arguments, and the message; without one it says which range it wants.
TABLE = {
    fit: [
        (dict(loss=[5.0, 4, 3, 2.5, 3, NAN]), "loss must be finite and above 0"),
        (dict(loss=[]), "loss is empty"),
        (dict(loss=[[5.0] * 6]), "a list with one row each"),
        (dict(tokens=[1e9, 1e8]), r"tokens has shape \(2,\), loss \(6,\)"),
        (dict(tokens=[0.0] * 6), None),
        (dict(parameters=1e6), "parameters has 1 values, chinchilla needs 3"),
        (dict(parameters=[1e6, 1e7, 1e8] * 2, tokens=[1e7, 1e8, 1e9] * 2), "together"),
        (dict(steps=[1] * 6), "law of parameters, tokens; got"),
        (dict(descents=0), None),
        (dict(loss=[5, 4.0], parameters=[1, 2], tokens=[1, 3]), "5 parameters; 2 rows"),
    ],
    law: [(dict(A=0), None), (dict(a=NAN), None), (dict(q=1), "chinchilla has")],
    CHINCHILLA.predict: [
        (dict(parameters=1), "got parameters"),
        (dict(parameters=1, tokens=[1, -1]), "tokens must be"),
        (dict(parameters=[1, 2], tokens=[1, 2, 3]), "don't broadcast: parameters"),
    ],
    laws.private_rows: [(dict(measurements=runs()), "have no batch_size")],
    plan: [
        (dict(users=0), None),
        (dict(epsilon=0), None),
        (dict(epsilon=101), "epsilon=101 is above 100: that is no privacy"),
        (dict(delta=1), None),
        (dict(flops=-1), None),
        (dict(tokens=0), None),
        (dict(batch_size=(10, 5)), "batch_size must be a range"),
        (dict(batch_size=(2e5, 3e5)), "batch_size must be finite and at most 100000"),
        (dict(steps=(0, 5)), "steps must be a range"),
        (dict(steps=(1e6, 1e6)), "outside of what is known"),
        (dict(parameters=(1e7, 1e8)), "outside of what is known"),
        (dict(tokens=17), "measured on examples of 16 tokens"),
    ],
    tuned: [
        (dict(parameters=None), "trainable=1e.06 is of one model"),
        (dict(parameters=(1e9, 2e9)), "is of one model"),
        (dict(trainable=7e9), "trainable must be .* at most 1e.09"),
        (dict(trainable=20.5), "no whole number of trainable"),
        (dict(physical_batch_size=0), None),
        (dict(law=LossModel.of_paper()), "models that are trained whole"),
        (dict(trainable=None, parameters=None), "is of one model"),
    ],
    rank: [(dict(rank=x), None) for x in (0, -2, 2.5, NAN)],
    device: [
        (dict(flops=0), None),
        (dict(utilization=1.1), None),
        (dict(price=0), None),
    ],
    grid: [
        (dict(sizes=["99x1"]), "has the sizes"),
        (dict(ratios=[]), "ratios is empty"),
        (dict(ratios=[-1]), None),
        (dict(learning_rates=[0.0]), None),
        (dict(steps=1), "steps must be finite and at least 2"),
        (dict(batch_size=1000), None),
    ],
    find_family: [
        (dict(name="os:path"), "not to be had"),
        (dict(name="builtins:dict"), "returned dict, not a Family"),
        (dict(name="bytes"), "needs a text"),
    ],
    byte_transformers: [
        (dict(text=TEXT, sizes=["wide"]), "WIDTHxDEPTH"),
        (dict(text=b"short", length=64), "no example"),
    ],
    rows: [
        (dict(loss=[NAN, 1]), None),
        (dict(parameters=[1e3]), "parameters has shape"),
        (dict(ratio=[-0.1, 0]), None),
        (dict(steps=[1, INF]), None),
        (dict(loss=[]), "loss is empty"),
    ],
    surface: [
        (dict(min_steps=1000), "1000 steps .min_steps. or more"),
        (dict(window=0), None),
        (dict(min_steps=-1), None),
        (dict(steps_to=10), "steps_to must be above 20"),
        (dict(steps_to=1e4), "Lower fit_from or steps_to"),
        (dict(of=lambda m: dict(run=0 * m["loss"])), "several values of parameters"),
        (dict(steps=[20, 20, 40]), "two losses at a step"),
    ],
    query: [
        (dict(parameters=NAN), None),
        (dict(steps=0), None),
        (dict(ratio=-1), None),
        (dict(parameters=[1e5, 1e6], steps=[20, 40, 60]), "broadcast: parameters"),
        (dict(outside="clip"), "outside must be"),
    ],
    held_out: [
        (dict(parameters=1e5), "parameters 100000 is not between two"),
        (dict(ratio=0), "is not between"),
        (dict(steps=60), None),
        ({}, "either"),
    ],
    curve: [
        (dict(steps=[0, 1, 2], loss=[3, 2, 1]), r"steps \(3,\) .* are no curve"),
        (dict(loss=[3, 2, 1]), "no curve"),
        (dict(steps=[0, 1, 2, 2]), "don't ascend"),
        (dict(steps=[90, 100, 110, 120]), "from its start: 90"),
        (dict(loss=[4, 3, NAN, 1]), None),
        (dict(loss=[1, 2, 3, 4]), "does not fall: 1 before, 4 after 3 steps"),
        (dict(loss=[0.1, 0.6, 0.8, 0.9]), "nats a token .a record., no accuracy"),
    ],
    RUN.after: [
        (dict(steps=-1, noise_norm=1), None),
        (dict(noise_norm=NAN, steps=1), None),
    ],
}


@pytest.mark.parametrize(
    "call, given, message", [(c, *row) for c, found in TABLE.items() for row in found]
)
def test_refused(call, given, message):
    with pytest.raises(Refused, match=message or f"{next(iter(given))} must be"):
        call(**given)


RUNS = dict(family="bytes", ratio=0.5, learning_rate=0.01, batch_size=4, tokens=8)
RUNS |= dict(parameters=1000, steps=[2, 4], loss=[5.0, 4.0])


@pytest.mark.parametrize(
    "lines, message",
    [
        (("not json",), "line 2, is no run"),
        (({**RUNS, "loss": 3.0},), "line 2, is no run"),
        (({**RUNS, "loss": [3.0]},), "differ in length"),
        (({**RUNS, "tokens": 16},), "different tokens"),
        *(
            (({k: v for k, v in RUNS.items() if k != name},), f"line 2.*{name}")
            for name in ("family", "tokens", "ratio", "learning_rate")
        ),
    ],
)
def test_refused_files_of_runs(tmp_path, lines, message):
    with pytest.raises(Refused, match=message):
        Measurements.read(written(tmp_path, RUNS, *lines))


@pytest.mark.parametrize(
    "of, text, message",
    [
        (Measurements, "parameters,steps,loss\n1e3,10,5\n", "numbers ratio"),
        (Measurements, "parameters,steps,ratio,loss\n1,2,0,high\n", "numbers loss"),
        (NoiseFree, "steps,accuracy\n0,0.1\n100,0.6\n", "numbers loss"),
        (NoiseFree, "", "numbers steps, loss"),
    ],
)
def test_refused_tables(tmp_path, of, text, message):
    with pytest.raises(Refused, match=message):
        of.read(written(tmp_path, text, name="table.csv"))


def test_a_grid_with_a_hole_is_refused():
    m = runs()
    with pytest.raises(Refused, match="parameters 1e.06 with ratio 0.001"):
        Surface.fit(m.select((m.parameters != 1e6) | (m.ratio == 0)), min_steps=20)
