"""Writes a bill of materials into a wheel: python tools/wheels/sbom.py WHEEL VERSION_OF_NANOBIND VERSION_OF_GCC

The wheel gets `sboms/infinilm.cdx.json` in its .dist-info (PEP 770): CycloneDX 1.6 with what is compiled in, and what
the package asks for beside it.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.contrib.this.builders import this_component
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

LICENSES = LicenseFactory()


def library(name: str, version: str | None, license_id: str | None, purl: PackageURL | None = None) -> Component:
    """Return a library that is part of the wheel."""
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        licenses=[LICENSES.make_from_string(license_id)] if license_id else [],
    )


def compiled_in(names: list[str], nanobind: str, gcc: str) -> list[Component]:
    """Return what the libraries of a wheel with these files contain, by the versions of nanobind and of gcc."""
    parts = [
        library("nanobind", nanobind, "BSD-3-Clause", PackageURL("pypi", None, "nanobind", nanobind)),
        library("robin-map", None, "MIT"),
        library("libstdc++", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1"),
    ]
    if any(name.endswith("libinfinilm_cuda.so") for name in names):
        parts.append(library("cudart_static", None, "LicenseRef-NVIDIA-CUDA-EULA"))
    return parts


def main(wheel: Path, nanobind: str, gcc: str) -> None:
    """Add the bill to a wheel, in place."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    bom = Bom()
    bom.metadata.tools.components.add(this_component())
    package = library(metadata["Name"], metadata["Version"], metadata["License-Expression"])
    bom.metadata.component = package
    parts = compiled_in(names, nanobind, gcc)
    for requirement in metadata.get_all("Requires-Dist", []):
        if "extra ==" not in requirement:
            name = re.match(r"[\w.-]+", requirement)[0]
            needed = library(name, None, None, PackageURL("pypi", None, name))
            needed.scope = ComponentScope.REQUIRED
            needed.description = requirement
            parts.append(needed)
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(package, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "wheel", "unpack", wheel, "-d", folder], check=True, capture_output=True)
        (unpacked,) = Path(folder).iterdir()
        (unpacked / info / "sboms").mkdir(exist_ok=True)
        (unpacked / info / "sboms" / "infinilm.cdx.json").write_text(text)
        wheel.unlink()
        pack = [sys.executable, "-m", "wheel", "pack", unpacked, "-d", wheel.parent]
        subprocess.run(pack, check=True, capture_output=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python tools/wheels/sbom.py WHEEL VERSION_OF_NANOBIND VERSION_OF_GCC")
    main(Path(sys.argv[1]), *sys.argv[2:])
