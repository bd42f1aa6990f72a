"""What the planner's functions refuse: a table of calls with what can't be."""

import dataclasses
import json

import numpy as np
import pytest
from numpy import inf, nan  # noqa: F401  of the table

from opacus_ext.planner import (
    CHINCHILLA,
    Budget,
    Candidates,
    LossModel,
    Measurements,
    Surface,
    byte_transformers,
    hold_out,
    laws,
)
from opacus_ext.planner.cost import Device, search_noise  # noqa: F401
from opacus_ext.planner.loss_model import MEASURED
from opacus_ext.planner.measure import find_family, measure  # noqa: F401
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.refused import Refused

TEXT = b"To be, or not to be: that is the question. " * 20
RUN = NoiseFree([0, 200, 400, 600], [2.4, 1.8, 1.7, 1.65])
BUDGET = Budget(users=1e5, epsilon=4, delta=1e-6, flops=1e14, tokens=16)
ADAPTERS = dict(tokens=512, trainable=1e6, parameters=(1e9, 1e9), steps=(500, 2000))
KNOWN = LossModel(
    lambda *at: sum(at), (1e4, 1e6), (100, 3200), 16, 32, MEASURED, "made up"
)


def fit(loss=(5.0, 4, 3, 2.5, 3, 2), **changed):
    rows = dict(parameters=[1e6, 1e7, 1e8, 1e9, 1e9, 1e8], tokens=[1e9, 1e10, 1e8] * 2)
    return laws.chinchilla.fit(loss, **{"descents": 1, **rows, **changed})


def law(**changed):
    return laws.chinchilla.of(**{**CHINCHILLA.parameters, **changed})


def plan(law=KNOWN, **changed):
    return Candidates(dataclasses.replace(BUDGET, **changed), law)


def tuned(law=LossModel.of_noise_free(RUN, "made up"), **changed):
    return plan(law, **{**ADAPTERS, **changed})


def grid(**changed):
    family = byte_transformers(TEXT, 8, ["8x1"])
    settings = dict(ratios=[0, 0.1], steps=4, every=2, batch_size=4, progress=False)
    measure(family, "/nowhere/runs", **{**settings, **changed})


def rows(**changed):
    made = dict(parameters=[1e3, 1e3], steps=[1, 2], ratio=[0, 0], loss=[5.0, 4.0])
    return Measurements(**{**made, **changed})


def runs(steps=(20, 40, 60), one_run=False, hole=False):
    """A grid of runs."""
    sizes, ratios = (1e5, 1e6, 1e7), (0.0, 1e-3, 1e-2)
    m, r, t = (x.ravel() for x in np.meshgrid(sizes, ratios, steps))
    number = 0 * t if one_run else None
    found = Measurements(m, t, r, 2 + 3 * t**-0.5 + r, run=number)
    return found.select((m != 1e6) | (r == 0)) if hole else found


def surface(steps=(20, 40, 60), one_run=False, hole=False, **options):
    options = {"min_steps": 20, "window": 1, **options}
    return Surface.fit(runs(steps, one_run, hole), **options)


def query(parameters=1e5, steps=40, ratio=0, **more):
    return surface().loss(parameters, steps, ratio, **more)


def held_out(**which):
    return hold_out(runs(), min_steps=20, window=1, **which)


def curve(steps=(0, 1, 2, 3), loss=(4.0, 3, 2, 1)):
    return NoiseFree(steps, loss)


TABLE = r"""
fit([5.0, 4, 3, 2.5, 3, nan]) | loss must be finite and above 0
fit([]) | loss is empty
fit([[5.0] * 6]) | a list with one row each
fit(tokens=[1e9, 1e8]) | tokens has shape \(2,\), loss \(6,\)
fit(tokens=[0.0] * 6) | tokens must be
fit(parameters=1e6) | parameters has 1 values, chinchilla needs 3
fit(parameters=[1e6, 1e7, 1e8] * 2, tokens=[1e7, 1e8, 1e9] * 2) | vary only together
fit(steps=[1] * 6) | law of parameters, tokens; got
fit(descents=0) | descents must be
fit([5, 4.0], parameters=[1, 2], tokens=[1, 3]) | 5 parameters; 2 rows
law(A=0) | A must be
law(a=nan) | a must be
law(q=1) | chinchilla has
CHINCHILLA.predict(parameters=1) | got parameters
CHINCHILLA.predict(parameters=1, tokens=[1, -1]) | tokens must be
CHINCHILLA.predict(parameters=[1, 2], tokens=[1, 2, 3]) | don't broadcast: parameters
laws.private_rows(runs()) | have no batch_size
plan(users=0) | users must be
plan(epsilon=0) | epsilon must be
plan(epsilon=101) | epsilon=101 is above 100: that is no privacy
plan(delta=1) | delta must be
plan(flops=-1) | flops must be
plan(tokens=0) | tokens must be
plan(tokens=17) | measured on examples of 16 tokens
plan(batch_size=(10, 5)) | batch_size must be a range
plan(batch_size=(2e5, 3e5)) | batch_size must be finite and at most 100000
plan(steps=(0, 5)) | steps must be a range
plan(steps=(1e6, 1e6)) | outside of what is known
plan(parameters=(1e7, 1e8)) | outside of what is known
plan().by_rank(1) | Ranks are of adapters
tuned(parameters=None) | trainable=1e.06 is of one model
tuned(parameters=(1e9, 2e9)) | is of one model
tuned(trainable=7e9) | trainable must be .* at most 1e.09
tuned(trainable=20.5) | no whole number of trainable
tuned(trainable=None, parameters=None) | is of one model
tuned(physical_batch_size=0) | physical_batch_size must be
tuned(LossModel.of_paper()) | models that are trained whole
tuned().by_rank(0) | rank must be
tuned().by_rank(2.5) | rank must be
tuned().by_rank(nan) | rank must be
Device(flops=0) | flops must be
Device(flops=1, utilization=1.1) | utilization must be
Device(flops=1, price=0) | price must be
search_noise(0.001, 1e-6, 1000, 0.01, trials=50) | whatever their noise
search_noise(4, 1e-6, 1000, 0.01, trials=1) | trials must be finite and above 1
grid(sizes=["99x1"]) | has the sizes
grid(ratios=[]) | ratios is empty
grid(ratios=[-1]) | ratios must be
grid(learning_rates=[0.0]) | learning_rates must be
grid(steps=1) | steps must be finite and at least 2
grid(batch_size=1000) | batch_size must be
find_family("os:path") | not to be had
find_family("builtins:dict") | returned dict, not a Family
find_family("bytes") | needs a text
byte_transformers(TEXT, sizes=["wide"]) | WIDTHxDEPTH
byte_transformers(b"short", 64) | no example
rows(loss=[nan, 1]) | loss must be
rows(loss=[]) | loss is empty
rows(parameters=[1e3]) | parameters has shape
rows(ratio=[-0.1, 0]) | ratio must be
rows(steps=[1, inf]) | steps must be
surface(min_steps=1000) | 1000 steps .min_steps. or more
surface(min_steps=-1) | min_steps must be
surface(window=0) | window must be
surface(steps_to=10) | steps_to must be above 20
surface(steps_to=1e4) | Lower fit_from or steps_to
surface(one_run=True) | several values of parameters
surface(steps=[20, 20, 40]) | two losses at a step
surface(hole=True) | parameters 1e.06 with ratio 0.001
query(nan) | parameters must be
query(9e4) | parameters 90000 is outside of what was measured, 100000 to
query(steps=0) | steps must be
query(steps=19) | steps 19 is outside
query(steps=61) | steps 61 is outside
query(ratio=-1) | ratio must be
query(ratio=0.02) | ratio 0.02 is outside
query([1e5, 1e6], [20, 40, 60]) | broadcast: parameters
query(outside="clip") | outside must be
held_out(parameters=1e5) | parameters 100000 is not between two
held_out(ratio=0) | is not between
held_out(steps=60) | steps must be
held_out() | either
curve([0, 1, 2], [3, 2, 1]) | steps \(3,\) .* are no curve
curve(loss=[3, 2, 1]) | no curve
curve([0, 1, 2, 2]) | don't ascend
curve([90, 100, 110, 120]) | from its start: 90
curve(loss=[4, 3, nan, 1]) | loss must be
curve(loss=[1, 2, 3, 4]) | does not fall: 1 before, 4 after 3 steps
curve(loss=[0.1, 0.6, 0.8, 0.9]) | nats a token .a record., no accuracy
RUN.after(-1, 1) | steps must be
RUN.after(1, nan) | noise_norm must be
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_refused(line):
    call, message = line.split(" | ")
    with pytest.raises(Refused, match=message):
        eval(call)


RUNS = dict(family="bytes", ratio=0.5, learning_rate=0.01, batch_size=4, tokens=8)
RUNS |= dict(parameters=1000, steps=[2, 4], loss=[5.0, 4.0])


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(loss=3.0), "line 2, is no run"),
        (dict(loss=[3.0]), "differ in length"),
        (dict(tokens=16), "different tokens"),
        (dict(family=None), "different family"),
        ("not json", "line 2, is no run"),
        *((name, f"line 2.*{name}") for name in RUNS),
    ],
)
def test_refused_files_of_runs(tmp_path, changed, message):
    """Changed or, of a name, without it."""
    run = dict(RUNS)
    if isinstance(changed, dict):
        run |= changed
    elif changed in run:
        del run[changed]
    else:
        run = changed
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(RUNS)}\n{json.dumps(run)}")
    with pytest.raises(Refused, match=message):
        Measurements.read(path)


@pytest.mark.parametrize(
    "of, text, message",
    [
        (Measurements, "parameters,steps,loss\n1e3,10,5\n", "numbers ratio"),
        (Measurements, "parameters,steps,ratio,loss\n1,2,0,high\n", "numbers loss"),
        (NoiseFree, "steps,accuracy\n0,0.1\n100,0.6\n", "numbers loss"),
        (NoiseFree, "", "has 0 lines"),
        (NoiseFree, "steps,loss\n", "has 1 lines"),
        (NoiseFree, "steps;loss\n0;5\n", "numbers steps, loss.*separate them by ','"),
        (NoiseFree, "steps,loss\n0,5\n10\n", "numbers loss.*a number in each line"),
        (NoiseFree, "steps,loss\n0,\x005\xff", "is no table of text"),
    ],
)
def test_refused_tables(tmp_path, of, text, message):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(Refused, match=message):
        of.read(path)
