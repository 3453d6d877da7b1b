"""Promises of copies by large elements: bit for bit those of torch, whatever the layout."""

import pytest
import torch

from attnreg.core.torchlib.layout import LARGE, copy, in_large_elements


def numbers(*shape, dtype=torch.bfloat16):
    """Return every bit pattern, those that are no numbers included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.arange(count).mul(197).to(torch.uint8).view(dtype).view(shape)


def bits(x):
    return x.contiguous().view(torch.uint8).tolist()


LAYOUTS = {
    "heads that are cut out": lambda x: x[:, :, 1:3],
    "another order of dims": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:1].expand(6, -1, -1, -1),
    "a head dim that has no sixteen bytes": lambda x: x[..., :7],
    "a row that begins in between": lambda x: x[..., 3:11],
    "every second element": lambda x: x[..., ::2],
    "an address in between": lambda x: x.flatten()[1:129].view(2, 8, 1, 8),
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_copy_has_the_bits_of_its_source(layout, dtype):
    source = layout(numbers(6, 5, 4, 16, dtype=dtype))
    for to in (torch.zeros_like(source), torch.zeros(source.shape, dtype=dtype)):
        copy(to, source)
        assert bits(to) == bits(source)
    room = torch.zeros((*source.shape[:-1], source.shape[-1] + 5), dtype=dtype)
    copy(room[..., 5:], source)
    assert bits(room[..., 5:]) == bits(source)
    assert not room[..., :5].any()


def test_elements_are_large_where_every_tensor_can_be_seen_so():
    large, odd = numbers(3, 4, 8), numbers(3, 4, 7)
    assert [x.dtype for x in in_large_elements(large, large[:, 1:])] == [LARGE, LARGE]
    (seen,) = in_large_elements(large[:, 1:])
    assert (seen.shape, seen.data_ptr()) == ((3, 3, 1), large[:, 1:].data_ptr())
    for unfit in (odd, large[..., 4:], large.mT, large.flatten()[4:12]):
        assert in_large_elements(large, unfit) == (large, unfit)
