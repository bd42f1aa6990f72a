"""Readers and the synthetic set of examples/. Files are written by the tests."""

import os

import pytest
import torch

from examples.sequences import read_sequences, synthetic_sequences

ML1M = os.environ.get("OPACUS_EXT_ML1M")

# Two users over the same six items, in time order.
SEQUENCES = {1: [4, 9, 2, 7, 5, 1], 2: [1, 4, 9, 2, 7]}


def lines_of(users):
    return "".join(f"{u} {i}\n" for u, items in users.items() for i in items)


SASREC = lines_of(SEQUENCES)


@pytest.fixture
def read(tmp_path):
    def read(text, **kwargs):
        path = tmp_path / "actions"
        path.write_text(text)
        return read_sequences(path, **kwargs)

    return read


def test_sasrec_form(read):
    """Items are numbered by appearance: 4, 9, 2, 7, 5, 1 become 1 to 6."""
    for users, histories, last in (
        (None, [[1, 2, 3, 4, 5], [6, 1, 2, 3]], [6, 4]),
        (1, [[1, 2, 3, 4, 5]], [6]),
    ):
        data = read(SASREC, max_users=users)
        assert [h.tolist() for h in data.histories] == histories
        assert data.held_out.tolist() == last and data.num_items == 6


def test_both_forms_give_the_same_sequences(read):
    """Ten pairs of users, so that every item has its five actions."""
    users = {u: SEQUENCES[1 + u % 2] for u in range(20)}
    # All users interleaved, users and times descending.
    ratings = "".join(
        f"{u}::{users[u][t]}::3.5::{1000 + t}\n"
        for t in reversed(range(6))
        for u in reversed(users)
        if t < len(users[u])
    )
    one, two = read(lines_of(users)), read(ratings)
    assert len(one.histories) == 20 and two.once and not one.once
    assert one.fingerprint() == two.fingerprint()


def test_equal_timestamps_keep_the_order_of_the_file(read):
    ratings = "".join(f"{u}::{i}::1::7\n" for u in range(5) for i in (3, 1, 2, 5, 4))
    assert read(ratings).histories[0].tolist() == [1, 2, 3, 4]


def test_rare_users_and_items_are_dropped(read):
    common = "".join(f"{u}::{i}::1::{i}\n" for u in range(5) for i in range(5))
    rare = "0::77::1::99\n" + "".join(f"9::{i}::1::{i}\n" for i in range(4))
    data = read(common + rare)
    assert (len(data.histories), data.num_items) == (5, 5)
    # SASRec's form is filtered for items already; users are looked at again.
    data = read(SASREC + "3 1\n3 2\n3 4\n3 9\n")
    assert (len(data.histories), data.num_items) == (2, 6)


@pytest.mark.parametrize(
    "text, message, given",
    [
        ("1 2\n1 3 4\n", "line 2: expected 'user item' .* found '1 3 4'", {}),
        ("1 2\n\n1 x\n", "line 3: expected 'user item' .* found '1 x'", {}),
        ("userId,movieId\n", "line 1: .* found 'userId,movieId'", {}),
        ("1::2::3::4\n1 2\n", "line 2: expected 'user::item::rating::time", {}),
        ("1::2::3\n", "line 1: expected 'user::item::rating::timestamp'", {}),
        ("", "no user has 5 actions", {}),
        ("1 2\n1 3\n", "no user has 5 actions", {}),
        (SASREC, "at least 3", {"min_actions": 2}),
    ],
)
def test_bad_files_are_refused(read, text, message, given):
    with pytest.raises(ValueError, match=message):
        read(text, **given)


def test_tensors(read):
    """Shorter users come first; the held-out item appears nowhere."""
    data = read(SASREC)
    for length, inputs, targets in (
        (4, [[6, 1, 2, 0], [1, 2, 3, 4]], [[1, 2, 3, 0], [2, 3, 4, 5]]),
        (2, [[1, 2], [3, 4]], [[2, 3], [4, 5]]),  # the end of a long history
    ):
        found = data.training_set(length).tensors
        assert [x.tolist() for x in found] == [inputs, targets]
    assert data.contexts(max_len=4).tolist() == [[2, 3, 4, 5], [6, 1, 2, 3]]
    assert data.popularity().tolist() == [0, 2, 2, 2, 1, 1, 1]


def test_synthetic():
    state = torch.get_rng_state()
    data = synthetic_sequences(num_users=2000)
    assert torch.equal(state, torch.get_rng_state())
    again, other = (synthetic_sequences(num_users=2000, seed=seed) for seed in (0, 1))
    assert data.fingerprint() == again.fingerprint() != other.fingerprint()
    lengths = [len(h) + 1 for h in data.histories]
    assert 10 <= min(lengths) and max(lengths) <= 30
    counts = data.popularity()[1:].sort(descending=True).values
    # A long tail: the most frequent tenth of the items beats the rarer half.
    assert counts[:40].sum() > counts[200:].sum()
    with pytest.raises(ValueError, match="can't share"):
        synthetic_sequences(num_items=41, num_genres=40)


@pytest.mark.skipif(not ML1M, reason="OPACUS_EXT_ML1M names no file")
def test_movielens():
    data = read_sequences(ML1M)
    assert (len(data.histories), data.num_items) == (6040, 3416)
    assert sum(map(len, data.histories)) + len(data.held_out) == 999611
