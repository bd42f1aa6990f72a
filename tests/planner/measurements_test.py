import json

import numpy as np

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
