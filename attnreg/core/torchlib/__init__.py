"""What attnreg uses of torch's internals, and of the operating system below it.

- `captured`: torch's own kernels, captured before a router covers them. `modes`: what torch must see as an
  op. `batches`: batches of gradients. `functionalize`: its rule for an autograd.Function. `versions`: what
  differs between versions of torch.
- `layout`: memory layouts of tensors. `readback`: results of a GPU, read without waiting for it.
- `nan_rows`: rows of NaN that torch's kernel for the CPU hides.
- `device_code`: small CUDA kernels, compiled by NVRTC.
- `libraries` compiles the C++ libraries, `background` does so in another process, and `building` loads them.
  `children` runs the compiler.
- `caches`: files that are written whole, and folders of compiled files. `locks`: locks of threads and
  processes. `isolation`: errors without frames. `process_end`: what runs at the end of each process.
- `subgraphs`: a function that Dynamo traces into a graph of its own.
- `frames`: keeps Dynamo away from attnreg's Python.
- `job_store`: the store of a job's process group. `slow`: a log line for a slow step. `replacing`: a function
  of attnreg's in the place of another library's.

May import: errors, settings. Read `captured.py` first; for the C++ libraries, `building.py`.
"""
