"""Python blocks of Markdown pages, and a process to run them in.

A block has an interpreter of its own. Comments of a page change that:

    <!-- blocks: one interpreter -->   those of the page run in one, in order
    <!-- block: slow -->               before a block: it takes minutes
    <!-- block: torchrun -->           before a block: two processes run it

This module imports nothing of the package: processes that run a block import it too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import traceback
import warnings
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

FENCE = re.compile(
    r"(?:^<!-- block: (?P<marks>[a-z ]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<source>.*?)^(?P=indent)```$",
    re.M | re.S,
)
SHARED = "<!-- blocks: one interpreter -->"
# By all that run a page, one time. The package, which they import, needs Dynamo.
LOADED = ["torch", "torch._dynamo", "opacus", "transformers"]


class Block(NamedTuple):
    """
    A fenced block.

    Attributes:
        page: the file it stands in
        line: the number of its first line there
        language: what follows its fence
        source: its lines
        marks: of the comment before it
    """

    page: Path
    line: int
    language: str
    source: str
    marks: Tuple[str, ...]


def blocks_of(page: Path) -> List[Block]:
    """All fenced blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("source")) + 1
        marks = tuple((match["marks"] or "").split())
        found.append(Block(page, line, match["language"], match["source"], marks))
    return found


def programs_of(page: Path) -> List[List[Block]]:
    """What has an interpreter each: all Python blocks of a page, or one of them."""
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    if SHARED in page.read_text(encoding="utf-8"):
        return [blocks]
    return [[block] for block in blocks]


def run(
    environment: Dict[str, str], blocks: List[Block], folder: str, report: str
) -> None:
    """
    Run blocks in this process, in the namespace of a program.

    Args:
        environment: variables to set
        blocks: one after the other; a traceback names their page and line
        folder: where they run
        report: a file for all they print; it ends with the traceback of an error
    """
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.chdir(folder)
    namespace = {"__name__": "__main__"}
    with open(report, "w", encoding="utf-8") as out:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                for block in blocks:
                    source = "\n" * (block.line - 1) + block.source
                    exec(compile(source, str(block.page), "exec"), namespace)
            except BaseException:
                traceback.print_exc(file=out)
                out.flush()
                os._exit(1)


def errors_of(blocks: List[Block], folder: Path, limit: float = 300) -> str:
    """
    Runs blocks in processes of their own, in which ``LOADED`` is imported already, and
    nothing else; what they printed if one failed, else "".
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    environments: List[Dict[str, str]] = [{}]
    if any("torchrun" in block.marks for block in blocks):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            given = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
            given["MASTER_PORT"] = str(free.getsockname()[1])
        environments = [{**given, "RANK": rank} for rank in "01"]
    reports = [folder / f"report-{rank}" for rank in range(len(environments))]
    processes = []
    for environment, report in zip(environments, reports):
        args = environment, blocks, str(folder), str(report)
        processes.append(context.Process(target=run, args=args, daemon=True))
        processes[-1].start()
    failed = False
    for process in processes:
        process.join(limit)
        failed |= process.exitcode != 0  # None after the limit
        process.kill()
    texts = (r.read_text(encoding="utf-8") if r.exists() else "" for r in reports)
    return "\n".join(texts) or "(no output)" if failed else ""
