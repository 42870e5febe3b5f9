"""What the kernels' source promises: one source for all GPUs, no block pointers, no order-dependent sums."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from models.kvm.kernels.tuning import TARGETS, Shape, choose, read_precision

KERNELS = sorted((Path(__file__).parents[4] / "models" / "kvm" / "kernels").rglob("*.py"))
NEVER = (
    "make_block_ptr",
    "advance_block",
    "atomic_",
    "make_tensor_descriptor",
    "inline_asm",
    "autotune",
    "heuristics",
)
JIT = [path for path in KERNELS if path.parent.name == "jit"]


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_there_are_kernels_to_read() -> None:
    names = [name for path in KERNELS for name, _ in calls(path)]
    assert names.count("tl.dot") >= 9


def test_every_product_states_its_precision() -> None:
    for path in KERNELS:
        for name, call in calls(path):
            if name == "tl.dot":
                assert "input_precision" in [one.arg for one in call.keywords], f"{path.name}:{call.lineno}"


def test_routing_and_float32_reads_never_round_to_tf32() -> None:
    """One tf32 pass has ten bits: it would send tokens to other slots."""
    for target in TARGETS.values():
        for shape in (Shape(64, 4), Shape(128, 4), Shape(256, 4)):
            assert {target.float32_dot, read_precision(target, shape)} <= {"ieee", "tf32x3"}
    for path in KERNELS:
        for name, call in calls(path):
            if name == "launch":
                given = {one.arg: ast.unparse(one.value) for one in call.keywords}
                if "PRECISION" in given:
                    routes = ast.unparse(call.args[0]) in ("route_kernel", "append_kernel")
                    assert given["PRECISION"].endswith("target.float32_dot" if routes else "call.precision")


def test_a_kernel_is_built_once_whatever_its_numbers_are() -> None:
    """Another build for a number that is 1 or a multiple of 16 would come in the middle of training."""
    names = []
    for path in JIT:
        module = import_module(f"models.kvm.kernels.jit.{path.stem}")
        for name, function in vars(module).items():
            if name.endswith("_kernel"):
                names.append(name)
                numbers = [one for one in function.params if not one.is_constexpr and one.name[:2] != "p_"]
                assert all(one.do_not_specialize for one in numbers), name
                assert len(numbers) >= 1, name
    assert len(names) == len(set(names)) >= 16


def test_no_block_pointers_no_atomics_and_no_timing() -> None:
    for path in KERNELS:
        for name, call in calls(path):
            assert not any(word in name for word in NEVER), f"{path.name}:{call.lineno}: {name}"


def test_rows_are_chosen_by_chip_and_shape_alone() -> None:
    first = [choose("read", target, Shape(128, 2)) for target in TARGETS.values()]
    assert first == [choose("read", target, Shape(128, 2)) for target in TARGETS.values()]
    assert choose("read", TARGETS["sm_90"], Shape(128, 2)) != choose("read", TARGETS["gfx942"], Shape(128, 2))
    assert choose("read", TARGETS["sm_90"], Shape(128, 2)) != choose("read", TARGETS["sm_90"], Shape(256, 2))


def test_launch_options_name_everything_whose_default_moves_between_versions() -> None:
    cuda = choose("read", TARGETS["sm_90"], Shape(128, 2)).options(TARGETS["sm_90"])
    assert cuda == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    hip = choose("read", TARGETS["gfx942"], Shape(128, 2)).options(TARGETS["gfx942"])
    assert hip == {
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": True,
        "waves_per_eu": 0,
        "matrix_instr_nonkdim": 16,
    }
