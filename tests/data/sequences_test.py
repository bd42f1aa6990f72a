"""Readers and the synthetic set of recommenders. Files are written by the tests."""

import os

import pytest
import torch

from opacus_ext.recommend import actions, read_sequences, synthetic_sequences

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


TIMES = [100, 200, 300, 400, 500, 600]
DATES = [f"2024-01-0{day} 10:00:00" for day in range(1, 7)]
ZONES = [f"2024-01-01T{10 + hour}:00:00Z" for hour in range(6)]
FORMS = {
    "a header": ("user,item,timestamp", "{user},{item},{time}", TIMES),
    "none": ("", "{user},{item},{time}", TIMES),
    "another order": ("date;rating;product;userId", "{time};5;{item};{user}", DATES),
    "tabs": (
        "user_id:token\titem_id:token\ttimestamp:float",
        "{user}\t{item}\t{time}",
        TIMES,
    ),
    "zones": ("item,other,user,time", '"{item}",x,{user},{time}', ZONES),
    "a mark, and spaces": (
        "\ufeffUser ID, Item ID, Time",
        "{user} , {item} , {time}",
        TIMES,
    ),
    "spaces": ("", "{user}  {item} {time}.5", TIMES),
    "colons": ("", "{user}::{item}::5::{time}", TIMES),
    "in order": ("", "{user} {item}", TIMES),
}


def table_of(header, line, times):
    """Lines of all users over the same times, the later ones of a user last."""
    users = [(f"u{u}", SEQUENCES[1 + u % 2]) for u in range(20)]
    lines = [
        line.format(user=user, item=f"item-{item}", time=times[t])
        for t in range(6)
        for user, items in users
        for item in items[t : t + 1]
    ]
    return "\n".join([header, *lines]) + "\n\n"


@pytest.mark.parametrize("name", FORMS)
def test_names_and_times_of_every_form(read, name):
    data = read(table_of(*FORMS[name]))
    assert data.history("u1") == [f"item-{i}" for i in SEQUENCES[2]]
    assert data.history("u4") == [f"item-{i}" for i in SEQUENCES[1]]
    assert (len(data.users), data.num_items) == (20, 6)
    assert data.once == (name in ("another order", "colons"))


def test_columns_and_items_of_ones_own(read):
    """Of a list of items none is dropped, and no others are taken."""
    text = table_of("who,what,when", "{user},{item},{time}", TIMES)
    items = [f"item-{i}" for i in (1, 2, 4, 5, 9, 77)]
    data = read(text, columns=["who", "what", "when"], items=items, min_actions=4)
    assert data.items == items
    assert data.history("u4") == ["item-4", "item-9", "item-2", "item-5", "item-1"]
    with pytest.raises(ValueError, match="no user 'u99'"):
        data.history("u99")


ROW = "a,b,3\n"
BAD = [
    ("1 2\n1 3 4\n", r"line 2: 3 fields \['1', '3', '4'\], but 2 in", {}),
    ("1,2,3\n\n1,x\n", r"line 3: 2 fields \['1', 'x'\], but 3 in", {}),
    ("userId,movieId\n", "no user has 5 actions", {}),
    ("user,thing,time\n" + ROW, "line 1: none of the columns .* as the item's", {}),
    ("a,b,time\n" + ROW, r"line 1, column 3 \(time\): 'time' is no ISO date", {}),
    ("user,item,time\n\n" + ROW + "a,b,\n", "line 4, column 'time': '' is no num", {}),
    ("user,item,time\n" + ROW + "a,b,nan\n", "line 3, column 'time': 'nan' is", {}),
    ("a,b,2024-01-01\na,b,5\n", r"line 2, column 3 \(time\): '5' is no ISO date", {}),
    ("user,item,time\n" + ROW + "a,,4\n", "line 3, column 'item': it is empty", {}),
    ('user,item,time\na,"b"c,4\n', "line 2: .* quotation marks", {}),
    ("1,2,3,4,5\n", "line 1: 5 fields without a header that is known", {}),
    ("".join(f"1,{i},{i % 5}.5\n" for i in range(20)), "looks like ratings", {}),
    ("1::2::3::4\n1 2\n", "line 2: 1 fields", {}),
    ("a,b,3\n", "line 1: none of the columns .* the user's", {"columns": ["x", "b"]}),
    ("a,b,3\n", "1 columns are named", {"columns": ["x"]}),
    ("", "no user has 5 actions", {}),
    ("1 2\n1 3\n", "no user has 5 actions", {}),
    (SASREC, "at least 3", {"min_actions": 2}),
]


@pytest.mark.parametrize("text, message, given", BAD)
def test_bad_files_are_refused(read, text, message, given):
    with pytest.raises(ValueError, match=message):
        read(text, **given)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "actions.csv"
    path.write_text(table_of(*FORMS["a header"]), encoding="utf-16")
    with pytest.raises(ValueError, match="no text in UTF-8. Save the file as UTF-8."):
        read_sequences(path)


def test_pandas_reads_the_same(tmp_path, monkeypatch):
    """What it reads, and what is said of what it can't read."""
    pytest.importorskip("pandas")
    texts = [table_of(*form) for form in FORMS.values()] + [text for text, *_ in BAD]
    texts += ['1,"a ""b"", c",5\n2,"d\ne",6\n3,a"b,7\n4,NA,8\n']
    path, found = tmp_path / "actions", []
    for without in (False, True):
        if without:
            monkeypatch.setattr(actions, "_by_pandas", lambda *args: None)
        found.append([])
        for text in texts:
            path.write_text(text)
            try:
                found[-1].append(actions.read_actions(path))
            except ValueError as error:
                found[-1].append(str(error))
    assert found[0] == found[1]


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
