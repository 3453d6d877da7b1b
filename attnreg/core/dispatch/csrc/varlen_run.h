// How a kept call of `varlen_attn` is found and run, a forward or a backward.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "offsets.h"
#include "varlen_call.h"

namespace attnreg {

// Numbers of the sites that aren't ops of aten's.
constexpr int64_t kVarlenForward = -1, kVarlenBackward = -2;

// The tensors of a call's options, undefined if there are none, and what is so of the rows of a forward.
struct Further {
  at::Tensor sinks{};  // those that a kernel may count
  at::Tensor used{};   // how many keys of each sequence count
  at::Tensor table{};  // the pages of each sequence; with them `used` is there, and the offsets of keys are any
  bool drops_lse = false;      // whether nobody reads the LSE
  bool fills_queries = false;  // whether every row of the query is known to belong to a sequence
};

// Whether the tensors of a forward or, behind a gradient (`query` is 1), a backward end in both offsets; those of a dense
// call, (B, S, H, D), don't.
inline bool has_offsets(const Tensors& tensors, size_t query) {
  return tensors.size() == (query == 0 ? 5 : 8);
}

// The lengths of a dense call; false where they don't fit each other.
inline bool read_dense_lengths(const Tensors& tensors, size_t query, Lengths& lengths) {
  const at::Tensor &q = tensors[query], &k = tensors[query + 1], &v = tensors[query + 2];
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4 || k.size(0) != q.size(0) || v.size(0) != q.size(0) || v.size(1) != k.size(1)) {
    return false;
  }
  const int64_t batch = q.size(0), max_q = q.size(1), max_k = k.size(1);
  lengths = {{batch, max_q, max_k, batch * max_q, batch * max_k}};
  return true;
}

// The lengths of a call, whose tensors are those of a forward or, behind a gradient, a backward; offsets come last.
// False where they don't fit each other, which Python says.
inline bool read_lengths(const VarlenCall& call, const Tensors& tensors, size_t query, const Further& further, Lengths& lengths) {
  if (!has_offsets(tensors, query)) {
    return read_dense_lengths(tensors, query, lengths);
  }
  const at::Tensor &used = further.used, &table = further.table;
  const int64_t of_keys = table.defined() ? 4 : 3;
  const at::Tensor &q = tensors[query], &k = tensors[query + 1], &v = tensors[query + 2];
  const at::Tensor &queries = tensors[tensors.size() - 2], &keys = tensors.back();
  constexpr int64_t most = int64_t{1} << 31;  // kernels count in 32 bits
  if (q.dim() != 3 || k.dim() != of_keys || v.dim() != of_keys || queries.dim() != 1 || keys.dim() != 1 || queries.size(0) < 1 ||
      keys.size(0) != queries.size(0) || k.size(0) != v.size(0) || call.max_q < 0 || call.max_q >= most || call.max_k < 0 ||
      call.max_k >= most || (used.defined() && (used.dim() != 1 || used.size(0) != queries.size(0) - 1)) ||
      (table.defined() && (table.dim() != 2 || table.size(0) != queries.size(0) - 1))) {
    return false;
  }
  const int64_t batch = queries.size(0) - 1;
  lengths = {{batch, call.max_q, call.max_k, q.size(0), table.defined() ? batch * call.max_k : k.size(0)}};
  return true;
}

// The key of a call's kind; empty for a call that has none. No call has both sinks and counts of keys.
inline Key varlen_key(int64_t site, const VarlenCall& call, const Tensors& tensors, size_t query, const Further& further, Lengths& lengths) {
  const at::Tensor &sinks = further.sinks, &used = further.used, &table = further.table;
  Key key;
  if (!read_lengths(call, tensors, query, further, lengths)) {
    return key;
  }
  const auto modes = modes_of(
      tensors[query], tensors[query].requires_grad() || tensors[query + 1].requires_grad() || tensors[query + 2].requires_grad());
  if (!modes || !std::all_of(tensors.begin(), tensors.end(), is_in_memory) || (sinks.defined() && !is_in_memory(sinks)) ||
      (used.defined() && !is_in_memory(used)) || (table.defined() && !is_in_memory(table))) {
    return key;
  }
  const size_t count = tensors.size();
  const bool is_packed = has_offsets(tensors, query);
  // Where torch 2.11 keeps its cuDNN graphs by the strides of all but the gradient, these have to be the output's.
  const bool last = is_packed ? tensors[count - 2].is_same(tensors[count - 1])
                              : query == 1 && tensors[0].strides() == tensors[kLse - 1].strides();
  key.append({site, call.choice, *modes, call.causal | call.gqa << 1 | last << 2 | used.defined() << 3 | table.defined() << 4,
              call.left, call.right, call.scale ? bits_of(*call.scale) : 0, call.scale.has_value()});
  for (size_t i = 0; i < count; i++) {
    const bool is_lse = query == 1 && i == kLse;
    const uint32_t rows = is_packed ? (is_lse ? kRowsOfLse : kFirst) : (is_lse ? kBatchHeadsRows : kBatchRows);
    append(tensors[i], true, rows, key, is_lse);
  }
  if (sinks.defined()) {
    append(sinks, true, kNone, key);
  }
  if (used.defined()) {
    append(used, true, kFirst, key);
  }
  if (table.defined()) {
    append(table, true, kBatchRows, key);
  }
  return key;
}

// What a launcher is given that takes how many keys of each sequence count, where all do.
inline Tensors with_offsets_of_keys(const Tensors& tensors, const at::Tensor& offsets) {
  Tensors with_offsets(tensors.begin(), tensors.end() - 1);
  with_offsets.push_back(offsets);
  return with_offsets;
}

// What a launcher that counts sinks is given: they come before the offsets.
inline Tensors with_sinks_given(const Tensors& tensors, const at::Tensor& sinks) {
  Tensors with_sinks(tensors.begin(), tensors.end() - 2);
  with_sinks.push_back(sinks);
  with_sinks.append(tensors.end() - 2, tensors.end());
  return with_sinks;
}

struct Counts {  // see `launching/counts.py`
  at::Tensor counts, offsets;
};

// How many keys each sequence has, and a copy of the offsets, derived once for all calls with them; nothing where that can't be
// done any more.
inline std::optional<Counts> counts_of(const Derivation& derivation, const at::Tensor& queries, const at::Tensor& keys) {
  const c10::OptionalDeviceGuard device_guard(queries.device());
  const int64_t batch = queries.size(0) - 1;
  const WithGil gil;
  const auto read = derive(derivation, queries, keys, stream_of(queries));
  if (!read) {
    return std::nullopt;
  }
  return Counts{ints_in(read->tensor, 0, batch), ints_in(read->tensor, (batch + 3) / 4 * 4, batch + 1)};
}

// Run a kept call; false where there is none, or it can't be run so. The caller counts `sinks` that the entry doesn't.
// `known` is what is known of rows, which is found out unless every row sees a key.
inline bool run_varlen(
    const Key& key, const Lengths& lengths, const LookedUp& looked_up, const Tensors& tensors, size_t query, Facts& known,
    const Further& further, Tensors& results) {
  const at::Tensor& sinks = further.sinks;
  const Entry* entry = looked_up.entry.get();
  if (!entry || entry->is_due() || entry->is_native()) {
    return false;
  }
  const size_t count = tensors.size();
  const bool is_packed = has_offsets(tensors, query);
  if (!is_packed) {
    known = {true, true};
  }
  const at::Tensor &queries = tensors[count - 2], &keys = tensors[count - 1];  // of a dense call nothing asks for them
  const int64_t tokens_q = lengths.numbers[Lengths::kTokensQ], tokens_k = lengths.numbers[Lengths::kTokensK];
  if (entry->counts && (tensors[query].numel() == 0 || queries.size(0) < 2)) {
    return false;  // nothing is launched without queries or sequences
  }
  const auto counts = entry->counts ? counts_of(*entry->counts, queries, keys) : std::nullopt;
  if (entry->counts && !counts) {
    return false;
  }
  const at::Tensor& used = counts ? counts->counts : further.used;
  Question question;
  bool fills_queries = further.fills_queries, asks_queries = false;
  if (!known.knows_rows && tensors[query].is_cuda()) {
    // Decoding has other keys at each call, but the same offsets of queries. Of all others both are asked about at once.
    const bool is_even = tokens_q == lengths.numbers[Lengths::kBatch] * lengths.numbers[Lengths::kMaxQ];
    if (!used.defined() && !(is_even && !queries.is_same(keys) && has_zeroes(*entry, lengths, further.drops_lse))) {
      known = facts_of(queries, keys, tokens_q, tokens_k, question);
    } else if (!fills_queries && is_even && (entry->op || entry->zeroes_rows)) {
      fills_queries = facts_of(queries, queries, tokens_q, tokens_q, question).fills_rows;
      asks_queries = true;
    }
  }
  fills_queries = fills_queries || known.fills_rows || known.knows_rows;
  const Tensors operands = counts ? with_offsets_of_keys(tensors, counts->offsets)
                               : entry->counts_sinks ? with_sinks_given(tensors, sinks) : Tensors();
  Launch call{operands.empty() ? tensors : operands, lengths, is_packed, known.knows_rows, known.fills_rows, query == 0};
  call.used = used.defined() ? &used : nullptr;
  call.table = further.table.defined() ? &further.table : nullptr;
  call.fills_queries = fills_queries;
  call.drops_lse = further.drops_lse;
  call.asks_queries = asks_queries;
  if (question.is_open()) {
    if (!entry->counts_sinks && can_answer(*entry, call)) {
      call.answer = &question.place;  // one kernel less
    } else if (asks_queries) {
      ask_device(queries, queries, tokens_q, tokens_q, question);
    } else {
      ask_device(queries, keys, tokens_q, tokens_k, question);
    }
  }
  if (entry->counts_sinks && !known.knows_rows && tensors[query].is_cuda()) {
    return false;  // a kernel's LSE of a row without a key may be the sink
  }
  const auto run_entry = [&] {
    Spare spare;
    return run(*entry, call, tensors[query].key_set(), results, spare);
  };
  if (!run_unless_declined(*entry, run_entry)) {
    erase(key, lengths);
    results.clear();
    return false;
  }
  entry->count();
  return true;
}

}  // namespace attnreg
