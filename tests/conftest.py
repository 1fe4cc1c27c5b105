"""What every test needs before PyTorch computes anything."""

import os

# Some virtual machines report matrix units (AMX) that they do not let programs use: there PyTorch's own bfloat16 products end the
# process with an illegal instruction. This keeps its kernels to vector instructions; without such units it changes nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
