"""The checks of `python -m benchmarks.gpu_check`, a file for each kind."""
