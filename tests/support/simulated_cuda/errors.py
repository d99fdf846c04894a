"""Errors of the simulated device where a real one would compute wrong numbers or crash."""


class SimulatedCudaError(RuntimeError):
    """A use of the device that CUDA does not forbid in words, and whose result is undefined."""
