"""Kernels in Triton's interpreter, and mutants of them."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem import kernels

# In float32, of numbers of about 1.
CLOSE = 1e-5


def compared(name: str, expected: Tensor, found: Tensor) -> Iterator[str]:
    """A fault unless two tensors are the same but for rounding, NaN being never the same."""
    apart = float((expected - found).abs().max())
    if not apart < CLOSE:
        yield f"{name} off by {apart:.2g}"


@contextmanager
def in_the_other_order() -> Iterator[None]:
    """Run the programs of a launch from the last to the first, as a device may."""
    from triton.runtime.interpreter import interpreter_builder as builder

    ordinary = builder.set_grid_idx

    def backwards(*at: int) -> None:
        ordinary(*(most - 1 - i for most, i in zip(builder.grid_dim, at, strict=True)))

    builder.set_grid_idx = backwards
    try:
        yield
    finally:
        builder.set_grid_idx = ordinary


def spare_the_interpreter() -> None:
    """It patches Triton's language at each call of a function by a kernel, where once in a launch
    is enough for all functions of a module; and it makes a table for each look at a type."""
    from triton.runtime import interpreter

    launch, patched = interpreter.GridExecutor.__call__, set[int]()
    look, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def launched(self: Any, *args: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *args, **options)

    def called(self: Any, *args: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **options)

    def dtype_of(kind: Any) -> Any:
        if (name := kind.scalar.name) not in dtypes:
            dtypes[name] = look(kind)
        return dtypes[name]

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called
    interpreter._get_np_dtype = dtype_of


@dataclass(frozen=True)
class Mutant:
    """A fault of a kernel.

    Attributes:
        file: of the kernel, a module of `kernels`.
        right: what stands there, once.
        wrong: in its place.
        case: that sees it.
    """

    file: str
    right: str
    wrong: str
    case: str


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """With a copy of the kernel's file, changed, in its place."""
    name = f"{kernels.__name__}.{mutant.file}"
    right = importlib.import_module(name)
    source = Path(str(right.__file__)).read_text()
    assert source.count(mutant.right) == 1, f"{mutant.right!r} is not there, or not once"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{mutant.file}.py")
        path.write_text(source.replace(mutant.right, mutant.wrong))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        wrong = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(wrong)
        setattr(kernels, mutant.file, wrong)
        try:
            yield
        finally:
            setattr(kernels, mutant.file, right)


def tried(faults: Callable[[], Iterable[str]]) -> list[str]:
    """Faults that are found, or the error that ended the search."""
    try:
        return list(faults())
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
