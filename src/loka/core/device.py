"""Which machine this is, as a fingerprint that measurements and plans carry; and how tensors get to its devices."""

from __future__ import annotations

import functools
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from loka.core.exceptions import LokaError, UnknownName
from loka.core.problem import target_of

# Libraries whose kernels a plan may name, by `Kernel.library`, and the distributions that bring
# them; their versions decide what a measurement means. torch has a field of its own.
LIBRARIES = {"torchao": "torchao", "fbgemm": "fbgemm-gpu-genai", "deep_gemm": "sgl-deep-gemm", "triton": "triton"}
_HERE: AbstractContextManager[None] = nullcontext()


@contextmanager
def no_autocast() -> Iterator[None]:
    """Inside, or in a function that this decorates, no caller's autocast counts. torch's own decorator keeps what it
    found in one place for all threads, and gives one of them what another one had."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The machine on which something was measured. `libraries` maps installed kernel libraries to their versions."""

    device: str
    target: str
    driver: str
    cuda: str
    torch: str
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> str:
        """torch and the libraries, each with its version, as text."""
        return ", ".join(f"{name} {version}" for name, version in {"torch": self.torch, **self.libraries}.items())

    def differences(
        self, other: Fingerprint, *, driver: bool = True, libraries: Collection[str] | None = None
    ) -> list[str]:
        """One line for each field in which `other` differs; libraries by name.

        Args:
            driver: whether its version counts. Times may follow it; kernels come with libraries.
            libraries: the distributions that count; None for all.
        """
        lines = []
        for name in ("device", "target", *(["driver"] if driver else []), "cuda", "torch"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                lines.append(f"{name}: {mine} here, {theirs} there")
        known = {*self.libraries, *other.libraries}
        for name in sorted(known if libraries is None else known.intersection(libraries)):
            mine = self.libraries.get(name, "not installed")
            theirs = other.libraries.get(name, "not installed")
            if mine != theirs:
                lines.append(f"{name}: {mine} here, {theirs} there")
        return lines

    def __str__(self) -> str:
        parts = [self.device, self.target]
        parts += [f"driver {self.driver}"] if self.driver else []
        parts += [f"CUDA {self.cuda}"] if self.cuda else []
        parts += [f"torch {self.torch}"]
        return ", ".join(parts)


def fingerprint(device: torch.device | str) -> Fingerprint:
    """The fingerprint of `device` on this machine. On a CPU only torch's version matters."""
    device = torch.device(device)
    if device.type != "cuda":
        return Fingerprint(device=device.type, target=target_of(device), driver="", cuda="", torch=torch.__version__)
    return Fingerprint(
        device=torch.cuda.get_device_name(device),
        target=target_of(device),
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
        torch=torch.__version__,
        libraries=library_versions(),
    )


def library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES.values():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def _driver_version() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip() or "unknown"


def default_device() -> str:
    """ "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; that of the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def synchronize(device: torch.device) -> None:
    """Waits for what was launched on a GPU; on a CPU nothing is to be waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of(function: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call takes at its peak on a CUDA device, beside what is there before it. By that the device's peak
    statistics start anew."""
    with torch.cuda.device(device):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


def has_graphs(device: torch.device) -> bool:
    """Whether it has CUDA graphs, under which steps run fastest and kernels are timed."""
    return device.type == "cuda"


def device_named(given: torch.device | str | int, named: str) -> torch.device:
    """The device that a user asked for; `named` is how.

    Raises UnknownName for what is none, and LokaError for a GPU where torch sees none.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UnknownName(f"{named} is neither a CPU nor a GPU", way_out="cpu, cuda, or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LokaError(f"{named}: torch sees no GPU here", way_out="leave it out, or say cpu")
    return device


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, where it is not: torch's own context costs the host more."""
    there = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device_of(tensor) if there else _HERE


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`. A copy from pinned memory to a GPU is not waited for; a copy to the CPU is, because the
    CPU may read it at once.
    """
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def value_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of its values, row by row, on the host."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data
