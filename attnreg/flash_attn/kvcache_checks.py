"""The checks of `flash_attn_with_kvcache` before it writes anything."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from attnreg.core.launching.memory import check_in_memory
from attnreg.core.launching.validation import check_layouts, check_same
from attnreg.core.torchlib.modes import autocasts, is_plain
from attnreg.core.varlen.plans import check_untraced
from attnreg.errors import InvalidInputError
from attnreg.flash_attn.rotary import check_tables


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Check layouts, shapes, devices and dtypes, and which arguments need or exclude each other.

    Raises:
        InvalidInputError: an argument is wrong; shapes are as for `flash_attn_with_kvcache`.
    """
    check_untraced("PyTorch's scaled_dot_product_attention")
    numbers = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "block_table": block_table}
    check_layouts(**numbers)
    check_in_memory(**numbers)
    check_layouts(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    _check_forms({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, "k": k, "v": v}, block_table is not None)
    # Before the others are compared with q, so that they aren't at fault where q is.
    check_same("device", q=q, k_cache=k_cache, v_cache=v_cache)
    if block_table is not None:
        _check_integers("block_table", block_table, q, (len(q), "pages of a sequence"))
        if not k_cache.shape[1]:
            raise InvalidInputError(
                f"k_cache: got shape {tuple(k_cache.shape)}, expected pages of at least one token"
            )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise InvalidInputError(
            f"v_cache: got shape {tuple(v_cache.shape)}, expected that of k_cache up to the head dim, "
            f"{tuple(k_cache.shape)}"
        )
    _check_new(q, (k, v), (k_cache, v_cache))
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidInputError("rotary_cos and rotary_sin: got one of the two, expected both or none")
    if rotary_cos is not None and rotary_sin is not None:
        check_tables(rotary_cos, rotary_sin, q, "q")
        _check_rotary(rotary_cos, rotary_sin, q.shape[-1], _room(k_cache, block_table))
    if cache_seqlens is None and (k is not None or rotary_cos is not None):
        raise InvalidInputError("cache_seqlens: got None, expected the lengths before k and v are appended")
    if cache_batch_idx is not None and block_table is not None:
        raise InvalidInputError(
            "cache_batch_idx: got a tensor, expected None, as block_table says where keys are"
        )
    if cache_batch_idx is None and block_table is None and len(k_cache) < len(q):
        raise InvalidInputError(
            f"k_cache: got {len(k_cache)} sequences for {len(q)} of q, expected at least as many"
        )


def _check_forms(caches: dict[str, Tensor], others: dict[str, Tensor | None], is_paged: bool) -> None:
    """Check that tensors are strided and have 4 dimensions each."""
    check_layouts(**others, **caches)
    for name, tensor in (others | caches).items():
        if tensor is not None and tensor.dim() != 4:
            is_pages = is_paged and name in caches
            layout = f"({'pages, page size' if is_pages else 'batch, length'}, heads, head_dim)"
            got = f"shape {tuple(tensor.shape)}"
            raise InvalidInputError(f"{name}: got {got}, expected 4 dimensions {layout}")


def _check_new(q: Tensor, new: tuple[Tensor | None, Tensor | None], caches: tuple[Tensor, Tensor]) -> None:
    """Check the new keys and values, (B, S_new, H_k, D) each."""
    (k, v), (k_cache, v_cache) = new, caches
    if (k is None) != (v is None):
        raise InvalidInputError("k and v: got one of the two, expected both or none")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        # PyTorch would expand a tensor of another shape.
        expected = len(q), (k if k is not None else q).shape[1], *cache.shape[2:]
        if tensor is not None and tuple(tensor.shape) != expected:
            raise InvalidInputError(
                f"{name}: got shape {tuple(tensor.shape)}, expected {expected}: the batch of q, "
                f"{'' if tensor is k else 'the length of k, '}heads and head_dim of {name}_cache"
            )
        if tensor is None or (tensor.device == q.device and tensor.dtype == cache.dtype):
            continue
        if tensor.device != q.device or not autocasts(q.device.type):
            expected_dtype = f"{cache.dtype}, as of the cache, on {q.device}"
            raise InvalidInputError(
                f"{name}: got {tensor.dtype} on {tensor.device}, expected {expected_dtype}"
            )


def check_places(
    q: Tensor,
    k_cache: Tensor,
    places: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    used: Tensor,
    new: int,
) -> None:
    """Check which keys a call uses; on a GPU not the numbers, because reading them would wait for it.

    `q` is (B, S_q, H, D). `k_cache` is (sequences, S_k, H_k, D), or pages, (pages, page size, H_k, D).
    `places` and `leftpad` are integers (B,), `block_table` integers (B, pages of a sequence). Sequences have
    `used` tokens in the cache, int32 (B,), and get `new` ones each.

    Raises:
        InvalidInputError: a tensor has another form, or a number is out of range.
        UnsupportedInputError: the storage of `leftpad` was freed.
    """
    check_layouts(cache_leftpad=leftpad)
    check_in_memory(cache_leftpad=leftpad)
    if block_table is not None and _is_read(block_table, used):
        counts = (-((used + new) // -k_cache.shape[1])).tolist()
        for row, (pages, count) in enumerate(zip(block_table.tolist(), counts, strict=True)):
            _check_each(f"block_table[{row}]", pages[:count], [len(k_cache) - 1] * count)
    if places is not None:
        _check_integers("cache_batch_idx", places, q, (len(q),))
        if _is_read(places):
            _check_each("cache_batch_idx", places.tolist(), [len(k_cache) - 1] * len(q))
    if leftpad is not None:
        _check_integers("cache_leftpad", leftpad, q, (len(q),))
        if _is_read(leftpad, used):
            _check_each("cache_leftpad", leftpad.tolist(), (used + new).tolist())


def _check_integers(name: str, value: object, q: Tensor, shape: tuple[int | str, ...]) -> None:
    """Check that an argument is a tensor of int32 or int64 on the device of q."""
    if isinstance(value, Tensor):
        fits = value.dim() == len(shape) and len(value) == shape[0] and value.device == q.device
        if fits and value.dtype in (torch.int32, torch.int64):
            return  # before any message is made, because Dynamo can't make one from a size
        got, kind = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}", ""
    else:
        got, kind = repr(value), "a tensor, "
    of_shape = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    raise InvalidInputError(f"{name}: got {got}, expected {kind}int32 of shape {of_shape} on {q.device}")


def _is_read(*tensors: Tensor) -> bool:
    """Whether the host may read the numbers of tensors."""
    return not torch.compiler.is_compiling() and all(x.is_cpu for x in tensors) and is_plain(*tensors)


def _check_each(name: str, numbers: list[int], highest: list[int]) -> None:
    for at, (number, most) in enumerate(zip(numbers, highest, strict=True)):
        if not 0 <= number <= most:
            raise InvalidInputError(f"{name}: got {number} at index {at}, expected 0 to {most}")


def _check_rotary(cos: Tensor, sin: Tensor, head_dim: int, room: int) -> None:
    shapes = tuple(cos.shape), tuple(sin.shape)
    if shapes[0] != shapes[1] or cos.dim() != 2 or cos.shape[0] < room or 2 * cos.shape[1] > head_dim:
        raise InvalidInputError(
            f"rotary_cos and rotary_sin: got shapes {shapes[0]} and {shapes[1]}, expected equal ones: "
            f"(positions, rotary dim / 2), at least {room} positions and at most {head_dim} rotary dims"
        )


def _room(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Return the most tokens of one sequence that a cache can hold."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def lengths_of(
    cache_seqlens: int | Tensor | None, q: Tensor, k_cache: Tensor, block_table: Tensor | None, new: int
) -> Tensor:
    """Return the number of tokens of each sequence in the cache, int32 (B,); raise if `new` ones don't fit.

    Lengths on a GPU aren't checked, because reading them would wait for it.
    """
    room = _room(k_cache, block_table)
    if isinstance(cache_seqlens, Tensor):
        _check_integers("cache_seqlens", cache_seqlens, q, (len(q),))
        numbers = cache_seqlens.tolist() if _is_read(cache_seqlens) and len(cache_seqlens) else [0]
    elif cache_seqlens is None or isinstance(cache_seqlens, Integral):
        numbers = [room if cache_seqlens is None else int(cache_seqlens)]
    else:
        raise InvalidInputError(f"cache_seqlens: got {cache_seqlens!r}, expected a tensor or one number")
    if min(numbers) < 0 or max(numbers) > room - new:
        of_what = "the cache" if block_table is None else f"a row of block_table {tuple(block_table.shape)}"
        if new > room:
            raise InvalidInputError(f"k: got {new} tokens, expected at most {room}, the room of {of_what}")
        at, wrong = next((at, n) for at, n in enumerate(numbers) if not 0 <= n <= room - new)
        got = f"{wrong} at index {at}" if isinstance(cache_seqlens, Tensor) else str(wrong)
        tokens = f"{room} tokens, {new} of them new" if new else f"{room} tokens"
        raise InvalidInputError(
            f"cache_seqlens: got {got}, expected 0 to {room - new}, as {of_what} has room for {tokens}"
        )
    # Only now, because a number that doesn't fit may not fit int32, either.
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens.to(torch.int32)
    return torch.full((len(q),), numbers[0], dtype=torch.int32, device=k_cache.device)
