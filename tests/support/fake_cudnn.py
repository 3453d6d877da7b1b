"""A stand-in for nvidia-cudnn-frontend on a CPU: its names and signatures, its faults, and float64.

A graph keeps what was described to it; running it reads the buffers by the described dims, strides
and offsets only, as cuDNN would. What cuDNN 9.19 gets wrong on an H200 is wrong here, too.
"""

import ctypes
import sys
import threading
import types
from math import nan

import torch
from support import one_sequence

from attnreg.backends.cudnn import adapter, execution_plans
from attnreg.core.launching import offsets
from attnreg.tools.measure import Case, inputs

DTYPES = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32}
DTYPES |= {"INT32": torch.int32, "INT64": torch.int64}

TOTALS = ("max_total_seq_len_q", "max_total_seq_len_kv")
BOUNDS = ("diagonal_band_left_bound", "diagonal_band_right_bound")
# The options of both builders that are computed here, with their defaults. The frontend's Python takes any
# keyword, and 1.32 refuses those that it doesn't know when it describes the graph to cuDNN; it knows these.
OPTIONS = dict.fromkeys(("name", "attn_scale", "seq_len_q", "seq_len_kv", *TOTALS, *BOUNDS))
OPTIONS |= {"use_padding_mask": False, "diagonal_alignment": "TOP_LEFT", "bias": None, "dropout": None}
OF_BACKWARD = {"dBias": None, "use_deterministic_algorithm": False}

HANDLES = {}


def memory(address, dtype, size, stride):
    """Return the memory at an address as a tensor."""
    count = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    there = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(there, dtype=dtype).as_strided(size, stride)


class GraphNotSupportedError(RuntimeError):
    """What the frontend raises where no engine takes a graph."""


class Described:
    """A tensor of a graph; `set_dim(...)` and the like set its attributes."""

    def __init__(self, uid=None, dim=None, stride=None, data_type=None, name=""):
        self.uid, self.dim, self.stride, self.data_type, self.name = uid, dim, stride, data_type, name
        self.ragged_offset, self.output = None, False

    def __getattr__(self, setter):
        name = setter.removeprefix("set_")
        if name == setter or name not in vars(self):
            raise AttributeError(setter)
        return lambda value: setattr(self, name, value) or self


def _step(name):
    return lambda graph: graph.steps.append(name)


class Graph:
    """`cudnn.pygraph`, as far as the adapter goes."""

    def __init__(self, *, handle, io_data_type, intermediate_data_type, compute_data_type):
        assert handle is not None, "a graph without a handle runs on stream 0 for ever"
        assert intermediate_data_type == compute_data_type == "FLOAT"
        self.handle = handle
        self.io_data_type, self.tensors, self.options, self.steps = io_data_type, {}, {}, []
        self.running = threading.local()
        self.selected_engine, self.plans, self._plan_index = None, [types.SimpleNamespace(cpp_index=3)], 0
        self._lowered_graph = Lowered(self)

    def tensor(self, *, dim, stride, data_type, uid, name):
        assert uid not in self.tensors
        shared = name == "BIAS"  # broadcast by strides
        if data_type in ("HALF", "BFLOAT16") and any(
            step % 8 or not (step or shared) for step in stride[:-1]
        ):
            raise GraphNotSupportedError("strides have to be multiples of sixteen bytes")
        self.tensors[uid] = Described(uid, dim, stride, data_type, name)
        return self.tensors[uid]

    def sdpa(self, q, k, v, *, generate_stats, **options):
        assert generate_stats is True
        self._take(q, k, OF_BACKWARD | options)
        self.inputs, self.results = (q, k, v), (Described(), Described())
        return self.results

    def sdpa_backward(self, q, k, v, o, dO, stats, **options):  # noqa: N803
        self._take(q, k, OF_BACKWARD | options)
        totals = [self.options[name] for name in TOTALS]
        assert q.ragged_offset is None or None not in totals, "its workspace would be that of a full batch"
        if self.options["dBias"] is not None and k.dim[2] % 8:
            raise GraphNotSupportedError("No valid execution plans built.")
        if q.dim[2] == k.dim[2] == 1:
            raise GraphNotSupportedError("s_q = s_kv = 1 is not supported.")
        self.inputs, self.results = (q, k, v, o, dO, stats), (Described(), Described(), Described())
        return self.results

    def _take(self, q, k, options):
        assert options.keys() <= {*OPTIONS, *OF_BACKWARD}
        given = self.options = OPTIONS | options
        self.scale, packed = given["attn_scale"], q.ragged_offset is not None
        left, right = (given[name] for name in BOUNDS)
        assert q.data_type == self.io_data_type
        assert isinstance(self.scale, float)
        assert isinstance(given["name"], str)
        assert left is None or left > 0
        assert right is None or right >= 0
        assert given["use_padding_mask"] is packed
        assert packed or all(given[name] is None for name in TOTALS)
        if not packed and (left, right) != (None, None) and q.dim[2] > k.dim[2]:
            raise GraphNotSupportedError("bottom right with more queries than keys")
        top_left = given["diagonal_alignment"] == "TOP_LEFT"
        plain = given["bias"] is None and given["dropout"] is None
        if not plain and (left, right) != (None, None) and not top_left:
            raise GraphNotSupportedError("Bottom right causal mask is only supported with is_bias=False")
        if given["bias"] is not None and left is not None:
            raise GraphNotSupportedError("Left and right bounds are only supported with is_bias=False")
        for scores in filter(None, (given["bias"], given["dBias"])):
            assert scores.dim == [*q.dim[:3], k.dim[2]]
            assert scores.stride[-1] == 1
            assert scores.data_type == self.io_data_type
            assert not packed

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        self.steps.append("plans")

    validate, build_operation_graph, check_support, build_plans = map(
        _step, ("validate", "operations", "support", "build")
    )

    def get_workspace_size(self):
        return 64

    def execute(self, buffers, workspace, handle, tensor_uids):
        assert self.steps == ["validate", "operations", "plans", "support", "build"]
        assert workspace.numel() >= 64
        assert handle.stream is not None
        running = dict(zip(tensor_uids, buffers, strict=True))
        assert len(running) == len(buffers)
        for uid, buffer in running.items():
            described = self.described(uid)
            assert buffer.dtype == DTYPES[described.data_type]
            assert described.ragged_offset is not None or buffer.numel() >= described.dim[0]
        self.run({uid: buffer.data_ptr() for uid, buffer in running.items()}, handle)

    def described(self, uid):
        return self.tensors.get(uid) or next(one for one in self.results if one.uid == uid)

    def run(self, addresses, handle):
        handle.ran += 1
        self.running.addresses = addresses
        assert all(result.output for result in self.results), "nothing is written to what isn't an output"
        batch = self.inputs[0].dim[0]
        for tensor, name in zip(self.inputs, TOTALS, strict=False):
            total = self.options[name]
            if total is not None:
                assert total * tensor.stride[2] >= self._number(tensor.ragged_offset, batch), (
                    f"{name} is too small"
                )
        for entry in range(batch):
            (self._backward if len(self.inputs) > 3 else self._forward)(entry)

    def _view(self, tensor, entry, length):
        """Return (H, S, D) of one sequence, as the description says it lies in the buffer."""
        _, heads, longest, size = tensor.dim
        start = entry * tensor.stride[0]
        if tensor.ragged_offset is not None:
            assert list(tensor.ragged_offset.dim) == [tensor.dim[0] + 1, 1, 1, 1]
            assert tensor.ragged_offset.data_type == "INT64"
            start = self._number(tensor.ragged_offset, entry)
            assert length <= longest
            assert length * tensor.stride[2] <= self._number(tensor.ragged_offset, entry + 1) - start
        dtype = DTYPES[tensor.data_type]
        if length == 0:
            return torch.empty(heads, 0, size, dtype=dtype)
        address = self.running.addresses[tensor.uid] + start * dtype.itemsize
        return memory(address, dtype, (heads, length, size), tensor.stride[1:])

    def _number(self, vector, entry):
        assert (vector.dim[1:], vector.stride) == ([1] * 3, [1] * 4)
        dtype = DTYPES[vector.data_type]
        return memory(self.running.addresses[vector.uid], dtype, (vector.dim[0],), (1,))[entry].item()

    def _lengths(self, entry):
        q, k = self.inputs[:2]
        if self.options["seq_len_q"] is None:
            return q.dim[2], k.dim[2]
        assert {self.options[name].data_type for name in ("seq_len_q", "seq_len_kv")} == {"INT32"}
        return tuple(self._number(self.options[name], entry) for name in ("seq_len_q", "seq_len_kv"))

    def _scores(self, entry, *lengths):
        """Return the masked scores of a sequence, and its query, key and value (S, H, D)."""
        given = zip(self.inputs, (*lengths, lengths[1]), strict=False)
        q, k, v = (self._view(tensor, entry, length).transpose(0, 1) for tensor, length in given)
        left, right = (self.options[name] for name in BOUNDS)
        top_left = self.options["diagonal_alignment"] == "TOP_LEFT"
        mask = one_sequence.visible(*lengths, left and left - 1, right, top_left)
        scores = one_sequence.scores(q, k, self.scale, mask)
        if self.options["bias"] is not None:
            scores += self._view(self.options["bias"], entry, lengths[0]).double()
        return scores, q, k, v

    def _kept(self, entry, lengths):
        """Return the factors of dropout; which weights are dropped depends on the longest lengths, too."""
        if self.options["dropout"] is None:
            return 1.0
        p, *state = self.options["dropout"]
        assert [one.data_type for one in state] == ["INT64"] * 2
        q, k = self.inputs[:2]
        seed = hash((*(self._number(one, 0) for one in state), entry, q.dim[2], k.dim[2])) % 2**62
        drawn = torch.rand(q.dim[1], *lengths, generator=torch.Generator().manual_seed(seed))
        return (drawn >= p).double() / (1.0 - p)

    def _forward(self, entry):
        (rows, keys), (out, stats) = self._lengths(entry), self.results
        if rows == 0:
            return
        out, stats = self._view(out, entry, rows), self._view(stats, entry, rows)[..., 0]
        if keys == 0:
            out.fill_(nan)
            stats.fill_(1e21)
            return
        scores, _, _, value = self._scores(entry, rows, keys)
        found, lse = one_sequence.forward(scores, value, self._kept(entry, (rows, keys)))
        out.copy_(found.transpose(0, 1))
        stats.copy_(lse)
        if self.inputs[0].ragged_offset is not None and self.inputs[0].dim[2] == 1:
            stats.fill_(1e21)

    def _backward(self, entry):
        rows, keys = self._lengths(entry)
        if rows == 0 or keys == 0:
            return
        scores, *qkv = self._scores(entry, rows, keys)
        out, grad, lse = (self._view(x, entry, rows).double() for x in self.inputs[3:])
        delta = (out * grad).sum(-1)
        bias = self.options["bias"]
        # Scores past the last key aren't -inf (pytorch#196678), so that exp(score - LSE) may be inf.
        assert bias is None or not (lse == -torch.inf).any()
        if bias is not None and bias.stride[2] == 0 and rows > 1:
            scores = scores + 1.0  # wrong gradients with one row for all queries
        grads = one_sequence.backward(
            *(scores, lse[..., 0], delta, *qkv, grad.transpose(0, 1), self.scale),
            kept=self._kept(entry, (rows, keys)),
        )
        if self.options["dBias"] is not None:
            of_scores = one_sequence.of_scores(scores, lse[..., 0], delta, qkv[2], grad.transpose(0, 1))
            shown = self._view(self.options["dBias"], entry, rows)
            # The gradient of a score that a mask hides is left as it was, which is the worst that may happen.
            hidden = one_sequence.visible(rows, keys, None, self.options[BOUNDS[1]], True).logical_not()
            shown.copy_(torch.where(hidden, shown.double(), of_scores))
        for result, value, length in zip(self.results, grads, (rows, keys, keys), strict=True):
            self._view(result, entry, length).copy_(value.transpose(0, 1))
        packed, (_, heads, _, dim) = self.inputs[0].ragged_offset is not None, self.inputs[0].dim
        if packed and self.inputs[0].stride[1:3] != [dim, heads * dim]:
            self._view(self.results[0], entry, rows).add_(1.0)


class Lowered:
    """What the frontend's graph runs underneath: on addresses, in the order of ascending uids."""

    def __init__(self, graph):
        self.graph, self.prepared = graph, False

    def _prepare_variant_pack_template(self):
        assert self.graph.steps[-1:] == ["build"]
        self.prepared = True

    def _get_variant_pack_uids_sorted(self):
        results = [one.uid for one in self.graph.results]
        return sorted({*self.graph.tensors, *results}) if self.prepared else []

    def _execute_with_raw_ptrs(self, user_ptrs_array, n_user, workspace, handle, plan_index=-1):
        """_execute_with_raw_ptrs(self, user_ptrs_array: int, n_user: int, workspace: int, handle: int, plan_index: int = -1) -> None"""  # noqa: E501
        assert plan_index == 3
        assert workspace % 16 == 0
        assert workspace
        handle = HANDLES[handle]
        assert handle.stream is not None
        uids = self._get_variant_pack_uids_sorted()
        assert n_user == len(uids)
        pointers = (ctypes.c_void_p * n_user).from_address(user_ptrs_array)
        handle.by_address += 1
        self.graph.run(dict(zip(uids, pointers, strict=True)), handle)


class Handle:
    """A cuDNN handle: the stream it is set to, how often that was set, and how often it ran a plan."""

    def __init__(self):
        self.stream, self.ran, self.set, self.by_address = None, 0, 0, 0
        self.backend_handle = len(HANDLES) + 1
        HANDLES[self.backend_handle] = self


class Module(types.ModuleType):
    """A module that looks like `cudnn`; keeps its graphs, and the handles that aren't destroyed."""

    cudnnGraphNotSupportedError = GraphNotSupportedError  # noqa: N815
    data_type = types.SimpleNamespace(**{name: name for name in DTYPES})
    heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = types.SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")

    def __init__(self):
        super().__init__("cudnn")
        self.handles, self.graphs = [], []
        self.destroy_handle = self.handles.remove

    def backend_version(self):
        return 91900

    def create_handle(self):
        self.handles.append(Handle())
        return self.handles[-1]

    def set_stream(self, handle, stream):
        handle.stream, handle.set = stream, handle.set + 1

    def pygraph(self, **options):
        self.graphs.append(Graph(**options))
        return self.graphs[-1]


def install(monkeypatch):
    """Put the fake in the place of the frontend, with stream 7 of the CPU; return the module."""
    made = Module()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(offsets, "_cache", {})
    for module in (adapter, execution_plans):
        monkeypatch.setattr(module, "stream_of", lambda tensor: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def select_by(monkeypatch, plans, rule):
    """Have packed calls run by the execution plan of `rule(problem)`, whatever batch came before."""

    def select(problem):
        problem = rule(problem) if problem.kind.packed else problem
        return problem, plans._plans.get(problem)

    monkeypatch.setattr(plans, "select", select)


def ragged(lens_q, lens_k=None, heads=(4, 2), dim=16, dtype="bfloat16"):
    """Return query, key, value and the causal call of a packed batch; one offsets tensor if lengths agree."""
    lens_k = lens_k or lens_q
    shape = {"heads": heads, "dims": (dim, dim), "dtype": dtype}
    mask = {"window": (-1, 0), "scale": 0.25, "varlen": True, "one_cu_seqlens": lens_q == lens_k}
    *tensors, _, call = inputs(
        Case(name="ragged", lens_q=tuple(lens_q), lens_k=tuple(lens_k), **shape, **mask)
    )
    return *tensors, call
