"""Build hook of the wheel: compile `exmy._kernels` if a C compiler is available."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

KERNELS = Extension(
    "exmy._kernels",
    sources=["codecs/exmy/_kernels.c"],
    extra_compile_args=["-O3", "-ffp-contract=off"],  # fused multiply-adds would round unlike the reference
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,  # without a compiler, exmy runs on `exmy.reference`
)


class KernelsHook(BuildHookInterface[Any]):
    """Put the compiled module into the wheel, or beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written; if that fails, the wheel is pure Python."""
        self.scratch = tempfile.TemporaryDirectory()
        command = build_ext(Distribution({"ext_modules": [KERNELS]}))
        command.build_temp = self.scratch.name
        command.build_lib = "codecs" if version == "editable" else self.scratch.name
        command.ensure_finalized()
        compiled = Path(command.get_ext_fullpath(KERNELS.name))
        compiled.unlink(missing_ok=True)  # an earlier install may have built it from another source
        command.run()
        if version != "editable" and compiled.exists():
            build_data["force_include"][str(compiled)] = f"exmy/{compiled.name}"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiler's temporary files."""
        self.scratch.cleanup()
