"""A CUDA device that is simulated on a CPU build of torch, with real data.

Tensors say `cuda`, compute on the CPU, and refuse what CUDA refuses. Every launch, copy and wait of the host is
recorded with the line of the project that caused it; asynchronous copies end when somebody waits for them; work of one
stream that uses another's without waiting is an error; memory is counted. Kernels compute what they do on a CPU:
rounding is not a GPU's, and nothing here says how fast anything is.
"""

from tests.support.simulated_cuda.device import SimulatedDevice, simulated
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.record import Copy, Launch, Record, Wait

__all__ = ["Copy", "Launch", "Record", "SimulatedCudaError", "SimulatedDevice", "Wait", "simulated"]
