"""The cores, threads and GPUs of a role process, and its environment."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.generator.engine import GPU_FRACTION


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The cores, threads and GPUs of one role process."""

    cpus: tuple[int, ...]
    threads: int
    gpus: tuple[str, ...] = ()
    """Its GPUs: entries of CUDA_VISIBLE_DEVICES, with the names in this process's environment."""
    visible_gpus: tuple[str, ...] = ()
    """The GPUs that it sees, among them its own; empty for its own alone."""
    helper_cpus: tuple[int, ...] = ()
    """Cores of the role's helper processes; empty for the cores of the role itself."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory for the engine of a generator."""
    host: str = ""
    """Name of the host; empty for the launcher's own."""

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Its GPUs, by host and name."""
        return tuple((self.host, gpu) for gpu in self.gpus)

    def environment(self) -> dict[str, str]:
        """Returns the variables that must be set before the process imports numpy or torch."""
        threads = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        environment: dict[str, str] = dict.fromkeys(names, threads)
        environment["ASYNCRL_HELPER_CPUS"] = ",".join(map(str, self.helper_cpus or self.cpus))
        visible = self.visible_gpus or self.gpus
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        environment["LOCAL_RANK"] = str(visible.index(self.gpus[0])) if self.gpus else "0"
        if self.gpu_memory_utilization is not None:
            environment[GPU_FRACTION] = f"{self.gpu_memory_utilization:.4f}"
        if self.gpus:
            # torch counts GPUs without starting the driver, which a forked child of the process could not use.
            environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        else:
            environment["DS_ACCELERATOR"] = "cpu"
        return environment
