"""What the build made: the compiler's report on every kernel, the library's interface, the commands."""

import ast
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

import dash_flash_attn
from dash_flash_attn import _native, info, kernels, ops

ROOT = Path(__file__).resolve().parent.parent
INSTANCES = {
    f"{element}_d{head_dim}_{schedule}"
    for element, head_dim, schedule in itertools.product(
        ("bf16", "fp16"),
        (64, 128),
        ("naive", "descending", "rotating", "climbing", "opposite_heads", "symmetric_shift"),
    )
}

needs_kernels = pytest.mark.skipif(not kernels.LIBRARY.exists(), reason="built without the kernels")


def parse_report(text):
    """{object: {mangled kernel: (stack bytes, spill store bytes, spill load bytes)}} of a ptxas report."""
    objects = {}
    for part in text.split("\n== ")[1:]:
        name, _, body = part.partition("\n")
        entries = re.findall(r"Compiling entry function '(\w+)'", body)
        properties = {
            kernel: tuple(map(int, numbers))
            for kernel, *numbers in re.findall(
                r"Function properties for (\w+)\n\s+(\d+) bytes stack frame, "
                r"(\d+) bytes spill stores, (\d+) bytes spill loads",
                body,
            )
        }
        objects[name] = {kernel: properties[kernel] for kernel in entries}
    return objects


def complaints(text):
    """Lines in which the compiler says that it had to serialise, spill or ignore something."""
    return [
        line for line in text.splitlines() if re.search(r"C75\d\d|Potential Performance Loss|warning", line)
    ]


@pytest.fixture(scope="module")
def report():
    return kernels.LIBRARY.with_name("ptxas_report.txt").read_text()


@needs_kernels
def test_every_instance_is_compiled(report):
    objects = parse_report(report)
    assert objects.keys() == INSTANCES | {"launch"}
    for name in INSTANCES:
        assert objects[name], f"{name} has no kernel"
    kernel_names = [kernel for name in INSTANCES for kernel in objects[name]]
    assert len(set(kernel_names)) == len(kernel_names), "two objects hold the same instance"


@needs_kernels
def test_no_kernel_spills(report):
    for name, entries in parse_report(report).items():
        for kernel, (_, stores, loads) in entries.items():
            assert (stores, loads) == (0, 0), f"{name}: {kernel} spills"


@needs_kernels
def test_the_compiler_has_no_complaints(report):
    assert complaints(report) == []


def test_a_spill_and_a_serialised_wgmma_are_found():
    text = (
        "nvcc 13.0.88\n== one\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1kPf\n"
        "    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers\n"
        "== two\nptxas info    : 0 bytes gmem\n"
    )
    assert parse_report(text) == {"one": {"_Z1kPf": (16, 12, 8)}, "two": {}}
    assert len(complaints(text)) == 1


@needs_kernels
def test_the_library_loads_without_a_gpu():
    assert kernels.not_loaded() is None
    assert _native.kernels_loaded()


@needs_kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_library_says_that_there_is_no_gpu():
    _native.load_kernels(str(kernels.LIBRARY))
    with pytest.raises(RuntimeError, match=r"\w"):
        _native.resident_ctas(0)


@needs_kernels
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_the_library_exports_its_interface_only():
    symbols = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=just-symbols", kernels.LIBRARY],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    functions = ("backward_prepare", "backward_run", "resident_ctas", "stuck_report")
    assert set(symbols) == {f"dash_{function}" for function in functions}


def test_loading_something_else_fails(tmp_path):
    with pytest.raises(RuntimeError, match="cannot open"):
        _native.load_kernels(str(tmp_path / "missing.so"))
    with pytest.raises(RuntimeError, match="dash_backward_prepare"):
        _native.load_kernels(_native.__file__)


def run_module(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dash_flash_attn", *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_info_names_versions_and_the_reason():
    done = run_module("info")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["torch"].startswith(torch.__version__)
    assert lines["Python"] == ".".join(map(str, sys.version_info[:3]))
    verdict = re.search(r"kernels usable\s+(yes|no: .+)", done.stdout)[1]
    assert (verdict == "yes") == (info.unusable() is None)


def test_version():
    done = run_module("--version")
    assert done.returncode == 0
    assert done.stdout == f"dash_flash_attn {dash_flash_attn.__version__}\n"


def test_unknown_commands_are_refused():
    done = run_module("train")
    assert done.returncode == 2
    assert "info" in done.stderr and "demo" in done.stderr


def build(**environment):
    return subprocess.run(
        [sys.executable, ROOT / "csrc" / "build_kernels.py"],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip


@pytest.fixture
def old_toolkit(tmp_path):
    """$CUDA_HOME with an nvcc that cannot build the kernels."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.3, V12.3.107'\n")
    nvcc.chmod(0o755)
    return str(tmp_path)


def test_the_build_says_why_it_builds_no_kernels(old_toolkit):
    done = build(DASH_SKIP_CUDA="1")
    assert done.returncode == 1
    assert done.stderr == "kernels not built: DASH_SKIP_CUDA=1\n"

    done = build(CUDA_HOME=old_toolkit, DASH_SKIP_CUDA="0")
    assert done.returncode == 1
    assert done.stderr.endswith("is version 12.3.107, and 12.4 is the oldest that can build them\n")


@pytest.mark.parametrize("skip", ["0", "1"])
def test_a_build_that_requires_kernels_fails_without_them(old_toolkit, skip, tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path / "built"],
        capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"DASH_REQUIRE_CUDA": "1", "DASH_SKIP_CUDA": skip, "CUDA_HOME": old_toolkit},
    )  # fmt: skip
    assert done.returncode == 1
    reason = "DASH_SKIP_CUDA=1" if skip == "1" else "is version 12.3.107"
    assert re.search(rf"DASH_REQUIRE_CUDA=1, and there can be no kernels: .*{reason}", done.stderr)
    assert not list(tmp_path.glob("built/**/*.so")), "it was found out after a build of minutes"


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture
def gpu_without_kernels(monkeypatch, tmp_path):
    """A function that makes torch see a GPU of a compute capability, and takes the kernel library away."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU of a test")

    # The forward that follows is torch's, which this machine need not have.
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(ops, "attention_forward", lambda q, *_: (q, None))
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.delenv("DASH_STRICT", raising=False)
    caches = (kernels.not_loaded, kernels.unusable, kernels.falls_back)
    for cached in caches:
        cached.cache_clear()
    yield pretend
    for cached in caches:
        cached.cache_clear()


def call_cuda():
    x = torch.ones(1, 8, 2, 64, dtype=torch.bfloat16)
    return ops._forward_cuda(x, x, x, 0.1, True)


def told_in_three_calls(recwarn):
    """The text of the only warning."""
    for _ in range(3):
        call_cuda()
    (warning,) = recwarn
    return str(warning.message)


def test_hopper_without_kernels_is_told_once_what_it_costs(gpu_without_kernels, recwarn):
    gpu_without_kernels(HOPPER)
    text = told_in_three_calls(recwarn)
    assert "the package was built without its kernels" in text
    assert kernels.FALLBACK_COSTS.upper() in text and "GPU of a test" in text and "DASH_STRICT=1" in text
    assert kernels.FALLBACK_COSTS in (ROOT / "README.md").read_text()


def test_another_gpu_without_kernels_is_told_once(gpu_without_kernels, recwarn):
    gpu_without_kernels(AMPERE)
    text = told_in_three_calls(recwarn)
    assert "compute capability 8.0" in text and "FlashAttention-2" in text
    assert kernels.FALLBACK_COSTS.upper() not in text  # measured on a Hopper GPU


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_strict_is_an_error_before_anything_runs(gpu_without_kernels, capability, monkeypatch):
    gpu_without_kernels(capability)
    monkeypatch.setenv("DASH_STRICT", "1")
    ran = []
    monkeypatch.setattr(ops, "attention_forward", lambda *_: ran.append("forward"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="DASH_STRICT=1"):
            call_cuda()
        x = torch.ones(1, 8, 2, 64, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="DASH_STRICT=1"):
            ops._backward_cuda(x, x, x, x, x, torch.zeros(1, 2, 8), 0.1, True, "auto", 0)
    assert not ran


def test_source_distribution_and_wheel_without_cuda(tmp_path):
    def run(*command, cwd, **environment):
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True, text=True, cwd=cwd, env=os.environ | environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    for folder in ("csrc", "dash_flash_attn"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        shipped = {path for path in files if path.suffix not in (".so", ".pyc") and path.parts[1] != "lib"}
        assert shipped == {p.relative_to(source) for p in (source / folder).rglob("*") if p.is_file()}

    # Kernels of earlier builds, in place and for a wheel, must not get in.
    for parent in (
        source,
        source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}",
    ):
        (parent / "dash_flash_attn" / "lib").mkdir(parents=True)
        (parent / "dash_flash_attn" / "lib" / kernels.LIBRARY.name).touch()
    run(
        "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ".",
        cwd=source, DASH_SKIP_CUDA="1",
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as unpacked:
        names = unpacked.namelist()
        unpacked.extractall(tmp_path / "installed")
    assert {name.split("/")[0] for name in names} == {
        "dash_flash_attn",
        wheel.name.split("-cp")[0] + ".dist-info",
    }
    assert not any(name.startswith("dash_flash_attn/lib") for name in names)
    assert {"dash_flash_attn/_native.pyi", "dash_flash_attn/py.typed"} <= set(names)
    said = run("-m", "dash_flash_attn", "info", cwd=tmp_path / "installed")
    assert "the package was built without its kernels" in said


def declared(body):
    """{what a stub's module or class declares: its parameters, None for what is no function}."""
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
            parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            found[node.name] = None if is_property else parameters
        elif isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):  # ClassVar
            found[node.target.id] = None
    return found


def native_parameters(function):
    """From the signature that pybind11 writes in front of a docstring."""
    signature = function.__doc__.splitlines()[0]
    while signature != (signature := re.sub(r"\[[^\[\]]*\]", "", signature)):  # types and defaults
        pass
    return re.findall(r"(\w+): ", signature)


def test_the_stub_declares_what_the_module_has():
    tree = ast.parse((ROOT / "dash_flash_attn/_native.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    public = {name for name in dir(_native) if not name.startswith("_")}
    native_classes = {name for name in public if isinstance(getattr(_native, name), type)}
    functions = declared(tree.body)
    assert set(functions) == public - native_classes
    for name, parameters in functions.items():
        assert native_parameters(getattr(_native, name)) == parameters, name
    assert {name for name in classes if not name.startswith("_")} == native_classes
    for name in native_classes:
        native = getattr(_native, name)
        nodes = [classes[name], *(classes[base.id] for base in classes[name].bases)]
        members = {member: p for node in nodes for member, p in declared(node.body).items()}
        assert set(members) - {"__init__"} == {m for m in dir(native) if not m.startswith("_")}, name
        for member, parameters in members.items():
            if parameters is not None:
                assert native_parameters(getattr(native, member)) == parameters, f"{name}.{member}"
