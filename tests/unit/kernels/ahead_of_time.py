"""Kernels compiled for GPUs that are not there, as Triton compiles them when they are launched.

What is launched is recorded: constants, warps and stages are those that the product computes, and
types and alignments those that Triton reads off its tensors.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tandem.kernels import (
    triton_attention,
    triton_draws,
    triton_layer,
    triton_verdicts,
)

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_KERNELS = (
    triton_attention.attend,
    triton_draws.find,
    triton_draws.pick,
    triton_layer.turn_and_write,
    triton_layer.gate,
    triton_verdicts.judge,
    triton_verdicts.follow,
)
# An instruction's name, after its address and the predicate under which it runs.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)")


@dataclass(frozen=True)
class Compiled:
    """A kernel in a GPU's own instructions.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread, in memory.
        shared: bytes of shared memory.
        instructions: how often each stands there.
    """

    registers: int
    stack: int
    shared: int
    instructions: Counter[str]

    @property
    def spills(self) -> int:
        """Instructions that keep registers in memory."""
        return self.instructions["LDL"] + self.instructions["STL"]

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack} bytes of stack, {self.spills} spills,"
            f" {self.shared / 1024:.0f} KiB shared"
        )


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: of Triton.
        args: by their order.
        options: the others: constants, and how to compile.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def _specialised(self, target: GPUTarget) -> tuple[Any, ...]:
        """Options, types, constants and alignments for which the kernel is compiled."""
        backend, kernel = make_backend(target), self.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        found: tuple[Any, ...] = kernel._pack_args(
            backend, self.options, *bind(*self.args, **self.options)
        )
        return found

    def key(self) -> str:
        """The same for launches of the same compiled kernel."""
        return repr(self._specialised(GPUTarget("cuda", 90, 32)))

    def compiled(self, capability: int) -> Compiled:
        """For GPUs of a compute capability: 90 is 9.0."""
        target = GPUTarget("cuda", capability, 32)
        options, types, constants, alignments = self._specialised(target)
        source = ASTSource(self.kernel, types, constants, alignments)
        kernel = triton.compile(source, target=target, options=options.__dict__)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            told = _told(file.name, "-res-usage", "-sass")
        registers, stack = (int(re.findall(rf"{name}:(\d+)", told)[0]) for name in ("REG", "STACK"))
        instructions = Counter(_INSTRUCTION.findall(told))
        assert instructions["EXIT"], "no instructions found"
        return Compiled(registers, stack, kernel.metadata.shared, instructions)


def _told(file: str, *options: str) -> str:
    done = subprocess.run([_TOOL, *options, file], capture_output=True, text=True, check=True)
    return done.stdout


def launches(run: Callable[[], object]) -> list[Launch]:
    """What `run` launches, and does not wait for."""
    found: list[Launch] = []

    def recorder(kernel: Any) -> Callable[..., None]:
        def record(*args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            found.append(Launch(kernel, args, options))

        return record

    with pytest.MonkeyPatch.context() as patch:
        for kernel in _KERNELS:
            patch.setattr(kernel, "run", recorder(kernel))
        run()
    return found
