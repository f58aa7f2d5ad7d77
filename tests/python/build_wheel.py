#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, checks what it holds and what it links, and installs it into OUT/site; then as an editable one.

usage: build_wheel.py SOURCE OUT CUDA BUILD; CUDA: ON or OFF, whether with CUDA kernels; BUILD: the folder to compile
in, beside others of the source, whose objects ccache has for it
"""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

# What Debian 12 and Ubuntu 24.04 both have: glibc 2.35, the libstdc++ of GCC 12. (manylinux_2_35.)
NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12,)}
SYSTEM = re.compile(r"(libstdc\+\+|libm|libgcc_s|libc|libdl|libpthread|librt|ld-linux-x86-64)\.so\.\d+")
MAX_BYTES = {"OFF": 8 << 20, "ON": 40 << 20}


def pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True)


def link_complaints(dynamic: str, versions: str) -> list[str]:
    found = [f"links {name}" for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) if not SYSTEM.fullmatch(name)]
    for library, version in sorted(set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", versions))):
        if tuple(map(int, version.split("."))) > NEWEST[library]:
            found.append(f"needs {library}_{version}, newer than {'.'.join(map(str, NEWEST[library]))}")
    return found


def editable_complaints(source: pathlib.Path, out: pathlib.Path, *options) -> list[str]:
    """`pip install -e .`: modules of the source tree find the library, which lies where pip puts it."""
    site = out / "editable"
    pip("install", "--no-deps", "--no-build-isolation", "--target", site, *options, "--editable", source)
    code = "import site, sys; site.addsitedir(sys.argv[1]); import tessera as t; print(t.__file__, t.__version__)"
    done = subprocess.run([sys.executable, "-S", "-B", "-c", code, site], capture_output=True, text=True, check=False,
                          env={"PATH": ""})
    if done.returncode == 0 and done.stdout.startswith(str(source / "python")):
        return []
    return [f"an editable install: {done.stdout}{done.stderr}"]


def main() -> int:
    source, out, cuda, build = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), *sys.argv[3:]
    shutil.rmtree(out, ignore_errors=True)
    options = ["--config-settings", f"cmake.define.TESSERA_CUDA={cuda}", "--config-settings", f"build-dir={build}"]
    pip("wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", out / "dist", *options)
    (wheel,) = (out / "dist").iterdir()
    pip("install", "--no-deps", "--no-index", "--target", out / "site", wheel)

    library = out / "site" / "tessera" / "libtessera.so"
    read = [subprocess.run(["readelf", flag, library], check=True, capture_output=True, text=True).stdout
            for flag in ("--dynamic", "--version-info")]
    found = link_complaints(*read)
    if not re.fullmatch(r"tessera_moe-[0-9.]+-py3-none-linux_x86_64\.whl", wheel.name):
        found.append(f"{wheel.name}: not independent of Python's version")
    if library.stat().st_size > MAX_BYTES[cuda]:
        found.append(f"libtessera.so: {library.stat().st_size} bytes, more than {MAX_BYTES[cuda]}")
    if (b".nv_fatbin" in library.read_bytes()) != (cuda == "ON"):
        found.append(f"libtessera.so: built with TESSERA_CUDA={cuda}, but its GPU code says otherwise")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = sorted(name for name in names if name.startswith("tessera/"))
    expected = sorted(f"tessera/{path.relative_to(source / 'python/tessera').as_posix()}"
                      for path in (source / "python" / "tessera").rglob("*.py")) + ["tessera/libtessera.so"]
    if packaged != sorted(expected):
        found.append(f"holds {sorted(set(packaged) ^ set(expected))} too much or too little")
    found += [f"holds no {name}" for name in ("LICENSE", "THIRD_PARTY_NOTICES")
              if not any(entry.endswith(name) for entry in names)]
    found += editable_complaints(source, out, *options)
    # Seen to fail: another library, a newer symbol.
    planted = link_complaints("(NEEDED) Shared library: [libtorch.so.2]", "GLIBC_2.38 GLIBCXX_3.4")
    assert len(planted) == 2, planted
    print("\n".join(found) or f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
