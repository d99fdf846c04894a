"""Triton kernels; for each, a function in `gpu_ops` defines the result in plain torch.

They run on CUDA devices, and on the CPU under Triton's interpreter (TRITON_INTERPRET=1), which the tests use. Importing
one needs the package triton (`pip install 'hetero-kv[gpu]'`); `gpu_ops.kernel_choice` decides when.
"""
