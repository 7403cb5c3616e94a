"""Kernels for Hopper GPUs (sm_90a) in Gluon: TMA, wgmma and specialised warps."""
