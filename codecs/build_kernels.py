"""Build hook of the wheel: compile the modules in C if a C compiler is available."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

_COMMON: dict[str, Any] = {
    "define_macros": [("Py_LIMITED_API", "0x030B0000")],
    "py_limited_api": True,
    "optional": True,  # without a compiler, exmy runs on `exmy.reference`, and tstore hashes with `xxhash`
}
EXTENSIONS = {
    "codecs": Extension(
        "exmy._kernels",
        sources=["codecs/exmy/_kernels.c"],
        extra_compile_args=["-O3", "-ffp-contract=off"],  # fused multiply-adds would round unlike the reference
        **_COMMON,
    ),
    ".": Extension(
        "tstore.core.format.kernels",
        sources=["tstore/core/format/kernels.c"],
        include_dirs=["codecs/xxhash"],
        extra_compile_args=["-O3"],
        **_COMMON,
    ),
}
"""The modules by the folder of their top-level package."""


class KernelsHook(BuildHookInterface[Any]):
    """Put the compiled modules into the wheel, or beside their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written; a module that fails to compile is left out."""
        self.scratch = tempfile.TemporaryDirectory()
        for folder, extension in EXTENSIONS.items():
            command = build_ext(Distribution({"ext_modules": [extension]}))
            command.build_temp = self.scratch.name
            command.build_lib = folder if version == "editable" else self.scratch.name
            command.ensure_finalized()
            compiled = Path(command.get_ext_fullpath(extension.name))
            compiled.unlink(missing_ok=True)  # an earlier install may have built it from another source
            command.run()
            if version != "editable" and compiled.exists():
                target = compiled.relative_to(self.scratch.name).as_posix()
                build_data["force_include"][str(compiled)] = target
                build_data["pure_python"] = False
                build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiler's temporary files."""
        self.scratch.cleanup()
