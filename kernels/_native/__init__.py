"""Float32 kernels in C for the CPU, compiled once per machine; without a compiler the plain torch twins serve."""
