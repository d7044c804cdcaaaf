"""What depends on the device when a model is loaded: what to compile, what memory it takes, which runner runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlc_nb.errors import BadRequestError, DeviceUnavailableError
from mlc_nb.progress import byte_bar
from mlc_nb.runtime.cpu_memory import cpu_needs
from mlc_nb.runtime.devices import find_cuda_device
from mlc_nb.runtime.isa import host_isa, runnable_isas
from mlc_nb.runtime.parameters import load_parameters, rope_tables
from mlc_nb.weights.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from mlc_nb.engine.limits import Limits
    from mlc_nb.library import LibraryBundle
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.runtime.devices import CudaDevice
    from mlc_nb.runtime.memory import MemoryNeeds
    from mlc_nb.runtime.step import ModelRunner
    from mlc_nb.weights.gguf_file import GGUFFile

__all__ = ["Backend", "activation_dtype_of", "backend_of"]

_DEFAULT_FOR_CPU = "int16"  # answers as in float32, from int8 instructions
_FOR_CPU = ("float32", "int16", "int8")
_FOR_CUDA = ("float16", "bfloat16")


class Backend(Protocol):
    """A device that models are loaded to."""

    @property
    def isa(self) -> str:
        """What to compile for."""

    def check(self, bundle: LibraryBundle) -> None:
        """Check that a library can run here.

        Raises
        ------
        DeviceUnavailableError
            It was compiled for something else.
        """

    def needs(self, bundle: LibraryBundle, config: EngineConfig) -> MemoryNeeds:
        """Say what a model takes of the device's memory."""

    def open_runner(
        self, file: GGUFFile, bundle: LibraryBundle, limits: Limits, config: EngineConfig, progress: bool
    ) -> ModelRunner:
        """Load the weights and make the runner, on the thread that will use it."""


def backend_of(device: str) -> Backend:
    """The backend of a device that `resolve_device` named.

    Raises
    ------
    DeviceUnavailableError
        The device cannot be used.
    """
    return _Cpu() if device == "cpu" else _Cuda(find_cuda_device(device))


def activation_dtype_of(config: EngineConfig, file: GGUFFile, isa: str) -> str:
    """The type of activations for a configuration on a device.

    Raises
    ------
    BadRequestError
        The device does not have the configured type.
    """
    for_cuda = isa.startswith("sm_")
    known = _FOR_CUDA if for_cuda else _FOR_CPU
    if config.activation_dtype == "auto":
        if not for_cuda:
            return _DEFAULT_FOR_CPU
        types = {tensor.block_type for tensor in file.tensors.values() if len(tensor.shape) == 2}
        return "bfloat16" if types == {"BF16"} and int(isa.removeprefix("sm_")) >= 80 else "float16"
    if config.activation_dtype not in known:
        place = "a GPU" if for_cuda else "a CPU"
        raise BadRequestError(
            f"engine_config.activation_dtype is {config.activation_dtype!r}, which {place} does not have; use 'auto' "
            f"or one of {', '.join(map(repr, known))}"
        )
    return config.activation_dtype


class _Cpu:
    """Implements `Backend`."""

    @property
    def isa(self) -> str:
        return host_isa()

    def check(self, bundle: LibraryBundle) -> None:
        compiled_for = bundle.request.isa
        if compiled_for not in runnable_isas():
            raise DeviceUnavailableError(
                f"the library {bundle.directory} was compiled for the ISA level {compiled_for}; this processor can "
                f"run: {', '.join(runnable_isas())}"
            )

    def needs(self, bundle: LibraryBundle, config: EngineConfig) -> MemoryNeeds:
        return cpu_needs(bundle.metadata, config.num_sequences)

    def open_runner(
        self, file: GGUFFile, bundle: LibraryBundle, limits: Limits, config: EngineConfig, progress: bool
    ) -> ModelRunner:
        from mlc_nb.runtime.model_runner import CpuModelRunner

        total = self.needs(bundle, config).weights
        with file, byte_bar("Loading the weights", total=total, enabled=progress) as bar:
            parameters = load_parameters(bundle.metadata, file.tensors, bar.update)
            rope = rope_tables(bundle.metadata, file.tensors, limits.single_sequence)
        return CpuModelRunner(bundle, parameters, rope, num_pages=limits.pages, num_threads=config.num_threads)


class _Cuda:
    """Implements `Backend`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    @property
    def isa(self) -> str:
        return self._device.architecture

    def check(self, bundle: LibraryBundle) -> None:
        if bundle.request.isa != self.isa:
            raise DeviceUnavailableError(
                f"the library {bundle.directory} was compiled for {bundle.request.isa}; {self._device.name} needs "
                f"{self.isa}"
            )

    def needs(self, bundle: LibraryBundle, config: EngineConfig) -> MemoryNeeds:
        from mlc_nb.runtime.cuda_sizes import StepSizes

        metadata = bundle.metadata
        sizes = StepSizes(
            LaunchPlan.model_validate_json(bundle.launch_plan.read_bytes()),
            metadata,
            positions=config.max_single_sequence_length or metadata.context_window_size,
            num_sequences=config.num_sequences,
            multiprocessors=self._device.multiprocessors,
        )
        return sizes.needs()

    def open_runner(
        self, file: GGUFFile, bundle: LibraryBundle, limits: Limits, config: EngineConfig, progress: bool
    ) -> ModelRunner:
        from mlc_nb.runtime.cuda_runner import CudaModelRunner

        total = self.needs(bundle, config).weights
        with file, byte_bar("Loading the weights", total=total, enabled=progress) as bar:
            return CudaModelRunner(
                bundle,
                file.tensors,
                self._device,
                num_pages=limits.pages,
                positions=limits.single_sequence,
                num_sequences=config.num_sequences,
                progress=bar.update,
            )
