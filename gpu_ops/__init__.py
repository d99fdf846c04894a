"""Attention and the rest of the computing where the model is: Triton kernels on a GPU, torch elsewhere."""

if __name__ != "hetero_kv.gpu_ops":
    raise ImportError(f"{__name__} is a part of hetero_kv; import hetero_kv.gpu_ops")
