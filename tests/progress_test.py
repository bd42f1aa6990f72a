"""Progress bars: seen where a person looks, and nowhere else."""

import io
import time

import pytest
from opacus.accountants import RDPAccountant

from opacus_ext.accountants import noise_left
from opacus_ext.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("show", [True, False])
def test_bar(stream, show):
    file = stream()
    bar = progress(range(3), "counting", show=show, file=file, delay=1e-9)
    assert [time.sleep(0.11) or i for i in bar] == [0, 1, 2]
    assert ("counting" in file.getvalue()) == (show and stream is Terminal)


def test_what_takes_less_than_a_second_has_none():
    file = Terminal()
    assert list(progress(range(3), file=file)) == [0, 1, 2]
    assert file.getvalue() == ""


def test_calibration_shows_one(monkeypatch):
    file, made = Terminal(), []

    def bar(*args, **kwargs):
        made.append(progress(*args, file=file, delay=1e-9, mininterval=0, **kwargs))
        return made[-1]

    monkeypatch.setattr("opacus_ext.accountants.calibration.progress", bar)
    noise_left(RDPAccountant(), 5.0, 1e-5, 0.1, 100)
    assert made[0].n > 3 and "calibrating noise" in file.getvalue()
