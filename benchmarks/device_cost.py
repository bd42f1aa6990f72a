"""What a step asks of a device: ops, syncs, FLOPs, bytes, peak memory. Not timed.

Run as ``python benchmarks/device_cost.py``. The steps are those of ``step_time.py``:
forward, backward, noise and ``SGD.step()``, of the non-private step, Opacus's modes and
ours. One step of each, after a few that are not counted, runs on the CPU while every op
is counted; no GPU is needed. The last columns are the time that a stated GPU would need
if each op ran at its roofline, one after the other:

    max(FLOPs / peak FLOP/s, bytes / bandwidth, launch time), summed over the ops.

It is a lower bound for a GPU that runs the same ops, not a prediction: what Python, the
waits at syncs and imperfect kernels add is left out.

What is counted:

- ops: calls of ATen that start a kernel, one kernel each. Views, other changes of
  metadata, allocations and ops on nothing are none. The ops are those that PyTorch
  chooses on a CPU. A GPU may have others: SGD updates all parameters in a few kernels
  there, and ops such as unique, sort or a layer norm's backward take several.
- syncs: ops for which a host would wait for its GPU, because their result, or its
  shape, is needed there (``item``, ``nonzero``, ``unique``, indices that are masks),
  and calls of ``Tensor.tolist`` and ``Tensor.cpu``, of any tensor. Not seen:
  ``Tensor.numpy``, ``.to("cpu")``, and copies from the host to the device.
- FLOPs: of matrix products, convolutions and attention, 2 a multiply-add, by PyTorch's
  own formulas (they take causal attention for full). Of other ops none: their bytes
  bound them.
- bytes: of the distinct memory that an op reads and that it writes, each once. So an
  expanded tensor counts what it stores, and an op in place both ways. Of a table that
  is read or written by indices, only as much as there are indices.
- peak: bytes of the tensors alive at once that were not before the step. Workspace
  inside of kernels, and what an allocator keeps, is not in it.

Compiled means ``torch.compile`` of the model, after ``make_private`` for a private
mode; the criterion, the clipping, the noise and the update stay as they are. Inductor's
kernels for the CPU are counted, each fused group of nodes as one, as they are called;
they have bytes and no FLOPs. For a GPU it may fuse otherwise.
"""

import argparse
import gc
import json
import math
import re
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)
from unittest.mock import patch

import step_time
import torch
from opacus import PrivacyEngine
from step_time import BASELINE, MODES, SHAPES, Mode, Row, Shape, Step, print_header
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import flop_registry

WARM_UP = 4  # steps before the one that is counted; the fourth has checks of its own
COMPILED = ", compiled"

aten = torch.ops.aten
FORMULAS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
NO_KERNEL = {  # besides views and what changes metadata; a scalar goes with a launch
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided", "lift_fresh", "scalar_tensor"),
}
OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"} | {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_")
}
BY_INDEX = {  # the argument of which as many elements are touched as others have
    "embedding": "weight",
    **dict.fromkeys(("index", "gather", "index_select", "nll_loss_forward"), "self"),
    **dict.fromkeys(("index_put_", "_index_put_impl_", "index_add_"), "self"),
    **dict.fromkeys(("index_copy_", "scatter_", "scatter_add_"), "self"),
}
SYNCS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("unique_dim_consecutive", "bincount"),
}


class Gpu(NamedTuple):
    """Peak FLOP/s, bandwidth in bytes/s and seconds that a kernel takes at least."""

    flops: float
    bandwidth: float
    launch: float = 5e-6

    def seconds(self, flops: float, moved: float) -> float:
        """The roofline of one op, from its FLOPs and the bytes it moves."""
        return max(flops / self.flops, moved / self.bandwidth, self.launch)

    @classmethod
    def parse(cls, text: str) -> "Gpu":
        """A name of ``GPUS``, or FLOP/s, bytes/s and seconds with commas between."""
        return GPUS[text] if text in GPUS else cls(*map(float, text.split(",")))

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e12:g} TFLOP/s, {self.bandwidth / 1e12:g} TB/s, "
            f"{self.launch * 1e6:g} us a kernel"
        )


GPUS = {  # dense peaks of the makers' data sheets, SXM; float32, or TF32 products
    "H100": Gpu(67e12, 3.35e12),
    "H100-tf32": Gpu(494e12, 3.35e12),
    "H200": Gpu(67e12, 4.8e12),
    "A100": Gpu(19.5e12, 2.04e12),
    "A100-tf32": Gpu(156e12, 2.04e12),
}


class Launch(NamedTuple):
    """One kernel: the op's name, its FLOPs and the bytes it moves."""

    op: str
    flops: int
    moved: int


class NotCounted(RuntimeError):
    """What compiled code asks of a device can't be seen."""


def tensors(tree: Any) -> List[torch.Tensor]:
    """The tensors with memory of their own kind in nested arguments."""
    return [
        x
        for x in tree_leaves(tree)
        if isinstance(x, torch.Tensor)
        and x.layout is torch.strided
        and x.device.type != "meta"
    ]


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def stored(x: torch.Tensor) -> int:
    """How many elements of memory a tensor covers: expanded dims count once."""
    if x.numel() == 0:
        return 0
    covered = math.prod(n for n, stride in zip(x.shape, x.stride()) if stride)
    return min(covered, x.untyped_storage().nbytes() // x.element_size())


class Access(NamedTuple):
    """Elements of a tensor that an op touches, to read them or to write them."""

    tensor: torch.Tensor
    elements: int


def num_bytes(accesses: Iterable[Access]) -> int:
    """Bytes of memory in some accesses, the same memory once."""
    places: Dict[tuple, int] = {}
    for x, elements in accesses:
        axes = sorted(zip(x.stride(), x.shape))  # a transposed view is the same memory
        key = (x.data_ptr(), tuple(axes), x.dtype)
        places[key] = max(places.get(key, 0), elements * x.element_size())
    return sum(places.values())


def only_alias(func: Any, inputs: List[torch.Tensor], out: Any) -> bool:
    """Whether an op only makes views of its inputs, or changes their metadata."""
    if torch.Tag.inplace_view in func.tags:
        return True
    notes = [r.alias_info for r in func._schema.returns]
    if any(note is not None and not note.is_write for note in notes):
        return True
    if func._schema.is_mutable or not tensors(out):
        return False
    return {storage(x) for x in tensors(out)} <= {storage(x) for x in inputs}


def moved(func: Any, named: Dict[str, Any], out: Any) -> int:
    """Bytes that an op reads and writes, each counted once."""
    name = func._overloadpacket.__name__
    reads: List[Access] = []
    writes: List[Access] = []
    every = {a.name: tensors(named[a.name]) for a in func._schema.arguments}
    known = {storage(x) for xs in every.values() for x in xs}
    fresh = [x for x in tensors(out) if storage(x) not in known]
    for position, arg in enumerate(func._schema.arguments):
        writing = arg.alias_info is not None and arg.alias_info.is_write
        unread = position == 0 and (
            name in OVERWRITES or name.endswith("_like") or name.startswith("new_")
        )
        unread |= arg.is_out or (name == "nll_loss_backward" and arg.name == "self")
        most = math.inf
        if BY_INDEX.get(name) == arg.name:
            others = [x for key, xs in every.items() if key != arg.name for x in xs]
            most = max((x.numel() for x in others + fresh), default=0)
        touched = [Access(x, int(min(stored(x), most))) for x in every[arg.name]]
        reads += [] if unread else touched
        writes += touched if writing else []
    return num_bytes(reads) + num_bytes(writes + [Access(x, stored(x)) for x in fresh])


def is_sync(name: str, named: Dict[str, Any]) -> bool:
    """Whether a host waits for the op, given its arguments by name."""
    if name == "repeat_interleave":
        return named.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [x for x in tensors(named["indices"]) if x.dtype == torch.bool]
        filled = "values" in named and named["values"].numel() == 1  # a masked fill
        return bool(masks) and not filled
    return name in SYNCS


class Count(TorchDispatchMode):
    """Counts what runs inside of ``with Count() as count:`` on this thread.

    ``launches`` has the kernels in order, ``syncs`` names of ops with how often each
    would have made a host wait, and ``peak`` the bytes alive at once that were not
    there before.
    """

    current: Optional["Count"] = None  # which the kernels of compiled code tell

    def __init__(self) -> None:
        super().__init__()
        self.launches: List[Launch] = []
        self.syncs: Counter = Counter()
        self.peak = self.bytes = 0
        self._alive: Dict[int, Tuple[weakref.ref, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that code that is compiled already stays in use."""
        return True

    def __enter__(self) -> "Count":
        for x in gc.get_objects():
            if issubclass(type(x), torch.Tensor) and x.layout is torch.strided:
                self._hold(x, counted=False)
        self._patches = ExitStack()
        for name in ("tolist", "cpu"):  # on a CPU no op is called for these
            method = self._waits(name, getattr(torch.Tensor, name))
            self._patches.enter_context(patch.object(torch.Tensor, name, method))
        self._patches.enter_context(patch.object(Count, "current", self))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        out = func(*args, **kwargs)
        for x in tensors(out) + inputs:
            self._hold(x)
        packet = func._overloadpacket
        if packet.__name__ in NO_KERNEL or only_alias(func, inputs, out):
            return out
        named = {a.name: a.default_value for a in func._schema.arguments}
        named.update(zip(named, args))
        named.update(kwargs)
        size = moved(func, named, out)
        if size:
            formula = FORMULAS.get(packet)
            operands = [x for x in args if not isinstance(x, torch.dtype)]
            flops = formula(*operands, **kwargs, out_val=out) if formula else 0
            self.launches.append(Launch(packet.__name__, flops, size))
        if is_sync(packet.__name__, named):
            self.syncs[packet.__name__] += 1
        return out

    def kernel(self, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Count a kernel of compiled code."""
        size = num_bytes(reads) + num_bytes(writes)
        self.launches.append(Launch("generated", 0, size))
        for x, _ in (*reads, *writes):
            self._hold(x)

    def seconds(self, gpu: Gpu) -> float:
        """The sum of the rooflines of all kernels."""
        return sum(gpu.seconds(each.flops, each.moved) for each in self.launches)

    def _waits(self, name: str, method: Callable) -> Callable:
        def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.syncs[name] += 1
            return method(x, *args, **kwargs)

        return counted

    def _hold(self, x: torch.Tensor, counted: bool = True) -> None:
        """Follow a tensor's memory until it's freed."""
        try:
            memory = x.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper of other tensors
            return
        key = memory._cdata
        if key not in self._alive:
            size = memory.nbytes() if counted else 0
            self._alive[key] = weakref.ref(memory, partial(self._free, key)), size
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _free(self, key: int, ref: weakref.ref) -> None:
        if key in self._alive and self._alive[key][0] is ref:
            self.bytes -= self._alive.pop(key)[1]


class Signature(NamedTuple):
    """The tensors of a kernel that Inductor generated: names, in order of its args."""

    names: List[str]
    read: List[bool]
    by_index: List[bool]

    @classmethod
    def parse(cls, source: str) -> "Signature":
        """Read it off the C++ source.

        A const pointer is read, an ``out_ptr`` is written, an ``in_out_ptr`` both. An
        address that has a loaded value (``tmp``) in it is an index, and what it points
        to is scattered to, if not const: read and written.
        """
        found = re.search(r"\bkernel\(([^)]*)\)", source)
        if found is None:
            raise NotCounted("a generated kernel is not known in this form")
        declared = [each.split() for each in found.group(1).split(",")]
        names = [words[-1] for words in declared]
        address = r"\b(\w+_ptr\d+)(?: \+ |\[)static_cast<int64_t>\([^)]*\btmp\d"
        indexed = set(re.findall(address, source))
        read = ["const" in words or words[-1].startswith("in_") for words in declared]
        return cls(names, read, [name in indexed for name in names])

    def accesses(self, args: Sequence[Any]) -> Tuple[List[Access], List[Access]]:
        """What a call reads and writes; by indices, a row for each of these."""
        whole = [x for x in args if isinstance(x, torch.Tensor)]
        integers = [x.numel() for x in whole if x.dtype in (torch.int64, torch.int32)]
        indices = max(integers, default=math.inf)
        reads: List[Access] = []
        writes: List[Access] = []
        for name, read, by_index, x in zip(*self, args):
            if not isinstance(x, torch.Tensor):
                continue
            rows = min(1, indices / max(1, len(x))) if by_index and x.dim() else 1
            access = Access(x, int(stored(x) * rows))
            if read or by_index:
                reads.append(access)
            if "out_ptr" in name:
                writes.append(access)
        return reads, writes


@contextmanager
def generated_kernels_counted() -> Iterator[None]:
    """Let the kernels of what is compiled inside tell ``Count.current`` of each call.

    All that is private to Inductor is here. Its wrapper code calls ATen for products,
    which ``Count`` sees, and a C++ function for each group of kernels. The limit makes
    every fused node a group of its own, as it is a kernel of its own on a GPU. Cached
    code would be without either.
    """
    with ExitStack() as changes:
        try:
            from torch._inductor import config
            from torch._inductor.async_compile import AsyncCompile
            from torch._inductor.codegen.cpp import CppScheduling

            load = AsyncCompile.cpp_pybinding

            def loaded(self: Any, types: List[str], source: str) -> Callable:
                kernel, signature = load(self, types, source), Signature.parse(source)

                def call(*args: Any) -> Any:
                    if Count.current is not None:
                        Count.current.kernel(*signature.accesses(args))
                    return kernel(*args)

                return call

            for change in (
                config.patch(compile_threads=1, force_disable_caches=True),
                patch.object(AsyncCompile, "cpp_pybinding", loaded),
                patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0),
            ):
                changes.enter_context(change)
        except (ImportError, AttributeError) as error:
            raise NotCounted(f"{error} in torch {torch.__version__}") from error
        yield


class CompilingEngine(PrivacyEngine):
    """Compiles the models that it made private."""

    def make_private(self, **kwargs: Any) -> Any:
        model, *rest = super().make_private(**kwargs)
        return torch.compile(model), *rest


def compiled(mode: Mode) -> Mode:
    """The mode with ``torch.compile`` of its model, after ``make_private``."""

    def build(model: nn.Module, data: TensorDataset, name: str) -> Step:
        if mode.build is not step_time.private:
            return mode.build(torch.compile(model), data, name)
        with patch.object(step_time, "PrivacyEngine", CompilingEngine):
            return mode.build(model, data, name)

    return mode._replace(build=build)


def count_step(step: Step) -> Count:
    """Count one step, after a few that allocate and compile what stays."""
    for _ in range(WARM_UP):
        step()
    gc.collect()
    with torch.compiler.set_stance("fail_on_recompile"), Count() as count:
        step()
    return count


def count_mode(name: str, shape: Shape, tied: bool) -> Count:
    """Count a step of a mode of ``step_time.MODES``, with ", compiled" after or not."""
    if not name.endswith(COMPILED):
        return count_step(step_time.build(name, shape, tied, "cpu"))
    torch.compiler.reset()
    of = {name: compiled(MODES[name.removesuffix(COMPILED)])}
    with generated_kernels_counted(), patch.dict(MODES, of):
        count = count_step(step_time.build(name, shape, tied, "cpu"))
    if not any(each.op == "generated" for each in count.launches):
        raise NotCounted("no kernel that Inductor generated ran")
    return count


class Column(NamedTuple):
    """A column of the table: its title, its key in a row and how to print it."""

    title: str
    key: str
    form: str


COLUMNS = [
    Column("ops", "ops", "d"),
    Column("ratio", "ops_ratio", ".2f"),
    Column("syncs", "syncs", "d"),
    Column("GFLOP", "gflop", ".2f"),
    Column("ratio", "gflop_ratio", ".2f"),
    Column("MB moved", "mb", ".1f"),
    Column("ratio", "mb_ratio", ".2f"),
    Column("peak MiB", "peak_mib", ".1f"),
    Column("roofline ms", "roofline_ms", ".3f"),
    Column("ratio", "roofline_ms_ratio", ".2f"),
]


def as_row(count: Count, gpu: Gpu, base: Optional[Row]) -> Row:
    """The figures of a count, and their ratios to the row ``base``, or to itself."""
    ops = Counter(each.op for each in count.launches)
    row: Row = {
        "ops": len(count.launches),
        "syncs": sum(count.syncs.values()),
        "gflop": sum(each.flops for each in count.launches) / 1e9,
        "mb": sum(each.moved for each in count.launches) / 1e6,
        "peak_mib": count.peak / 2**20,
        "roofline_ms": 1e3 * count.seconds(gpu),
        "by_op": dict(ops.most_common()),
        "by_sync": dict(count.syncs),
    }
    base = base or row
    for key in ("ops", "gflop", "mb", "roofline_ms"):
        row[f"{key}_ratio"] = row[key] / base[key]
    return row


def print_row(row: Row) -> None:
    if "refused" in row:
        cells = [row["refused"]] + [""] * (len(COLUMNS) - 1)
    else:
        cells = [f"{row[column.key]:{column.form}}" for column in COLUMNS]
    print("| " + " | ".join([row["mode"], *cells]) + " |", flush=True)


def count_modes(shape: Shape, tied: bool, names: List[str], gpu: Gpu) -> List[Row]:
    """Count the modes, print a row of each, and return the rows."""
    rows: List[Row] = []
    for name in names:
        row: Row = {"shape": str(shape), "tied": tied, "mode": name}
        try:
            count = count_mode(name, shape, tied)
            row.update(as_row(count, gpu, rows[0] if rows else None))
        except NotCounted as error:
            row["refused"] = f"not counted: {error}"
        except Exception as error:
            row["refused"] = step_time.refusal(name, error)
        rows.append(row)
        print_row(row)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", type=Shape.parse, default=SHAPES, metavar="L,d,V,T,B")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    compilable = [n for n in MODES if MODES[n].build is not step_time.functorch_vmap]
    text = "of these modes also the compiled step; takes minutes (default: %(default)s)"
    add("--compiled", nargs="*", choices=compilable, default=[BASELINE], help=text)
    add("--tied", action="store_true", help="tie the embedding and the head")
    text = "FLOP/s, bytes/s and seconds a kernel as 1e14,3e12,5e-6, or one of: "
    text += ", ".join(GPUS)
    add("--gpu", type=Gpu.parse, default=GPUS["H100"], help=text)
    add("--json", metavar="PATH", help="also write the results there")
    return parser.parse_args()


def main() -> None:
    for message in (
        "Secure RNG turned off",
        "Full backward hook is firing",
        "There is a performance drop",
        "dynamo_pgo force disabled",
    ):
        warnings.filterwarnings("ignore", message=message)
    args = parse_arguments()
    eager, also = {BASELINE, *args.modes}, set(args.compiled)
    names = [
        name + suffix
        for name in MODES
        for suffix, chosen in (("", eager), (COMPILED, also))
        if name in chosen
    ]
    print(f"torch {torch.__version__}; counted, not timed; the GPU stated: {args.gpu}")
    results: List[Row] = []
    for shape in args.shapes:
        tied = "tied" if args.tied else "untied"
        title = f"## Counted, not timed: L,d,V,T,B = {shape}, {tied}"
        print_header(title, ["mode", *(column.title for column in COLUMNS)])
        results += count_modes(shape, args.tied, names, args.gpu)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": args.gpu._asdict(), "counted": results}, file, indent=1)


if __name__ == "__main__":
    main()
