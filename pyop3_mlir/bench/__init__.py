"""Benchmarks: meshes, the loop in C that PyOP2 would have run, and the measurements."""
