"""Compiling kernels for a GPU that is not here: what a call would launch, built for a named target."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend

from models.kvm.kernels.launch import Launch
from models.kvm.kernels.tuning import Target

GPU_TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
ELEMENT_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# How AMD's compiler is told that memory is reached: by buffer operations where a tensor takes less than
# 2 GiB, by them where it can itself prove that they reach as far, or not at all, as Triton's users ask it to
# where it fails with them. NVIDIA's compiler knows no difference.
Memory = Literal["buffers", "tensors of 2 GiB", "no buffers"]
NO_BUFFERS = ("AMDGCN_USE_BUFFER_OPS", "0")
BUFFER_INSTRUCTION = r"\bbuffer_(?:load|store)_"
MATRIX_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"(?<!w)(?<!wg)mma\.sync",
    "mfma": r"v_mfma_",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel as built for one target."""

    kernel: str
    target: str
    registers: int  # of a thread; AMD: vector registers, accumulators included
    spills: int  # loads and stores of what did not fit (NVIDIA), or registers that did not fit (AMD)
    shared_bytes: int
    warps: int
    instructions: int  # lines of PTX, or of AMD's assembly
    matrix_instructions: dict[str, int]
    buffer_instructions: int

    @property
    def uses_matrix_units(self) -> bool:
        return bool(self.matrix_instructions)


def compile_launch(launch: Launch, memory: Memory = "buffers") -> Compiled:
    target = GPU_TARGETS[launch.target.name]
    with _reached_by(memory):
        source = _source(launch, make_backend(target), large=memory == "tensors of 2 GiB")
        built = triton.compile(source, target=target, options=launch.tile.options(launch.target))
    text = built.asm["ptx"] if target.backend == "cuda" else built.asm["amdgcn"]
    found = {name: len(re.findall(pattern, text)) for name, pattern in MATRIX_INSTRUCTIONS.items()}
    registers, spills = _cuda_usage(built) if target.backend == "cuda" else _hip_usage(text)
    return Compiled(
        launch.kernel.__name__,
        launch.target.name,
        registers,
        spills,
        built.metadata.shared,
        launch.tile.warps,
        _instructions(text, launch.target),
        {name: count for name, count in found.items() if count},
        len(re.findall(BUFFER_INSTRUCTION, text)),
    )


@contextmanager
def _reached_by(memory: Memory) -> Iterator[None]:
    name, off = NO_BUFFERS
    before = os.environ.pop(name, None)
    if memory == "no buffers":
        os.environ[name] = off
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _source(launch: Launch, backend: BaseBackend, large: bool) -> ASTSource:
    """The kernel as a launch would specialise it: on pointers that are multiples of 16, and no number.

    large: as for tensors of 2 GiB and more.
    """
    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = "*" + ELEMENT_NAMES[value.dtype]
            found = backend.get_tensor_specialization(value, align=True)
            attributes[(i,)] = backend.parse_attr(found.replace("S", "") if large else found)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    for i, name in enumerate(names[len(launch.arguments) :], len(launch.arguments)):
        signature[name] = "constexpr"
        constants[(i,)] = launch.constants[name]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _cuda_usage(built: Any) -> tuple[int, int]:
    """Registers of a thread, and loads and stores of its stack, from tools that ship beside the compiler.

    A stack of which nothing is loaded or stored costs nothing: ptxas reserves a few bytes at times.
    """
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _said([str(folder / "cuobjdump"), "-res-usage", file.name])
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, f"cuobjdump says {usage!r}"
        if found[2] == "0":
            return int(found[1]), 0
        code = _said([str(folder / "nvdisasm"), file.name])
    return int(found[1]), len(re.findall(r"\b(?:STL|LDL)\b", code))


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hip_usage(text: str) -> tuple[int, int]:
    def count(field: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{field}:\s+(\d+)", text))

    return count("vgpr_count"), count("vgpr_spill_count") + count("sgpr_spill_count")


def _instructions(text: str, target: Target) -> int:
    ptx, amdgcn = r"^\s+[a-z@][\w.@%!]*\s.*;$", r"^\s+(?:s|v|ds|buffer|global)_\w+"
    pattern = ptx if target.backend == "cuda" else amdgcn
    return len(re.findall(pattern, text, flags=re.MULTILINE))
