"""The order of imports, the package list, and a command line that starts light."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("quant", "engine", "bench", "reports", "cli")
HEAVY = ("torch", "transformers", "numpy", "pandas", "matplotlib")
FILES = sorted(path for folder in ORDER for path in (ROOT / folder).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """What loading the module imports: not the bodies of functions, nor `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_modules(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_left(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    allowed = ORDER[: ORDER.index(folder) + 1]
    for module in imported_modules(ast.parse(path.read_text())):
        top, *rest = module.split(".")
        assert top not in ORDER, f"{module}: import llmbench.{module}"
        if top == "llmbench":
            assert rest[0] in allowed, f"{folder} must not import {module}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(ROOT).parts[0] in ("reports", "cli")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_right_end_loads_no_models(path: Path) -> None:
    forbidden = {"torch", "transformers", "safetensors", "tokenizers", "datasets"}
    if path.relative_to(ROOT).parts[0] == "cli":
        forbidden |= set(HEAVY) | {"scipy", "pyarrow"}
    loaded = {module.split(".")[0] for module in top_level_imports(ast.parse(path.read_text()))}
    assert not loaded & forbidden


def test_package_list_names_every_package_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    on_disk = {
        "llmbench." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in FILES
        if path.name == "__init__.py"
    }
    assert set(listed) == on_disk
    assert len(listed) == len(set(listed))


def test_every_folder_with_modules_is_a_package() -> None:
    assert all((path.parent / "__init__.py").is_file() for path in FILES)


def test_package_files_hold_one_docstring_and_nothing_else() -> None:
    for path in FILES:
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert [type(node) for node in body] == [ast.Expr], path


def test_typing_links_lead_to_the_five_folders() -> None:
    links = ROOT / ".typing" / "llmbench"
    assert {link.name: link.resolve() for link in links.iterdir()} == {
        name: ROOT / name for name in ORDER
    }


def test_help_starts_without_heavy_libraries() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
    script = f"{blocked}; from llmbench.cli.main import main; sys.exit(main(['--help']))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Commands:" in run.stdout


HEADER = '{"a": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}}'
SOUND = len(HEADER).to_bytes(8, "little") + HEADER.encode() + bytes(16)


def index_of(**shards: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": shards}).encode()


# Case C43: files by name, and what the refusal must name.
BROKEN_CHECKPOINTS = {
    "shard absent": (
        {
            "model-00001-of-00002.safetensors": SOUND,
            "model.safetensors.index.json": index_of(
                a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"
            ),
        },
        "lacks model-00002-of-00002.safetensors",
    ),
    "truncated": ({"model.safetensors": SOUND[:-5]}, "cut short"),
    "lying index": (
        {
            "model-00001-of-00001.safetensors": SOUND,
            "model.safetensors.index.json": index_of(
                a="model-00001-of-00001.safetensors", norm="model-00001-of-00001.safetensors"
            ),
        },
        "tensor norm",
    ),
    "header too long": (
        {"model.safetensors": (10**12).to_bytes(8, "little") + b"{}"},
        "its header claims 1000000000000 bytes",
    ),
    "traversal": ({"model.safetensors.index.json": index_of(a="../../etc/passwd")}, "outside"),
}


@pytest.mark.parametrize("fault", BROKEN_CHECKPOINTS)
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "hi"],
        ["quantize", "--output", "out"],
        ["serve-bench"],
        ["study", "kv-cache"],
    ],
    ids=" ".join,
)
def test_broken_checkpoint_is_refused_without_heavy_imports(
    command: list[str], fault: str, tmp_path: Path
) -> None:
    """Without torch and transformers nothing can be loaded: headers alone tell."""
    files, named = BROKEN_CHECKPOINTS[fault]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']))"
    arguments = [*command, str(tmp_path)]
    script = f"{blocked}; from llmbench.cli.main import main; sys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert named in done.stderr
    assert done.stdout == ""
