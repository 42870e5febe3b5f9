"""What the design promises about the code itself: arrows, doors, sizes, torch-free commands, no danger."""

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("parallel", "models", "kvm_dist", "launch")  # a floor imports itself and those before it
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FLA_LAYERS = ("rwkv7", "gated_deltanet", "kda", "mamba2", "deltanet", "gla")  # one file a layer

# Each heavy third party has one door: module -> files or folders that may import it.
DOORS = {
    "deepspeed": ["parallel/engine/"],
    "fla": [f"models/layers/{kind}.py" for kind in FLA_LAYERS],
    "triton": ["models/kvm/kernels/"],
    "transformers": ["models/hf/"],
    "webdataset": ["kvm_dist/data/"],
    "pyrwkv_tokenizer": ["kvm_dist/data/"],
    "mlflow": ["kvm_dist/tracking/", "kvm_dist/tracking.py"],
    "matplotlib": ["kvm_dist/plots/"],
    "submitit": ["launch/slurm.py"],
    "typer": [f"launch/{name}cli.py" for name in ("", "bench_", "evaluate_", "convert_", "miniature_")],
    "lm_eval": ["kvm_dist/evaluate/lm_eval.py"],
    "torch.distributed": ["parallel/"],
}

LARGEST_FILE = 300
LARGEST_FUNCTION = 60
LARGER_FOR_A_REASON: dict[str, str] = {}  # "path" or "path:function" -> why it reads better in one piece


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute here"
            assert node.module is not None, "an absolute import has a module"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring: saying more about a function must not cost it its place."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        said = node.body[0]
        length -= (said.end_lineno or said.lineno) - said.lineno + 1
    return length


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The code without comments and strings, so that prose may name what code may not use."""
    lines: dict[int, list[str]] = {}
    kinds = {tokenize.COMMENT, tokenize.STRING}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in kinds:
            lines.setdefault(token.start[0], []).append(token.string)
    return ((number, " ".join(parts)) for number, parts in lines.items())


def test_a_floor_imports_only_floors_below_it() -> None:
    wrong = []
    for path in SOURCES:
        floor = FLOORS.index(path.relative_to(ROOT).parts[0])
        above = {*FLOORS[floor + 1 :], "tests"}
        wrong += [
            f"{name_of(path)}:{line}: {name}" for line, name in imports(path) if name.split(".")[0] in above
        ]
    assert wrong == []


def test_each_heavy_package_is_imported_behind_its_own_door() -> None:
    wrong = []
    for path in SOURCES:
        for line, imported in imports(path):
            for package, doors in DOORS.items():
                inside = imported == package or imported.startswith(package + ".")
                if inside and not any(name_of(path).startswith(door) for door in doors):
                    wrong.append(f"{name_of(path)}:{line}: {imported} belongs behind {' or '.join(doors)}")
    assert wrong == []


PROGRAMS = ("squeue", "scancel", "scontrol", "srun")


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_of_slurm_is_called_in_one_place(program: str) -> None:
    """So that how long it may take, and what its failure means, is said once."""
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List)
        and node.elts
        and isinstance(node.elts[0], ast.Constant)
        and node.elts[0].value == program
    ]
    assert len(calls) == 1, calls


def test_package_files_only_name_the_public_api() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    for path in SOURCES:
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                assert isinstance(node, allowed), f"{name_of(path)}:{node.lineno} does more than name things"
                if isinstance(node, ast.Assign):
                    assert ast.unparse(node.targets[0]) == "__all__", f"{name_of(path)}:{node.lineno}"


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in SOURCES:
        text = path.read_text()
        if (length := len(text.splitlines())) > LARGEST_FILE:
            large.append((name_of(path), length))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = function_lines(node)
                if length > LARGEST_FUNCTION:
                    large.append((f"{name_of(path)}:{node.name}", length))
    assert [f"{name}: {length} lines" for name, length in large if name not in LARGER_FOR_A_REASON] == []
    assert set(LARGER_FOR_A_REASON) <= {name for name, _ in large}, "an exception that is no longer needed"


def test_names_say_what_a_file_is_about() -> None:
    for path in SOURCES:
        assert path.stem.removesuffix("s") not in {"util", "helper", "manager", "common", "misc"}, name_of(
            path
        )


def test_every_level_of_the_tests_is_a_package() -> None:
    folders = {path.parent for path in TESTS}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


FORBIDDEN_CODE = {
    "shell = True": "values must never pass through a shell",
    "os . system (": "values must never pass through a shell",
    "os . popen (": "values must never pass through a shell",
    "eval (": "data is never code",
    "exec (": "data is never code",
    "weights_only = False": "loading must run no pickle",
    "allow_pickle = True": "loading must run no pickle",
    "trust_remote_code = True": "a model folder must not run code unasked",
    "except :": "name the errors that are meant",
    "except BaseException : pass": "name the errors that are meant",
    "atomic_add": "float atomics make results depend on order",
    "make_block_ptr": "gone from newer triton",
    "cp_context": "fla's own context parallelism refuses AMD and states; ours is SequenceContext",
}
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")


def test_no_code_that_runs_data_or_hides_errors() -> None:
    found = []
    for path in SOURCES:
        for line, code in code_lines(path):
            for pattern, why in FORBIDDEN_CODE.items():
                hit = code.startswith(pattern) or f" {pattern}" in code
                if hit and f". {pattern}" not in code:
                    found.append(f"{name_of(path)}:{line}: {pattern}: {why}")
    assert found == []


def test_no_module_that_unpickles_is_imported() -> None:
    found = [
        f"{name_of(path)}:{line}: {name}"
        for path in SOURCES
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN_IMPORTS
    ]
    assert found == []


def test_an_address_on_all_interfaces_is_nowhere_in_the_sources() -> None:
    assert [name_of(path) for path in SOURCES if "0.0.0.0" in path.read_text()] == []


# A finder that refuses torch and everything that would pull it in.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "deepspeed", "fla", "triton", "transformers", "mlflow"}:
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Blocker())
from launch.cli import main
sys.argv = ["kvm-dist", *sys.argv[1:]]
main()
"""


def run_without_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER, *arguments],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_the_blocker_blocks(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    ended = run_without_torch(tmp_path, "sample", "checkpoint", "--prompt", "x")
    assert "torch was imported" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["data", "--help"],
        ["plan", "run.yaml"],
        ["plan", "run.yaml", "--json"],
        ["submit", "run.yaml", "--dry-run"],
        ["config", "show", "run.yaml"],
        ["config", "schema"],
        ["data", "prepare", "texts", "shards"],
        ["checkpoint", "list", "."],
    ],
    ids=" ".join,
)
def test_a_command_that_needs_no_torch_imports_none(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("name: x\n")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / f"texts/{number}.txt").write_text(f"some words of {number}\n" * 50)
    ended = run_without_torch(tmp_path, *arguments)
    assert ended.returncode == 0, ended.stderr


def test_verifying_data_and_checkpoints_needs_no_torch(tmp_path: Path) -> None:
    assert run_without_torch(tmp_path, "data", "check", "absent").returncode == 65
    assert run_without_torch(tmp_path, "checkpoint", "verify", "absent").returncode == 74


def test_converting_models_needs_no_transformers() -> None:
    program = BLOCKER.partition("from launch")[0].replace('"torch", ', "").replace('"triton", ', "")
    program += "import kvm_dist.convert.exporting, kvm_dist.convert.importing"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_starting_local_ranks_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: x\ndata: {path: absent}\n")
    ended = run_without_torch(tmp_path, "train", "run.yaml")
    assert ended.returncode == 65, ended.stderr
    assert "data.source" in ended.stderr
