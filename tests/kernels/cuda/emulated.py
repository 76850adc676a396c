"""A card that is not there: a test double. Tensors say that they lie on cuda:0 and are computed on
the CPU, Triton's kernels in its interpreter. It knows nothing of speed, nor of a GPU's arithmetic;
it knows where tensors are, when the host waits, and which work is ordered after which.

    op on CudaTensors --> all on the card? streams ordered? --> on the CPU --> CudaTensors
                                                           +--> noted, while a graph is recorded

What it finds is raised as torch would raise it, and noted in `Card.faults`, since the engine goes
on after an error:

    devices    a tensor of the host in an operation of the card
    waits      each time the host stops for the card, and where: `Card.waits`
    copies     a pinned buffer that is written while a copy reads it; what a copy brings to the host
               is garbage until the host has waited for it
    streams    work on one stream that needs what another may not have done; memory that goes back
               while another stream may use it
    empties    new memory is NaN, or -1; a recording computes nothing before it is replayed

order.py tracks the order of work on streams.
"""

import ctypes
import traceback
import weakref
from contextlib import contextmanager, nullcontext
from functools import cache, partial, partialmethod, wraps
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mmdeploy_llm.engine.desk.local import LocalDesk

DEVICE = torch.device("cuda", 0)
CUDA, META = 1, 14  # torch's ids of device types
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
EMPTY |= {"aten::new_empty_strided"}
WHOLE = {"aten::scaled_dot_product_attention"}  # one launch, whichever kernel torch uses


class CudaTensor(torch.Tensor):
    """A tensor that reports cuda:0; `inner` holds the values. memory: shared by all views."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, memory):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        self.inner, self.memory = inner, memory
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = (x for x in tree_leaves((args, kwargs)) if isinstance(x, CudaTensor))
        return next(found).memory.card.dispatch(func, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        self.memory.recorded.add(stream)

    def __repr__(self):
        return f"CudaTensor({self.inner!r})"


class Calls(TorchFunctionMode):
    """Intercepts calls before C++ sees them: devices get their index, which a torch without CUDA
    cannot find out, and torch.tensor makes a tensor on the host that is then copied."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [with_index(x) for x in args]
        kwargs = {name: with_index(x) for name, x in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": None}).to(DEVICE)
        return func(*args, **kwargs)


class Card(TorchDispatchMode):
    """total: bytes. waits: for each wait of the host, its reason, its place in the code, and the
    number of launches before it. launches: names of the kernels. graphs: all recorded graphs.
    order: order.py."""

    def __init__(self, order, total=2**30, capability=(9, 0), others=0):
        super().__init__()
        self.order = order
        self.total, self.capability, self.others = total, capability, others
        self.allocated = self.reserved = self.most_reserved = 0
        self.stream = self.main = order.Stream(self)
        self.host, self.flying, self.pinned = {}, [], {}
        self.memories = weakref.WeakValueDictionary()  # by address
        self.waits, self.launches, self.faults, self.graphs = [], [], [], []
        self.recording, self.is_closed = None, False

    # -- the host -----------------------------------------------------------------------------

    def fault(self, text, kind=RuntimeError):
        self.faults.append(f"{text} ({where()})")
        raise kind(text)

    def wait(self, what, clock=None):
        """Makes the host wait until `clock`, by default all work of the current stream, is done."""
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits.append((what, where(), len(self.launches)))
        self.order.join(self.host, self.stream.clock if clock is None else clock)
        arrived = [one for one in self.flying if self.host.get(one[0], 0) >= one[1]]
        self.flying = [one for one in self.flying if one not in arrived]
        for _, _, host, values, is_to_host in arrived:
            if is_to_host:
                host.copy_(values)
            elif not same(host, values):
                self.fault("a pinned buffer was written while a copy read it")

    def synchronize(self, device=None):
        self.wait("synchronize", {stream: 2**62 for stream in list(self.streams())})

    def streams(self):
        return {self.stream, self.main, *self.stream.clock, *(one[0] for one in self.flying)}

    def take(self, size):
        if self.allocated + size > self.total - self.others:
            self.allocated += size  # Memory gives it back
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    # -- the card -----------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func, args, kwargs):
        name = func._schema.name
        args, kwargs = tree_map(with_index, (args, kwargs))
        leaves = tree_leaves((args, kwargs))
        on_card = [x for x in leaves if isinstance(x, CudaTensor)]
        is_here = bool(on_card) or DEVICE in [x for x in leaves if isinstance(x, torch.device)]
        if name in ("aten::is_pinned", "aten::pin_memory", "aten::_pin_memory"):
            return self.pin(name, *args)
        if kwargs.get("pin_memory"):
            return self.pin(name, func(*args, **{**kwargs, "pin_memory": False}))
        if not is_here and name not in ("aten::to", "aten::_to_copy"):
            return func(*args, **kwargs)
        if name not in WHOLE and func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            return self.copy(func, *args, **kwargs)
        return self.compute(func, args, kwargs, on_card)

    def pin(self, name, tensor):
        key = tensor.untyped_storage().data_ptr()
        if name == "aten::is_pinned":
            return key in self.pinned
        pinned = tensor if name == "aten::empty" else tensor.clone()
        if key not in self.pinned or pinned is not tensor:
            storage = pinned.untyped_storage()
            self.pinned[storage.data_ptr()] = (
                storage  # kept, so that no other tensor gets this address
            )
        return pinned

    def compute(self, func, args, kwargs, on_card):
        """Computes an operation on the CPU, and records what a card would have launched."""
        name = func._schema.name
        self.check(name, args, kwargs)
        here = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") else kwargs
        inner_args, inner_kwargs = inner((args, here))
        found = func(*inner_args, **inner_kwargs)
        wrappers = {id(x.inner): x for x in on_card}
        normal = {id(x.memory) for x in on_card if not x.is_inference()}
        out = tree_map(lambda x: self.wrap(x, wrappers, normal), found)
        if name in EMPTY:
            garbage(found)
            return out
        changed = written(func, args, kwargs)
        fresh = [x for x in tree_leaves(out) if isinstance(x, CudaTensor)]
        fresh = [x for x in fresh if not any(x.memory is one.memory for one in on_card)]
        if changed or fresh or not isinstance(out, torch.Tensor | tuple | list):

            def again():
                values = func(*inner_args, **inner_kwargs)
                for old, new in zip(tree_leaves(found), tree_leaves(values), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)

            self.launch(name, again, [*on_card, *fresh], [*changed, *fresh], fresh)
        return out

    def launch(self, name, again, used, changed, fresh=()):
        memories, written = {x.memory for x in used}, {x.memory for x in changed}
        if self.recording is not None:
            self.recording.launches.append((again, memories, written))
            self.fresh += [x.inner for x in fresh]
            return 0  # nothing runs
        self.launches.append(name)
        return self.stream.launched(memories, written)

    def check(self, name, args, kwargs):
        """Checks the devices of an operation's tensors, and whether the host must wait for it."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        hosts = [x for x in tensors if not isinstance(x, CudaTensor)]
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.wait(name + " by a mask")
            if any(not isinstance(x, CudaTensor) for x in indices):
                self.wait(name + " by indices of the host")
                hosts = [x for x in hosts if not any(x is one for one in indices)]
        elif name in WAITING and not kwargs.get("output_size"):
            self.wait(name)
        if any(x.dim() or x.device.type != "cpu" for x in hosts):
            text = f"{name}: Expected all tensors to be on the same device, but found cuda:0 and "
            self.fault(text + ", ".join(str(x.device) for x in hosts))

    def copy(self, func, first, second=None, non_blocking=False, **kwargs):
        """Handles _to_copy and copy_, which may have one tensor on the host."""
        if func._schema.name == "aten::_to_copy":
            source = first
            device = torch.device(kwargs.get("device") or source.device)
            if device.type == source.device.type != "cuda":
                return func(first, non_blocking=non_blocking, **kwargs)
            dtype = kwargs.get("dtype") or source.dtype
            if device.type == "cuda":
                found = torch.empty_like(inner(source), dtype=dtype, device="cpu")
                target = self.wrap(found, {})
                if self.recording is not None:
                    self.fresh.append(found)
            else:
                target = torch.empty_like(source.inner, dtype=dtype)
                non_blocking = False  # into memory that is not pinned
        else:
            target, source = first, second
        to_host = not isinstance(target, CudaTensor)
        from_host = not isinstance(source, CudaTensor)
        used = [x for x in (source, target) if isinstance(x, CudaTensor)]
        host = target if to_host else source if from_host else None
        if host is not None:
            return self.transfer(target, source, host, used, is_to_host=to_host, flag=non_blocking)
        to, of = inner((target, source))
        self.launch("aten::copy_", lambda: to.copy_(of), used, [target])
        to.copy_(of)
        return target

    def transfer(self, target, source, host, used, *, is_to_host, flag):
        is_async = flag and host.untyped_storage().data_ptr() in self.pinned
        is_async &= source.dtype is target.dtype and source.is_contiguous()
        name = "to the host" if is_to_host else "to the card"
        if self.recording is not None:
            self.fault(f"a recording copies {name}")
        place = self.launch("copy " + name, None, used, [] if is_to_host else [target])
        values = inner(source).detach().clone()
        if is_async and is_to_host:
            garbage(host)
        else:
            inner(target).copy_(values)
        if is_async:
            self.flying.append((self.stream, place, host, values, is_to_host))
        else:
            self.wait(f"copy {name}" + (" from pageable memory" if flag else ""))
        return target

    def wrap(self, found, wrappers, normal=()):
        if not isinstance(found, torch.Tensor):
            return found
        if id(found) in wrappers:
            return wrappers[id(found)]
        storage = found.untyped_storage()
        memory = self.memories.get(storage.data_ptr()) if storage.nbytes() else None
        if memory is None:
            memory = self.order.Memory(self, storage)
            if memory.size:
                self.memories[storage.data_ptr()] = memory
        # A view of a normal tensor is one, in inference mode too.
        is_view = id(memory) in normal
        with torch.inference_mode(torch.is_inference_mode_enabled() and not is_view):
            return CudaTensor(found, memory)

    def run_kernel(self, original, function, *args, grid, warmup, **kwargs):
        """Replaces triton.runtime.interpreter.InterpretedFunction.run."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not all(isinstance(x, CudaTensor) for x in tensors):
            self.fault(f"{function.fn.__name__}: Pointer argument cannot be accessed from Triton")
        args, kwargs = inner((args, kwargs))
        again = partial(original, function, *args, grid=grid, warmup=warmup, **kwargs)
        self.launch(function.fn.__name__, again, tensors, tensors)
        if self.recording is None:
            with torch._C._DisableTorchDispatch():
                again()

    def library(self, function):
        """Counts a function of another library as one launch, which reads its tensors and makes new
        ones."""

        @wraps(function)
        def launched(*args, **kwargs):
            leaves = tree_leaves((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if not all(isinstance(x, CudaTensor) for x in tensors):
                self.fault(f"{function.__name__}: its tensors must lie on the card")
            args, kwargs = inner((args, kwargs))
            compute = lambda: [  # noqa: E731
                x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)
            ]
            found = function(*args, **kwargs)
            out = tree_map(lambda x: self.wrap(x, {}), found)
            fresh = [x for x in tree_leaves(out) if isinstance(x, CudaTensor)]
            again = lambda: [  # noqa: E731
                old.inner.copy_(new) for old, new in zip(fresh, compute(), strict=True)
            ]
            self.launch(function.__name__, again, [*tensors, *fresh], fresh, fresh)
            return out

        return launched

    # -- replacements for torch.cuda ---------------------------------------------------------

    @contextmanager
    def on_stream(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def record(self, graph, pool=None, stream=None, **options):
        """Records launches; the results that they computed to find shapes are not used."""
        self.synchronize()
        self.recording, self.fresh = graph, []
        try:
            with self.on_stream(stream or self.order.Stream(self)):
                yield
        finally:
            self.recording = None
        self.graphs.append(graph)
        for found in self.fresh:
            garbage(found)

    def empty_cache(self):
        self.reserved = self.allocated

    def reset_peaks(self, device=None):
        self.most_reserved = self.reserved

    def own(self, kind):
        return type(kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, self)})

    def install(self, monkeypatch):
        """Replaces CUDA with the card; the code under test runs inside `with card:`."""
        import triton
        from triton.runtime import interpreter

        properties = SimpleNamespace(
            name="Emulated", major=self.capability[0], minor=self.capability[1]
        )
        properties.total_memory = self.total
        stand_ins = {
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: nullcontext(),
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: self.capability,
            "get_arch_list": lambda: [f"sm_{self.capability[0]}{self.capability[1]}"],
            "mem_get_info": lambda device=None: (
                self.total - self.others - self.reserved,
                self.total,
            ),
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_reserved": lambda device=None: self.most_reserved,
            "reset_peak_memory_stats": self.reset_peaks,
            "empty_cache": self.empty_cache,
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: self.stream,
            "stream": self.on_stream,
            "Stream": self.own(self.order.Stream),
            "Event": self.own(self.order.Event),
            "CUDAGraph": self.own(self.order.Graph),
            "graph": self.record,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        original = interpreter.InterpretedFunction.run
        run = lambda function, *args, **kwargs: self.run_kernel(  # noqa: E731
            original, function, *args, **kwargs
        )
        monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
        limits = {"multiprocessor_count": 8, "max_shared_mem": 100_000}
        driver = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda _: limits))
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)


@contextmanager
def emulated(monkeypatch, order, **options):
    """Yields the Card that replaces CUDA. At the end all copies have arrived; see Card.faults."""
    card = Card(order, **options)
    card.install(monkeypatch)
    run = LocalDesk._run

    def run_with_card(*args):
        """Runs an engine's thread: torch keeps its modes for each thread."""
        with Calls(), card:
            run(*args)

    monkeypatch.setattr(LocalDesk, "_run", run_with_card)
    with device_guard(), Calls():
        with card:
            yield card
            card.synchronize()
        card.is_closed = True


@contextmanager
def device_guard():
    """C++ changes the current device around indexing and similar operations. A torch without CUDA
    has no guard that does so; the guard of the meta device, which does nothing, replaces it."""
    name = "_ZN3c104impl26device_guard_impl_registryE"
    folder = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libc10.*"))))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, name)
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


def with_index(x):
    if isinstance(x, torch.device):
        return DEVICE if x.type == "cuda" else x
    return DEVICE if isinstance(x, str) and x == "cuda" else x


def inner(tree):
    return tree_map(lambda x: x.inner if isinstance(x, CudaTensor) else x, tree)


def where():
    """Returns the innermost places in the code under test."""
    frames = [f for f in traceback.extract_stack() if "mmdeploy_llm/" in f.filename]
    frames += [f for f in traceback.extract_stack() if "/plugins/" in f.filename]
    return " < ".join(
        f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames[:-4:-1]
    )


def same(a, b):
    one, other = (torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()) for x in (a, b))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def garbage(tensor):
    """Fills every value with NaN, -1 or True."""
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if tensor.dtype.itemsize == 1 and is_float:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan") if is_float else True if tensor.dtype is torch.bool else -1)


@cache
def _written_places(func):
    arguments = func._schema.arguments
    return [
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


def written(func, args, kwargs):
    """Returns the tensors of the card that an operation writes to."""
    found = []
    for place, name in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [x for x in tree_leaves(value) if isinstance(x, CudaTensor)]
    return found
