"""The commands behind `kvattn`: one file each, all put together in `kvattn.cli`."""
