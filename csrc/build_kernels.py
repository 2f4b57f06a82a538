"""Compiles csrc/kernel with nvcc into libdash_kernels.so: one object an instance, in parallel.

setup.py calls it. It also runs alone, which is the quick way while working on a kernel:

    python csrc/build_kernels.py                                    # into dash_flash_attn/lib
    ninja -f build/kernels/build.ninja build/kernels/bf16_d128_shift.o   # after that: one instance

It needs nvcc, ninja and the CUTLASS headers, and neither torch nor setuptools. Everything is kept in
build/kernels, so that a second call compiles only what changed. Environment variables:

    DASH_JOBS          compilations at a time (default: one a CPU)
    DASH_SKIP_CUDA     1: build no kernels
    DASH_REQUIRE_CUDA  1: where setup.py would build a package without kernels, the build fails
    CUTLASS_PATH       a CUTLASS checkout to use instead of the pinned wheel's headers
    CUDA_HOME          a CUDA toolkit to use instead of the nvcc on PATH (CUDA_PATH too)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libdash_kernels.so"
REPORT = "ptxas_report.txt"
OLDEST_NVCC = (12, 4)

# Relative to ROOT, where ninja runs: a tree that is moved has the same command lines, and is up to date.
WORK = Path("build/kernels")

FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-lineinfo"),
    "-gencode=arch=compute_90a,code=sm_90a",
    *("--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("-Xcompiler", "-fPIC"),
    *("-Xptxas", "-v"),
]


class Unavailable(Exception):
    """The kernels can't be built here; the text says why."""


class Instance(NamedTuple):
    """One instantiation of the backward kernel: the values of the macros of backward_instance.cu."""

    element: str
    head_dim: int
    policy: str

    @property
    def name(self) -> str:
        """The object's name in build/kernels and in the report."""
        snake_case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.policy).lower()
        return f"{self.element}_d{self.head_dim}_{snake_case}"

    @property
    def defines(self) -> str:
        """The compiler's options."""
        return f"-DDASH_ELEMENT={self.element} -DDASH_HEAD_DIM={self.head_dim} -DDASH_POLICY={self.policy}"


INSTANCES = [
    Instance(*values)
    for values in itertools.product(
        ("bf16", "fp16"), (64, 128), ("Naive", "Descending", "Shift", "SymmetricShift")
    )
]


@dataclass(frozen=True)
class Compiler:
    """An nvcc that is new enough."""

    path: str
    version: tuple[int, int]
    version_text: str

    @classmethod
    def find(cls) -> Compiler:
        """The first nvcc of $CUDA_HOME, $CUDA_PATH, $PATH and /usr/local/cuda."""
        roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
        candidates = [shutil.which("nvcc", path=os.path.join(root, "bin")) for root in roots if root]
        candidates += [shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]
        path = next(filter(None, candidates), None)
        if path is None:
            raise Unavailable("no nvcc in $CUDA_HOME, $PATH or /usr/local/cuda")
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
        if match is None:
            raise Unavailable(f"{path} --version prints no version")
        version = (int(match[1]), int(match[2]))
        if version < OLDEST_NVCC:
            raise Unavailable(f"{path} is version {match[3]}, and 12.4 is the oldest that can build them")
        return cls(path, version, match[3])


def find_compiler() -> Compiler:
    """The nvcc to use; raises Unavailable where there is none or DASH_SKIP_CUDA=1."""
    if os.environ.get("DASH_SKIP_CUDA") == "1":
        raise Unavailable("DASH_SKIP_CUDA=1")
    return Compiler.find()


def cutlass_include() -> Path:
    """The folder with cute/ and cutlass/: of $CUTLASS_PATH, or of the installed wheel nvidia-cutlass."""
    override = os.environ.get("CUTLASS_PATH")
    if override:
        include = Path(override).resolve() / "include"
        if not (include / "cute" / "tensor.hpp").is_file():
            raise RuntimeError(f"CUTLASS_PATH={override} has no include/cute/tensor.hpp")
        return include

    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "nvcc is here but the CUTLASS headers are not: pip install nvidia-cutlass==4.2.0.0, "
            "or set CUTLASS_PATH to a checkout, or DASH_SKIP_CUDA=1 to build without kernels"
        )
    # pip's isolated builds unpack the wheel to another place each time. The command lines name a link
    # instead, by version, or each build would compile everything again.
    link = WORK / f"cutlass-{importlib.metadata.version('nvidia-cutlass')}"
    (ROOT / link).unlink(missing_ok=True)
    (ROOT / link).symlink_to(Path(spec.origin).parent / "source" / "include")
    return link


def ninja_text(compiler: Compiler, include: Path) -> str:
    """The contents of build.ninja."""
    # System headers are not tracked (-MMD): CUTLASS changes with its version only, which is in the path.
    compile_command = (
        f"{compiler.path} {' '.join(FLAGS)} $defines -I csrc -isystem {include} "
        "-MMD -MF $out.d -c $in -o $out > $out.txt 2>&1 || { cat $out.txt; exit 1; }"
    )
    # The C interface is all that leaves the library; above all the static CUDA runtime stays inside,
    # since torch brings its own.
    link_command = (
        f"{compiler.path} -shared -gencode=arch=compute_90a,code=sm_90a -cudart static "
        f"-Xlinker --version-script={WORK}/exports.map -Xlinker -z,defs $in -o $out"
    )
    lines = [
        f"builddir = {WORK}",
        "rule compile",
        f"  command = {compile_command}",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $out",
        "rule link",
        f"  command = {link_command}",
        "  description = link $out",
    ]
    objects = []

    def add(name: str, source: str, defines: str) -> None:
        target = f"{WORK}/{name}.o"
        lines.extend([f"build {target} | {target}.txt: compile {source}", f"  defines = {defines}"])
        objects.append(target)

    for instance in INSTANCES:
        add(instance.name, "csrc/kernel/backward_instance.cu", instance.defines)
    add("launch", "csrc/kernel/launch.cu", "")
    lines += [
        f"build {WORK}/{LIBRARY}: link {' '.join(objects)} | {WORK}/exports.map",
        f"default {WORK}/{LIBRARY}",
    ]
    return "\n".join(lines) + "\n"


def ptxas_report(compiler: Compiler) -> str:
    """What the compiler said of each object, under a heading with the object's name."""
    parts = [f"nvcc {compiler.version_text}\n"]
    for name in [*(instance.name for instance in INSTANCES), "launch"]:
        parts.append(f"== {name}\n{(ROOT / WORK / f'{name}.o.txt').read_text()}")
    return "".join(parts)


def find_ninja() -> str:
    """The ninja of the Python package, which need not be on PATH, or else the one on PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        from ninja import BIN_DIR

        bundled = shutil.which("ninja", path=BIN_DIR)
        if bundled:
            return bundled
    found = shutil.which("ninja")
    if found is None:
        raise RuntimeError("ninja not found: pip install ninja")
    return found


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time of a file whose contents stay, so that nothing is rebuilt for it."""
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def build(target: Path) -> None:
    """Builds the kernel library and its report into the folder `target`.

    Raises Unavailable where there is nothing to build with, RuntimeError or CalledProcessError where
    the build fails.
    """
    compiler = find_compiler()
    work = ROOT / WORK
    work.mkdir(parents=True, exist_ok=True)
    write_if_changed(work / "exports.map", "{ global: dash_*; local: *; };\n")
    write_if_changed(work / "build.ninja", ninja_text(compiler, cutlass_include()))
    jobs = os.environ.get("DASH_JOBS") or str(os.cpu_count() or 1)
    subprocess.run([find_ninja(), "-f", str(WORK / "build.ninja"), "-j", jobs], cwd=ROOT, check=True)

    write_if_changed(work / REPORT, ptxas_report(compiler))
    target.mkdir(parents=True, exist_ok=True)
    for name in (LIBRARY, REPORT):
        # By way of a rename: a process may have the old library mapped.
        shutil.copyfile(work / name, target / f"{name}.new")
        os.replace(target / f"{name}.new", target / name)


def main() -> int:
    """Builds in place."""
    try:
        build(ROOT / "dash_flash_attn" / "lib")
    except (Unavailable, RuntimeError) as error:
        print(f"kernels not built: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
