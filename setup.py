"""Builds two stable-ABI libraries: _C_cpu (schemas and CPU kernels, always) and _C_cuda (CUDA kernels, when nvcc is
there).

Environment: MQA_CUDA=0 forbids and MQA_CUDA=1 demands the CUDA library; MQA_CUDA_ARCHS, then TORCH_CUDA_ARCH_LIST,
choose its architectures ("9.0a;10.0", "90a 100", "8.0+PTX").
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "80 89 90a 100 120"
FAMILIES = ("paged_logits", "quantize", "selection")
HOST_SOURCES = ["csrc/common/check.cpp", *(f"csrc/{family}/host.cpp" for family in FAMILIES)]
CPU_SOURCES = ["csrc/schema.cpp", *(f"csrc/{family}/cpu.cpp" for family in FAMILIES)]
CUDA_SOURCES = [
    "csrc/paged_logits/cuda.cu",
    "csrc/paged_logits/hopper_fp8.cu",
    "csrc/paged_logits/hopper_mxfp4.cu",
    "csrc/paged_logits/schedule.cu",
    "csrc/quantize/cuda.cu",
    "csrc/selection/cuda.cu",
]
HEADERS = sorted(str(path) for suffix in ("h", "cuh") for path in (ROOT / "csrc").rglob(f"*.{suffix}"))

# The oldest torch that a binary built here loads on (2.11).
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
# Error messages and debug information name files from the checkout's root on, not the build machine's folders.
PREFIX = f"-ffile-prefix-map={ROOT}/="
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", PREFIX, TARGET]
NVCC_FLAGS = ["-std=c++17", "-O3", "-DUSE_CUDA", TARGET, "--Werror=all-warnings"]
# nvcc takes the inner quotes off; without them a space in the path would end the flag.
NVCC_FLAGS += [f'-Xcompiler=-fvisibility=hidden,-Wall,"{PREFIX}"']


def parse_archs(text: str) -> list[tuple[str, bool]]:
    """'9.0a;10.0', '90a 100', '12.1+PTX' -> [(architecture digits with suffix, whether to add PTX)]."""
    archs = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:(\d+)\.(\d)|(\d{2,3}))([af]?)(\+PTX)?", word)
        if not match:
            raise SystemExit(f"torch_mqa_ops: {word!r} in the architecture list {text!r} is not like 9.0a or 90a")
        major, minor, digits, suffix, ptx = match.groups()
        number = digits or major + minor
        arch = (number + suffix, ptx is not None)
        if arch not in archs:
            archs.append(arch)
    return archs


def holder(home: Path, file: str, *folders: str) -> Path | None:
    """The folder of a toolkit that holds the file; conda's headers and libraries lie in those of a target."""
    target = "targets/" + ("sbsa" if platform.machine() == "aarch64" else platform.machine()) + "-linux"
    places = [home / folder for folder in (*folders, f"{target}/{folders[-1]}")]
    return next((place for place in places if (place / file).exists()), None)


def lacking(home: Path) -> str | None:
    """What a toolkit needs for this build and has not got."""
    if not (home / "bin/nvcc").exists():
        return "bin/nvcc"
    return None if holder(home, "cuda_runtime.h", "include") else "include/cuda_runtime.h"


def cuda_home() -> tuple[Path | None, str]:
    """The toolkit that the environment names; if none, that in the usual place or of the nvcc on PATH (which may be a
    wrapper outside its toolkit). And why there is none."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(name):
            part = lacking(Path(folder))
            return (None, f"{name}={folder} has no {part}") if part else (Path(folder), "")
    nvcc = shutil.which("nvcc")
    homes = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parent.parent] if nvcc else [])]
    return next((home for home in homes if not lacking(home)), None), "no nvcc with its headers was found"


def cuda_mismatch(home: Path) -> str | None:
    """torch refuses to build with an nvcc of another CUDA major than its own; says so with both versions."""
    text = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    nvcc = re.search(r"release (\d+)\.", text)
    if torch.version.cuda is None or nvcc is None or nvcc[1] == torch.version.cuda.split(".")[0]:
        return None
    return f"nvcc is of CUDA {nvcc[1]} and torch of CUDA {torch.version.cuda}"


def gencode_flags(home: Path) -> list[str]:
    demanded = os.environ.get("MQA_CUDA_ARCHS")
    chosen = demanded or os.environ.get("TORCH_CUDA_ARCH_LIST")
    archs = parse_archs(chosen or DEFAULT_ARCHS)
    listed = subprocess.run([home / "bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = {number for number in re.findall(r"compute_(\d+)", listed) if int(number) >= 80}
    flags = []
    for arch, ptx in archs:
        number = arch.rstrip("af")
        if number not in known:
            # torch's variable is often set for all of an image's packages: take of it what can be had.
            if demanded:
                raise SystemExit(f"torch_mqa_ops: this nvcc knows {sorted(known, key=int)}, not architecture {arch}")
            continue
        # sm_90 code runs on 9.0 alone, as sm_90a code does, which may use all that the chip has.
        exact = "90a" if arch == "90" else arch
        flags.append(f"-gencode=arch=compute_{exact},code=sm_{exact}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{arch},code=compute_{arch}")
    if not flags:
        raise SystemExit(f"torch_mqa_ops: no architecture of {chosen!r} is 8.0 or later and known to this nvcc")
    return flags


def extension(name: str, sources: list[str], **options) -> cpp_extension.CppExtension:
    # The libraries hold no Python: the limited-API flag only gives them and the wheel their names.
    options |= {"include_dirs": [str(ROOT / "csrc")], "depends": HEADERS, "py_limited_api": True}
    return cpp_extension.CppExtension(f"torch_mqa_ops.{name}", sources, **options)


def extensions() -> list[cpp_extension.CppExtension]:
    found = [extension("_C_cpu", CPU_SOURCES + HOST_SOURCES, extra_compile_args=CXX_FLAGS)]
    wanted = os.environ.get("MQA_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"torch_mqa_ops: MQA_CUDA must be 0, 1 or unset, got {wanted!r}")
    home, reason = (None, "MQA_CUDA=0") if wanted == "0" else cuda_home()
    if home is not None and (mismatch := cuda_mismatch(home)):
        home, reason = None, mismatch
    if home is None:
        if wanted == "1":
            raise SystemExit(f"torch_mqa_ops: MQA_CUDA=1 demands the CUDA library, and {reason}.")
        print(f"torch_mqa_ops: building for the CPU only ({reason})", file=sys.stderr)
        return found
    # torch forgets the toolkit when it is itself a CPU build; BuildExtension then stops at the first .cu file.
    cpp_extension.CUDA_HOME = str(home)
    found.append(
        extension(
            "_C_cuda",
            CUDA_SOURCES + HOST_SOURCES,
            extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS + gencode_flags(home)},
            library_dirs=[str(holder(home, "libcudart_static.a", "lib64", "lib") or home / "lib64")],
            libraries=["cudart_static", "dl", "rt", "pthread"],
            # libtorch pulls libtorch_cuda in at run time; it must be kept although a CPU build's resolves nothing here.
            extra_link_args=["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"],
        )
    )
    return found


class BuildExtension(cpp_extension.BuildExtension):
    """Keeps the objects of the two libraries apart: both compile the host sources, each with its own flags."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # torch sees to it with ninja only; from times alone another switch is not seen

    def run(self):
        super().run()
        if len(self.extensions) == 1:
            # The CUDA library of an earlier build would be loaded, or packed, beside this one.
            for folder in [Path(self.build_lib), *([ROOT] if self.inplace else [])]:
                (folder / "torch_mqa_ops/_C_cuda.abi3.so").unlink(missing_ok=True)

    def build_extensions(self):
        # torch has ninja print whole commands. Their count and source are enough; what compilers say stays as it is.
        progress = r"s,^(\[[0-9/]+\]) .* -c .*(csrc/[^ ']+)'? -o .*/torch_mqa_ops\.(_C_[a-z]+)/.*,\1 \3 \2,"
        short = subprocess.Popen(["sed", "-u", "-E", "-e", progress, "-e", "/^ninja: no work/d"], stdin=subprocess.PIPE)
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(short.stdin.fileno(), 1)
        try:
            super().build_extensions()
        except RuntimeError as error:
            raise SystemExit(f"torch_mqa_ops: {error}") from None
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            short.communicate()

    def build_extension(self, ext):
        base, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        # torch tells ninja which headers a .cu file includes only when it is itself a CUDA build.
        newest_header = max(os.path.getmtime(path) for path in HEADERS)
        for compiled in Path(self.build_temp).rglob("*.o"):
            if compiled.stat().st_mtime < newest_header:
                compiled.unlink()
        super().build_extension(ext)
        self.build_temp = base


if __name__ == "__main__":
    os.chdir(ROOT)
    # torch looks for ninja on PATH, which lacks that of an environment that is not activated.
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
    # Metadata commands need neither compilers nor their checks.
    metadata_only = bool({"egg_info", "sdist", "dist_info"} & set(sys.argv[1:2]))
    setup(
        ext_modules=[] if metadata_only else extensions(),
        cmdclass={"build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
