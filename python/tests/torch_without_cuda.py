"""Makes torch load where there is no CUDA, for tests on the CPU: stand-ins for the libraries that its wheel was linked with.

The registry's wheel of torch wants 3 GB of NVIDIA's libraries. Installed without them (``--no-deps``) it does not even
load. This puts a library of the same name beside torch's own for each that is missing, with every symbol that torch
refers to: a function in it answers 100, which is CUDA's "no device", and torch then says that there is no CUDA.

Run it with the interpreter into which torch was installed. Needs ``cc`` and ``readelf``. Running it again does nothing.
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

ABSENT = re.compile(r"lib(cu|nv|nccl)")
OF_THE_SYSTEM = re.compile(r"GLIBC|GCC_|CXXABI|GOMP|OMP_")
"""Versions of symbols that the C, C++ and OpenMP libraries define."""
OF_OTHERS = re.compile(r"_?Py|_Z(NK?)?St|_Z[dn][al]")
"""Python's symbols, and those of ``std::`` and of new and delete, to which some libraries refer without a version. A stand-in
for one of these would be used by the whole process: the next C++ extension would die of it."""
ANSWER = {"x86_64": "mov $100, %eax; ret", "aarch64": "mov w0, #100; ret"}


@dataclass
class Symbols:
    """What torch's libraries ask for and what they have."""

    libraries: set[str] = field(default_factory=set)
    """Names of libraries that they are linked with."""
    home: dict[str, str] = field(default_factory=dict)
    """From the version of a symbol to the library that has it."""
    wanted: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """From a symbol to its version, which may be empty, and whether it is data."""
    defined: set[str] = field(default_factory=set)

    def read(self, file: Path) -> None:
        self.libraries |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", file)))
        library = ""
        for line in readelf("-V", file).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags", line)) and ABSENT.match(library):
                self.home[found[1]] = library
        for line in readelf("--dyn-syms", file).splitlines():
            match line.split():
                case [number, _, _, kind, binding, _, section, name, *_] if number.endswith(":"):
                    name, _, version = name.partition("@")
                    if section != "UND":
                        self.defined.add(name)
                    elif binding == "GLOBAL" and kind != "TLS":
                        data = kind == "OBJECT" or name.startswith(("_ZTV", "_ZTI", "_ZTS"))
                        self.wanted[name] = (version.lstrip("@"), data)


def readelf(what: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", what, str(file)], check=True, capture_output=True, text=True).stdout


def build(library: Path, symbols: dict[str, bool], version: str | None) -> None:
    """A shared library with these symbols; the value says whether one is data."""
    lines = ['.section .note.GNU-stack,"",%progbits']
    for name, data in sorted(symbols.items()):
        section, kind, body = (".data", "object", ".zero 256") if data else (".text", "function", ANSWER[platform.machine()])
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
    missing = sorted(name for name in symbols.libraries if ABSENT.match(name) and not (folder / name).exists())

    versions = {library: version for version, library in symbols.home.items()}
    stubs: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    for name, (version, data) in symbols.wanted.items():
        if name in symbols.defined or OF_THE_SYSTEM.search(version) or OF_OTHERS.match(name):
            continue
        # Without a version the loader takes the first library that has the name, so that any will do.
        homes = [symbols.home[version]] if version in symbols.home else [m for m in missing if m not in versions]
        for library in homes:
            stubs[library][name] = data
    for library in missing:
        build(folder / library, stubs[library], versions.get(library))
    print(f"{len(missing)} stand-ins in {folder}" if missing else "nothing is missing")


if __name__ == "__main__":
    main()
