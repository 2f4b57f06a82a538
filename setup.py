"""Builds the two binaries: `_native` (always) and the kernel library (where nvcc is). See csrc/."""

import os
import shutil
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

import build_kernels  # noqa: E402


class BuildBinaries(build_ext):
    """build_ext, and then the kernels."""

    def run(self) -> None:
        """Builds into the wheel's folder, or in place."""
        if os.environ.get("DASH_REQUIRE_CUDA") == "1":
            try:
                build_kernels.find_compiler()
            except build_kernels.Unavailable as reason:
                sys.exit(f"dash_flash_attn: DASH_REQUIRE_CUDA=1, and there can be no kernels: {reason}")
        super().run()
        package = ROOT / "dash_flash_attn" if self.inplace else Path(self.build_lib, "dash_flash_attn")
        try:
            build_kernels.build(package / "lib")
        except build_kernels.Unavailable as reason:
            print(f"dash_flash_attn: built without its kernels: {reason}", file=sys.stderr)
            if not self.inplace:
                # The folder may hold an earlier build's kernels, and a wheel takes all that is there.
                shutil.rmtree(package / "lib", ignore_errors=True)


def relative(pattern: str) -> list[str]:
    """The files of a glob pattern, as setuptools wants them: relative, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


setup(
    ext_modules=[
        Pybind11Extension(
            "dash_flash_attn._native",
            relative("csrc/bindings/*.cpp"),
            include_dirs=["csrc"],
            depends=relative("csrc/*/*.h"),
            cxx_std=17,
            libraries=["dl"],
        )
    ],
    cmdclass={"build_ext": BuildBinaries},
)
