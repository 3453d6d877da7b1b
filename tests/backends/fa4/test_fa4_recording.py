"""Promises about recording a call of FA4's package: what a recipe holds, and which calls can have none."""

import logging
import sys
import threading
import types
from collections import UserDict

import pytest
import torch
from support.fake_fa4 import (
    BOTH,
    NEITHER,
    AuxData,
    call_of,
    count_recorded,
    dense,
    dense_call,
    entered_by_round,
)

from attnreg.backends.fa4 import recording
from attnreg.backends.fa4.package import PackageCall
from attnreg.backends.fa4.recording import record


def interface():
    return sys.modules["flash_attn.cute.interface"]


KEPT, ACROSS = torch.ones(1), torch.ones(2, 6).mT
FOREIGN = "a launch is given a tensor that is neither the call's nor allocated in it"


def launch_one_more(package, *arguments, **keywords):
    """Have the forward launch one more kernel with these arguments; a callable is given the output."""

    def kernel(*given, **named):
        package.given.append(given)

    def at_end(out):
        given = [x(out) if callable(x) else x for x in arguments]
        cache = interface()._flash_attn_fwd.compile_cache
        if "one more" not in cache:
            cache["one more"] = kernel
        cache["one more"](*given, **keywords)

    package.at_end, package.given = at_end, []


@pytest.mark.parametrize(
    ("arguments", "keywords", "why"),
    [
        ((KEPT,), {}, FOREIGN),
        (((1, AuxData((KEPT,))),), {}, FOREIGN),
        (([1],), {}, "a launch is given a list"),
        ((torch.Size((1,)),), {}, "a launch is given a Size"),
        ((torch.float32,), {}, "a launch is given a dtype"),
        ((1,), {"named": 1}, "a launch takes keywords"),
        ((lambda out: out.mul_(1),), {}, "it calls aten::mul_.Tensor"),
        ((lambda out: out.view(-1),), {}, "it calls aten::view"),
        ((lambda out: torch.empty(1, device="meta"),), {}, "it allocates a torch.strided tensor on meta"),
    ],
)
def test_a_call_that_no_recipe_can_hold_is_recorded_once_and_goes_through_the_package(
    kernels, package, arguments, keywords, why, caplog
):
    launch_one_more(package, *arguments, **keywords)
    recorded = count_recorded(package)
    with caplog.at_level(logging.DEBUG, "attnreg"):
        found = entered_by_round(kernels, package, 5)
    assert found == [BOTH, BOTH, BOTH, ["forward"], ["forward"]]
    assert len(recorded) == 2  # once each direction
    assert caplog.messages == [f"FA4 calls the package's Python for each forward like this one: {why}"]


def test_tuples_are_replayed_with_the_tensors_of_the_call(kernels, package):
    constants = ("word", (), (1, (2.5, None)), AuxData(scalars=(True,)))
    launch_one_more(package, *constants, lambda out: AuxData((out, (3, out))))
    for seed in range(5):
        query, key, value, _ = dense(seed=seed)
        package.given.clear()
        out, _ = kernels.forward(query, key, value, call_of(query, key))
        *plain, aux = package.given[0]
        assert plain == list(constants)
        assert type(plain[3]) is type(aux) is AuxData
        first, (three, second) = aux.tensors
        assert first.data_ptr() == second.data_ptr() == out.data_ptr()
        assert (three, aux.scalars) == (3, None)
    assert len(package.calls) == 3


def call_of_results(results, *tensors, direction="forward"):
    """Return a call of a function that returns this of its tensors."""
    named = {str(index): x for index, x in enumerate(tensors)}
    return PackageCall(direction, lambda **given: results(*given.values()), named, {})


@pytest.mark.parametrize(
    ("results", "why"),
    [
        (lambda x: (x, torch.empty_like(x)), "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x), KEPT), "a result isn't one of its allocations"),
        (lambda x: (torch.empty_like(x), torch.zeros(3)), "no launch was seen"),
    ],
)
def test_a_call_without_results_or_launches_of_its_own_has_no_recipe(package, results, why):
    got, recorded = record(call_of_results(results, dense()[0]))
    assert len(got) == 2
    assert recorded == why


@pytest.mark.parametrize(
    ("allocate", "zeroed"),
    [
        (lambda x: torch.empty(3, 4, dtype=torch.int32), False),
        (lambda x: torch.empty_like(x), False),
        (lambda x: torch.empty_like(ACROSS), False),
        (lambda x: x.new_empty(5), False),
        (lambda x: torch.empty_strided((2, 3), (1, 2)), False),
        (lambda x: x.new_empty_strided((2, 3), (1, 8)), False),
        (lambda x: torch.zeros(3, dtype=torch.int64), True),
        (lambda x: torch.zeros_like(x), True),
        (lambda x: x.new_zeros(2, 2), True),
    ],
)
def test_allocations_are_repeated_with_the_same_arguments(package, allocate, zeroed):
    given, before = torch.ones(2, 6), allocate(torch.ones(2, 6))
    cache = interface()._bwd_preprocess
    cache.compile_cache[()] = lambda *tensors: None

    def results(x):
        made = allocate(x), torch.empty_like(x)
        cache.compile_cache[()](*made)
        return made

    (made, _), recipe = record(call_of_results(results, given))
    replayed, _ = recipe.replay(torch.zeros(2, 6))
    for one in (made, replayed):
        assert (one.shape, one.stride(), one.dtype) == (before.shape, before.stride(), before.dtype)
    assert replayed.data_ptr() != made.data_ptr()
    assert recipe.zeroed == ((recipe.allocations[0][0],) if zeroed else ())
    if zeroed:
        assert not replayed.any()
    assert recipe.addresses[0] == given.data_ptr()
    assert recipe.addresses[recipe.allocations[0][0]] == made.data_ptr()


def test_another_threads_launches_are_not_recorded_and_run_all_the_same(kernels, package):
    ran = []

    def elsewhere():
        cache = interface()._bwd_preprocess.compile_cache
        if "elsewhere" not in cache:
            cache["elsewhere"] = lambda tensor: ran.append(tensor)
        cache["elsewhere"](torch.ones(1).mul_(2))

    def pause():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    package.pause = pause
    caches = []
    package.at_end = lambda out: caches.append(type(interface()._bwd_preprocess.compile_cache).__name__)
    assert entered_by_round(kernels, package, 5) == [BOTH, BOTH, BOTH, NEITHER, NEITHER]
    assert caches == ["UserDict", "_RecordingCache", "UserDict"]
    assert len(ran) == 6


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
def test_caches_are_put_back_after_an_exception_and_the_next_call_is_recorded(kernels, package, error):
    def caches():
        return [x.compile_cache for x in vars(interface()).values() if hasattr(x, "compile_cache")]

    before = caches()
    query, key, value, _, call = dense_call()
    kernels.forward(query, key, value, call)
    replaced = []

    def fail(name):
        replaced.append(not any(x is y for x, y in zip(caches(), before, strict=True)))
        raise error

    package.on_launch = fail
    with pytest.raises(type(error)) as caught:
        kernels.forward(query, key, value, call)
    assert caught.value is error
    assert replaced == [True]
    assert all(x is y for x, y in zip(caches(), before, strict=True))
    package.on_launch = lambda name: None
    assert entered_by_round(kernels, package, 4) == [BOTH, BOTH, ["backward"], NEITHER]
    assert all(x is y for x, y in zip(caches(), before, strict=True))


def test_a_recording_cache_does_whatever_else_the_cache_does():
    cache = UserDict()
    recording_cache = recording._RecordingCache(cache, types.SimpleNamespace(thread=None))
    recording_cache["key"] = print
    assert cache["key"] is print
    assert recording_cache["key"] is print
    assert "key" in recording_cache
    assert "other" not in recording_cache
    assert recording_cache.data is cache.data
    with pytest.raises(KeyError):
        recording_cache["other"]
