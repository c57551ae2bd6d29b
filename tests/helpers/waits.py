"""Where a round would wait for a GPU, found on the tensors of a CPU.

Tensors that are made with ``device=``, or copied to a device, count as those of the GPU, and so do all that were there
before; what is made without, or read back, is the host's. Kernels under Triton's interpreter are not looked into.
"""

from __future__ import annotations

import traceback

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "allclose", "__array__",
         "__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__", "__repr__"}  # fmt: skip
UPLOADS = {"tensor", "as_tensor", "asarray"}


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [each for part in parts for each in tensors(part)]


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class HostWaits(TorchFunctionMode):
    """While it is entered, ``found`` gets a line for every wait: what was called, and from where."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found, self._host, self._kept, self._underway, self._in_kernel = [], set(), [], set(), False
        launch = GridExecutor.__call__

        def outside(executor, *args, **kwargs):
            self._in_kernel = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._in_kernel = False

        monkeypatch.setattr(GridExecutor, "__call__", outside)

    def on_host(self, value):
        return isinstance(value, torch.Tensor) and address(value) in self._host

    def _put_on_host(self, result):
        for each in tensors(result):
            self._host.add(address(each))
            self._kept.append(each)  # so that no other tensor gets its address
        return result

    def _wait(self, name):
        self._underway.clear()
        frames = [each for each in traceback.extract_stack() if "/src/forerun/" in each.filename]
        self.found.append(f"{name} in {frames[-1].filename.split('/src/forerun/')[1]}:{frames[-1].lineno}")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            if self._in_kernel or name == "__get__":
                return function(*args, **kwargs)
            return self._call(function, name, args, kwargs)

    def _call(self, function, name, args, kwargs):
        given = tensors([args, kwargs])
        hosted = [self.on_host(each) for each in given]
        devices = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
        blocks, now_here, now_there = not kwargs.get("non_blocking"), False, False
        if name == "copy_" and len(given) == 2 and hosted[0] != hosted[1]:
            if hosted[0] and not blocks:
                self._underway.add(address(given[0]))
        elif name in ("to", "cpu") and not hosted[0]:
            now_here = name == "cpu" or "cpu" in args[1:]
            blocks = now_here and blocks
        elif name == "to" and devices:
            now_there = True
        elif (name in UPLOADS and devices) or name == "new_tensor":
            blocks = now_there = True
        elif name in READS:
            blocks = not all(hosted) or any(address(each) in self._underway for each in given)
        elif name in ("__getitem__", "__setitem__"):
            blocks = not hosted[0] and self._uploads(name, *args[1:])
        else:
            blocks = False
        if blocks:
            self._wait(name)
        result = function(*args, **kwargs)
        if now_here or now_there:
            result = result.clone()
        if now_here and not blocks:
            self._underway.add(address(result))
        if now_here or (not now_there and (all(hosted) if given else not devices)):
            self._put_on_host(result)
        return result

    def _uploads(self, name, index, value=0):
        """Whether an index or a value comes from the host, or a mask's size is asked for."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [each for each in parts if isinstance(each, torch.Tensor) and each.dtype is torch.bool]
        from_host = any(isinstance(each, list) or (self.on_host(each) and each.dim()) for each in (*parts, value))
        return from_host or (bool(masks) and not (name == "__setitem__" and isinstance(value, int | float)))
