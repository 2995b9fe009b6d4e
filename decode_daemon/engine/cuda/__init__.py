"""The decode step for NVIDIA GPUs of compute capability 9.0 (Hopper) and later: kernels in Triton and CUDA, in graphs."""
