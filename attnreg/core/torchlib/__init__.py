"""What attnreg needs of torch's inside, and of the operating system below it.

Torch's own kernels, captured before a router covers them; asynchronous read-backs; memory layouts; the store
of a job's process group (`job_store`); a log line for slow steps (`slow`); small CUDA kernels, which NVRTC
compiles (`device_code`); and the libraries in C++, which `libraries` compiles, `background` has compiled by
itself, and `building` loads.
May import: errors, settings. Read `captured.py` first; of the C++ libraries, `building.py`.
"""
