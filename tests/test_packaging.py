"""The build: architecture lists, the switches of setup.py, and a wheel that holds what it should and installs."""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_py():
    spec = importlib.util.spec_from_file_location("mqa_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("9.0a", [("90a", False)]),
        ("90a 100", [("90a", False), ("100", False)]),
        ("9.0a;10.0", [("90a", False), ("100", False)]),
        ("10.0;10.0a", [("100", False), ("100a", False)]),
        ("10.0f", [("100f", False)]),
        ("12.1+PTX", [("121", True)]),
        ("8.0, 9.0a", [("80", False), ("90a", False)]),
        ("80 80", [("80", False)]),
        ("120a", [("120a", False)]),
    ],
)
def test_architecture_lists(setup_py, text: str, archs: list) -> None:
    """B73: forms that other parsers lose a member of or crash on."""
    assert setup_py.parse_archs(text) == archs


@pytest.mark.parametrize("text", ["", "sm_90", "9", "9.0b", "90a;;x", "native", "9.0+ptx"])
def test_malformed_architecture_lists(setup_py, text: str) -> None:
    with pytest.raises(SystemExit, match="architecture"):
        setup_py.parse_archs(text)


@pytest.fixture
def nvcc_stub(tmp_path: Path) -> Path:
    """A toolkit whose nvcc knows architectures up to 10.0."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_89\\ncompute_90\\ncompute_100\\n'\n")
    nvcc.chmod(0o755)
    return tmp_path


def test_which_architectures(setup_py, nvcc_stub: Path, monkeypatch) -> None:
    """MQA_CUDA_ARCHS, then TORCH_CUDA_ARCH_LIST, then what the toolkit knows of the default."""
    monkeypatch.delenv("MQA_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    default = [flag.rpartition("code=")[2] for flag in setup_py.gencode_flags(nvcc_stub)]
    assert default == ["sm_80", "sm_89", "sm_90a", "sm_100"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    assert setup_py.gencode_flags(nvcc_stub) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0 12.0")
    assert setup_py.gencode_flags(nvcc_stub) == ["-gencode=arch=compute_90a,code=sm_90a"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 7.5")
    with pytest.raises(SystemExit, match=r"no architecture of '7.0 7.5'"):
        setup_py.gencode_flags(nvcc_stub)
    monkeypatch.setenv("MQA_CUDA_ARCHS", "90a")
    assert setup_py.gencode_flags(nvcc_stub) == ["-gencode=arch=compute_90a,code=sm_90a"]
    monkeypatch.setenv("MQA_CUDA_ARCHS", "90a 120")
    with pytest.raises(SystemExit, match="not architecture 120"):
        setup_py.gencode_flags(nvcc_stub)


def test_other_cuda_major(setup_py, tmp_path: Path, monkeypatch) -> None:
    """B73: both versions are named; a torch without CUDA takes any."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.20'\n")
    nvcc.chmod(0o755)
    for version, said in (("13.0", "nvcc is of CUDA 12 and torch of CUDA 13.0"), ("12.8", None), (None, None)):
        monkeypatch.setattr(setup_py.torch.version, "cuda", version)
        assert setup_py.cuda_mismatch(tmp_path) == said


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_named_toolkit(setup_py, tmp_path: Path, monkeypatch, capsys, name: str) -> None:
    """The toolkit that the environment names is taken, or what it lacks is said; never another instead."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("MQA_CUDA", raising=False)
    monkeypatch.setenv("CUDA_PATH", "/elsewhere")
    monkeypatch.setenv(name, str(tmp_path))
    for part in ("bin/nvcc", "include/cuda_runtime.h"):
        assert [extension.name for extension in setup_py.extensions()] == ["torch_mqa_ops._C_cpu"]
        reason = f"{name}={tmp_path} has no {part}"
        assert capsys.readouterr().err.strip() == f"torch_mqa_ops: building for the CPU only ({reason})"
        (tmp_path / part).parent.mkdir()
        (tmp_path / part).touch()
    assert setup_py.cuda_home() == (tmp_path, "")
    shutil.rmtree(tmp_path / "include")
    monkeypatch.setenv("MQA_CUDA", "1")
    with pytest.raises(SystemExit, match=f"{name}={tmp_path} has no include/cuda_runtime.h"):
        setup_py.extensions()


def test_conda_toolkit(setup_py, nvcc_stub: Path, monkeypatch) -> None:
    """Headers and libraries in the folder of this machine's target, not of another."""
    monkeypatch.setattr(setup_py.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CUDA_HOME", str(nvcc_stub))
    monkeypatch.setenv("MQA_CUDA", "1")
    monkeypatch.setenv("MQA_CUDA_ARCHS", "90a")
    for target in ("sbsa-linux", "x86_64-linux"):
        assert setup_py.cuda_home()[0] is None
        for name in ("include/cuda_runtime.h", "lib/libcudart_static.a"):
            part = nvcc_stub / "targets" / target / name
            part.parent.mkdir(parents=True)
            part.touch()
    assert setup_py.extensions()[1].library_dirs[0] == str(nvcc_stub / "targets/x86_64-linux/lib")


def test_cuda_switch(setup_py, monkeypatch, capsys) -> None:
    """Without nvcc: CPU only, said in one line; with MQA_CUDA=1 one sentence and no build."""
    monkeypatch.setattr(setup_py, "cuda_home", lambda: (None, "no nvcc was found"))
    monkeypatch.delenv("MQA_CUDA", raising=False)
    assert [extension.name for extension in setup_py.extensions()] == ["torch_mqa_ops._C_cpu"]
    assert capsys.readouterr().err.strip() == "torch_mqa_ops: building for the CPU only (no nvcc was found)"
    monkeypatch.setenv("MQA_CUDA", "1")
    with pytest.raises(SystemExit, match="no nvcc was found"):
        setup_py.extensions()
    monkeypatch.setattr(setup_py, "cuda_home", lambda: (Path("toolkit"), ""))
    monkeypatch.setattr(setup_py, "cuda_mismatch", lambda home: "nvcc is of CUDA 12 and torch of CUDA 13.0")
    with pytest.raises(SystemExit, match=r"nvcc is of CUDA 12 and torch of CUDA 13\.0"):
        setup_py.extensions()
    monkeypatch.setenv("MQA_CUDA", "yes")
    with pytest.raises(SystemExit, match="MQA_CUDA must be 0, 1 or unset"):
        setup_py.extensions()


def test_make_knows_the_switches(tmp_path: Path) -> None:
    """Other switches than the last build's are never up to date; libraries carried here without a record are."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("csrc", "build", "torch_mqa_ops"):
        (tmp_path / name).mkdir()
    for name in ("setup.py", "pyproject.toml", "torch_mqa_ops/_C_cpu.abi3.so", "torch_mqa_ops/_C_cuda.abi3.so"):
        (tmp_path / name).touch()

    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MQA_", "TORCH_", "MAKE"))}
    make = ["make", "PYTHON=true", "torch_mqa_ops/_C_cpu.abi3.so"]

    def up_to_date(**switches: str) -> bool:
        run = subprocess.run([*make, "--question"], cwd=tmp_path, env=plain | switches, stdout=subprocess.DEVNULL)
        assert run.returncode in (0, 1)
        return run.returncode == 0

    def build(**switches: str) -> None:
        subprocess.run(make, cwd=tmp_path, env=plain | switches, check=True, stdout=subprocess.DEVNULL)

    assert up_to_date() and up_to_date(MQA_CUDA="1") and up_to_date(TORCH_CUDA_ARCH_LIST="9.0")
    assert not up_to_date(MQA_CUDA="0") and not up_to_date(MQA_CUDA_ARCHS="90a")
    build(MQA_CUDA_ARCHS="90a 10.0;12.0+PTX")
    assert up_to_date(MQA_CUDA_ARCHS="90a 10.0;12.0+PTX", TORCH_CUDA_ARCH_LIST="9.0") and not up_to_date()
    build(MQA_CUDA="0")
    assert up_to_date(MQA_CUDA="0") and not up_to_date() and not up_to_date(MQA_CUDA="1")
    build()
    assert up_to_date() and up_to_date(MQA_CUDA="1") and not up_to_date(TORCH_CUDA_ARCH_LIST="9.0")
    (tmp_path / "torch_mqa_ops/_C_cuda.abi3.so").unlink()
    assert up_to_date() and not up_to_date(MQA_CUDA="1")


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("names", [["_C_cpu"], ["_C_cpu", "_C_cuda"]])
def test_no_stale_cuda_library(setup_py, tmp_path: Path, monkeypatch, inplace: bool, names: list[str]) -> None:
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    monkeypatch.setattr(setup_py.cpp_extension.BuildExtension, "run", lambda self: None)
    libraries = [folder / "torch_mqa_ops/_C_cuda.abi3.so" for folder in (tmp_path / "build/lib", tmp_path)]
    for library in libraries:
        library.parent.mkdir(parents=True)
        library.touch()
    command = setup_py.BuildExtension(setuptools.Distribution())
    command.build_lib, command.inplace, command.extensions = str(tmp_path / "build/lib"), inplace, names
    command.run()
    assert [library.exists() for library in libraries] == [len(names) > 1, len(names) > 1 or not inplace]


SMOKE = """
import torch, torch_mqa_ops
cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
torch_mqa_ops.quantize_k_cache_fp8(torch.ones(64, 128), torch.arange(64), cache)
q = torch.ones(1, 1, 8, 128).to(torch.float8_e4m3fn)
table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 64, dtype=torch.int32)
logits = torch_mqa_ops.fp8_paged_mqa_logits(q, cache, torch.ones(1, 8), table, lens, 64)
assert logits.tolist() == [[1024.0] * 64], logits
with torch._subclasses.FakeTensorMode() as mode:
    inputs = [mode.from_tensor(x) for x in (q, cache, torch.ones(1, 8), table, lens)]
    fake = torch_mqa_ops.fp8_paged_mqa_logits(*inputs, 64)
assert fake.stride() == logits.stride()
print(torch_mqa_ops.__file__)
"""


def test_wheel(tmp_path: Path) -> None:
    """One wheel for every Python from 3.10 on: its files, its tag, and that it works where nothing else of ours is."""
    # From a copy without build leftovers, which would be packed too.
    source = tmp_path / "a source"
    for folder in ("csrc", "meta", "torch_mqa_ops"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    environment = {**os.environ, "MQA_CUDA": "0"}
    pip = [sys.executable, "-m", "pip", "-q"]
    options = ["--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*pip, "wheel", *options, "."], cwd=source, env=environment, check=True)

    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top_level,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["torch_mqa_ops"]
        library = archive.read("torch_mqa_ops/_C_cpu.abi3.so")
    assert str(tmp_path).encode() not in library, "the build folder's path is in the library"
    package = sorted(name for name in names if not name.split("/")[0].endswith(".dist-info"))
    python = [f"torch_mqa_ops/{path.name}" for path in (ROOT / "torch_mqa_ops").glob("*.py")]
    fakes = [f"torch_mqa_ops/meta/{path.name}" for path in (ROOT / "meta").glob("*.py")]
    assert package == sorted([*python, *fakes, "torch_mqa_ops/_C_cpu.abi3.so"])
    assert any(name.endswith("licenses/LICENSE") for name in names)

    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False)
    python = clean / "bin/python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    # torch and what it needs are borrowed: a path file shows their folders to the clean environment, behind its own.
    (site,) = (clean / "lib").glob("python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    run = subprocess.run([python, "-W", "ignore", "-c", SMOKE], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(site / "torch_mqa_ops/__init__.py")


def test_library_has_only_the_stable_abi() -> None:
    """No symbol of Python or of torch's C++ is wanted: that is what one binary for many torch versions rests on."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    for library in (ROOT / "torch_mqa_ops").glob("*.so"):
        run = subprocess.run([nm, "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        names = [line.split()[-1] for line in run.stdout.splitlines()]
        unstable = ("Py", "_Py", "_ZN2at", "_ZN3c10", "_ZNK3c10", "_ZN5torch")
        foreign = [name for name in names if name.startswith(unstable)]
        assert not foreign, f"{library.name} wants {foreign}"
