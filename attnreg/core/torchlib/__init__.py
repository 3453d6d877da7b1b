"""What attnreg needs of torch's internals, and of the operating system below torch.

- Torch's own kernels, captured before a router covers them (`captured`).
- Function modes, subclasses and autocast (`modes`), memory layouts (`layout`), asynchronous read-backs
  (`readback`), the store of a job's process group (`job_store`).
- Small CUDA kernels, compiled by NVRTC (`device_code`).
- Libraries in C++: `libraries` compiles them, `background` starts that in a process, `building` loads them.
- Of the system: cache folders (`caches`), locks (`locks`), stored errors (`isolation`), a log line for slow
  steps (`slow`).

May import: errors, settings. Read `captured.py` first; of the C++ libraries, `building.py`.
"""
