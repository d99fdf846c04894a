"""Triton kernels, each of one function in `gpu_ops` that says in plain torch what it computes.

They run on CUDA devices, and on the CPU under Triton's interpreter (TRITON_INTERPRET=1), by which they are tested.
Importing one needs the package triton (`pip install 'hetero-kv[gpu]'`); `gpu_ops.kernel_choice` says when to.
"""
