"""Promises about batches that say nowhere where documents begin: one warning, and the batch as it was."""

import copy
import inspect
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DataCollatorWithFlattening  # noqa: E402

from attnreg.integrations import flattening  # noqa: E402

USUAL = DataCollatorWithFlattening.__call__
FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


@pytest.fixture(autouse=True)
def watched():
    """Have collators watched in a test, and put theirs back after it."""
    before = DataCollatorWithFlattening.__call__
    DataCollatorWithFlattening.__call__ = usual()
    flattening.warn_of_mixed_documents()
    yield
    DataCollatorWithFlattening.__call__ = before


def usual():
    return getattr(USUAL, "__wrapped__", USUAL)


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if "DataCollatorWithFlattening" in one.getMessage()]


def test_a_batch_that_mixes_documents_is_warned_of_once_and_is_as_it_was(caplog):
    collator = DataCollatorWithFlattening(return_position_ids=False)
    batch, _ = collator(FEATURES), collator(FEATURES)
    assert warnings(caplog) == [flattening.WARNING]
    assert DataCollatorWithFlattening.__call__ is usual()  # put back, once it is said
    expected = usual()(collator, FEATURES)
    assert batch.keys() == expected.keys() == {"input_ids", "labels"}
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({}, FEATURES),
        ({"return_position_ids": False, "return_flash_attn_kwargs": True}, FEATURES),
        ({"return_position_ids": False}, FEATURES[:1]),
    ],
    ids=["positions", "offsets", "one document"],
)
def test_other_batches_are_not_warned_of(caplog, options, features):
    DataCollatorWithFlattening(**options)(features, return_tensors="np")
    assert warnings(caplog) == []
    assert DataCollatorWithFlattening.__call__ is not usual()


def test_positions_of_a_sequence_index_alone_do_not_separate_documents(caplog):
    DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True)(FEATURES)
    assert warnings(caplog) == [flattening.WARNING]


def test_the_collator_is_theirs_to_programs(caplog):
    ours = DataCollatorWithFlattening.__call__
    assert ours == usual() and repr(ours) == repr(usual()) and hash(ours) == hash(usual())
    assert inspect.signature(ours) == inspect.signature(usual())
    assert copy.deepcopy(ours) is ours and pickle.loads(pickle.dumps(ours)) is ours
    collator = pickle.loads(pickle.dumps(DataCollatorWithFlattening()))
    bound = pickle.loads(pickle.dumps(collator.__call__))
    assert bound(FEATURES)["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    flattening.warn_of_mixed_documents()  # a second time
    assert DataCollatorWithFlattening.__call__ is ours


def test_a_collator_of_the_program_that_builds_on_theirs_is_watched_too(caplog):
    class Mine(DataCollatorWithFlattening):
        def __call__(self, features, return_tensors=None, separator_id=None):
            return super().__call__(features[:2], return_tensors, separator_id)

    assert Mine(return_position_ids=False)(FEATURES)["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert warnings(caplog) == [flattening.WARNING]


def test_installing_has_collators_watched(monkeypatch):
    from attnreg.integrations import transformers as integration

    DataCollatorWithFlattening.__call__ = usual()
    monkeypatch.setattr(integration.policy, "activate", lambda active: None)
    monkeypatch.setattr(integration.aten, "ensure", lambda: None)
    integration.install()
    assert isinstance(DataCollatorWithFlattening.__call__, flattening.MethodReplacement)
