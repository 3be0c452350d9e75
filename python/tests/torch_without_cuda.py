"""Creates stub libraries, so that torch loads on a host without CUDA, for tests on the CPU.

The wheel of torch on PyPI depends on 3 GB of NVIDIA libraries. Installed without them (``--no-deps``) it does not load.
This program creates a stub for each missing library, with all symbols that torch references. Every function returns
100, CUDA's "no device", so torch reports that CUDA is not available.

Run it with the interpreter into which torch was installed. It needs ``cc`` and ``readelf``. A second run does nothing.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

CUDA_LIBRARIES = re.compile(r"lib(cu|nv|nccl)")
SYSTEM_VERSIONS = re.compile(r"GLIBC|GCC_|CXXABI|GOMP|OMP_")
"""Symbol versions of the C, C++ and OpenMP libraries."""
EXCLUDED_SYMBOLS = re.compile(r"_?Py|_Z(NK?)?St|_Z[dn][al]")
"""Symbols of Python, of ``std::`` and of new and delete, which some libraries reference without a version. The whole
process would use a stub of them, and the next C++ extension would crash."""
FUNCTION_BODY = {"x86_64": "mov $100, %eax; ret", "aarch64": "mov w0, #100; ret"}


@dataclass
class Symbols:
    """Symbols that torch's libraries reference and define."""

    libraries: set[str] = field(default_factory=set)
    """Names of the libraries that they are linked with."""
    home: dict[str, str] = field(default_factory=dict)
    """Library of each symbol version."""
    referenced: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Version (may be empty) of each referenced symbol, and whether it is data."""
    defined: set[str] = field(default_factory=set)

    def read(self, file: Path) -> None:
        self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", file)))
        library = ""
        for line in readelf("-V", file).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and CUDA_LIBRARIES.match(library):
                self.home[found[1]] = library
        for line in readelf("--dyn-syms", file).splitlines():
            match line.split():
                case [number, _, _, kind, binding, _, section, name, *_] if number.endswith(":"):
                    name, _, version = name.partition("@")
                    if section != "UND":
                        self.defined.add(name)
                    elif binding == "GLOBAL" and kind != "TLS":
                        data = kind == "OBJECT" or name.startswith(("_ZTV", "_ZTI", "_ZTS"))
                        self.referenced[name] = (version.lstrip("@"), data)


def readelf(option: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", option, str(file)], check=True, capture_output=True, text=True).stdout


def build(library: Path, symbols: dict[str, bool], version: str | None) -> None:
    """Builds a shared library with these symbols. The value tells whether a symbol is data."""
    lines = ['.section .note.GNU-stack,"",%progbits']
    for name, data in sorted(symbols.items()):
        function = (".text", "function", FUNCTION_BODY[platform.machine()])
        section, kind, body = (".data", "object", ".zero 256") if data else function
        lines += [section, ".balign 16", f'.globl "{name}"', f'.type "{name}", %{kind}', f'"{name}": {body}']
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.s"), Path(folder, "stub.map")
        source.write_text("\n".join(lines) + "\n")
        command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
        if version is not None:
            script.write_text(f"{version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main() -> None:
    torch = Path(sysconfig.get_path("platlib"), "torch")
    folder = torch / "lib"
    if not folder.is_dir():
        sys.exit(f"there is no torch in {torch.parent}")
    symbols = Symbols()
    for file in [*folder.glob("*.so*"), *torch.glob("_C.*.so")]:
        symbols.read(file)
    missing = sorted(name for name in symbols.libraries if CUDA_LIBRARIES.match(name) and not (folder / name).exists())

    versions = {library: version for version, library in symbols.home.items()}
    stubs: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    for name, (version, data) in symbols.referenced.items():
        if name in symbols.defined or SYSTEM_VERSIONS.search(version) or EXCLUDED_SYMBOLS.match(name):
            continue
        # For a symbol without a version, the loader uses the first library that defines it, so any library can have it.
        homes = [symbols.home[version]] if version in symbols.home else [m for m in missing if m not in versions]
        for library in homes:
            stubs[library][name] = data
    for library in missing:
        build(folder / library, stubs[library], versions.get(library))
    print(f"created {len(missing)} stub libraries in {folder}" if missing else "no library is missing")


if __name__ == "__main__":
    main()
