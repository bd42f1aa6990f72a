"""``opacus-ext recommend``: trains a recommender, measures it and keeps it."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any, Dict

from opacus_ext.planner.commands.output import print_result
from opacus_ext.recommend.loop import ignore_standing_warnings
from opacus_ext.recommend.recommender import Recommender
from opacus_ext.recommend.training import read_data, summary_table, train


def recommend(args: argparse.Namespace) -> int:
    """Trains, or loads a model, and prints what it reaches and recommends; 0."""
    data = read_data(args)
    histories = {user: data.history(user) for user in args.recommend_to}
    content: Dict[str, Any] = {}
    if args.load:
        recommender = Recommender.load(args.load, args.device)
    else:
        with warnings.catch_warnings():
            ignore_standing_warnings()
            content, recommender = train(args, data)
        if args.save:
            recommender.save(args.save)
        if args.statement:
            Path(args.statement).write_text(recommender.statement, encoding="utf-8")
    found = {user: recommender.recommend(x) for user, x in histories.items()}
    if args.json:
        print_result({**content, "recommended": found}, True)
        return 0
    if content:
        print(summary_table(content))
    for user, items in found.items():
        print(f"\nrecommended to {user}", *items, sep="\n  ")
    return 0
