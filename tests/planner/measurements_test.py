import json

import numpy as np
import pytest

from opacus_ext.planner.measurements import EXAMPLE, Measurements


def run(**changed):
    made = dict(
        family="bytes",
        size="8x1",
        ratio=0.5,
        learning_rate=0.01,
        batch_size=4,
        tokens=8,
        parameters=1000,
        steps=[2, 4],
        loss=[5.0, 4.0],
    )
    return {**made, **changed}


def test_runs_become_rows(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (run(), run(ratio=0))))
    measured = Measurements.read(path)
    assert len(measured) == 2
    np.testing.assert_array_equal(measured.ratio, [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(measured.steps, [2, 4, 2, 4])
    np.testing.assert_array_equal(measured.ratios, [0, 0.5])
    assert (measured.family, measured.tokens, measured.batch_size) == ("bytes", 8, 4)
    half = measured.select(measured.ratio > 0)
    assert len(half) == 1 and half.tokens == 8


def test_a_table_is_read(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("parameters,steps,ratio,loss\n1e3,10,0,5\n1e3,20,0,4\n")
    measured = Measurements.read(path)
    assert len(measured) == 1  # one size, ratio and learning rate: one run
    np.testing.assert_array_equal(measured.loss, [5, 4])
    path.write_text("parameters,steps,loss\n1e3,10,5\n")
    with pytest.raises(ValueError, match="no column ratio"):
        Measurements.read(path)
    path.write_text("parameters,steps,ratio,loss\n1e3,10,0,high\n")
    with pytest.raises(ValueError, match="no number"):
        Measurements.read(path)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(loss=[np.nan, 1]), "loss must be finite"),
        (dict(loss=[0, 1]), "row 0 has 0"),
        (dict(parameters=[1e3]), "parameters has shape"),
        (dict(ratio=[-0.1, 0]), "ratio must be"),
        (dict(steps=[1, np.inf]), "steps must be"),
        (
            dict(parameters=[], steps=[], ratio=[], loss=[]),
            "no measurements",
        ),
    ],
)
def test_bad_rows_are_refused(changed, message):
    rows = dict(parameters=[1e3, 1e3], steps=[1, 2], ratio=[0, 0], loss=[5.0, 4.0])
    with pytest.raises(ValueError, match=message):
        Measurements(**{**rows, **changed})


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match="different tokens"):
        Measurements.of_runs([run(), run(tokens=16)])
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(run()) + "\nnot json\n")
    with pytest.raises(ValueError, match="line 2"):
        Measurements.read(path)


def test_the_example_is_what_was_promised():
    """5 sizes, 9 ratios and noise-free, 4 sizes to 2,800 steps."""
    measured = Measurements.read(EXAMPLE)
    assert measured.sizes[0] < 2e4 and measured.sizes[-1] > 9e5
    assert measured.ratios[0] == 0 and measured.ratios[1] == 2**-18
    assert len(measured.sizes) == 5 and len(measured.ratios) == 10
    longest = [measured.steps[measured.parameters == m].max() for m in measured.sizes]
    assert longest == [2800, 2800, 2800, 2800, 700]
    assert len(np.unique(measured.steps)) >= 10
    for size in measured.sizes:
        of_size = measured.select(measured.parameters == size)
        np.testing.assert_array_equal(of_size.ratios, measured.ratios)


@pytest.mark.parametrize("name", ["family", "tokens", "ratio", "learning_rate"])
def test_a_run_that_lacks_something_is_refused(name, tmp_path):
    path = tmp_path / "runs.jsonl"
    made = run()
    del made[name]
    path.write_text(json.dumps(run()) + "\n" + json.dumps(made))
    with pytest.raises(ValueError, match=f"line 2, is no run.*{name}"):
        Measurements.read(path)


@pytest.mark.parametrize("loss", [3.0, [3.0]])
def test_a_run_of_other_readings_is_refused(loss, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(run(loss=loss)))
    with pytest.raises(ValueError, match="line 1, is no run"):
        Measurements.read(path)
