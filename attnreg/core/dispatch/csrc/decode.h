// A step of decoding: new keys and values are written into a cache, and queries attend over what it holds.

#pragma once

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "layouts.h"
#include "varlen.h"

namespace attnreg {

// The first sequences of a (B, S, H, D) tensor as packed rows, (B * S, H, D); undefined if the rows are no even steps apart.
inline at::Tensor packed_rows(const at::Tensor& x, int64_t batch) {
  const int64_t length = x.size(1);
  const int64_t step = length == 1 ? x.stride(0) : x.stride(1);
  if (batch > 1 && x.stride(0) != length * step) {
    return at::Tensor();
  }
  return view_of(x, {batch * length, x.size(2), x.size(3)}, {step, x.stride(2), x.stride(3)});
}

// Packed rows, (B * S, H, D), as a (B, S, H, D) tensor.
inline at::Tensor unpacked_rows(const at::Tensor& x, int64_t batch, int64_t length) {
  return view_of(x, {batch, length, x.size(1), x.size(2)}, {length * x.stride(0), x.stride(0), x.stride(1), x.stride(2)});
}

// A packed LSE, (H, B * S), as a new tensor (B, H, S), float32.
inline at::Tensor unpacked_lse(const at::Tensor& lse, int64_t batch, int64_t length) {
  const at::Tensor view = view_of(lse, {batch, lse.size(0), length}, {length * lse.stride(1), lse.stride(0), lse.stride(1)});
  return at::empty(view.sizes(), view.options().dtype(at::kFloat)).copy_(view);
}

// ---- Offsets of sequences that are all equally long. Python makes them, as it has to know them, too.

struct RegularOffsets {
  int64_t batch, length_q, length_k;
  c10::Stream stream;
  at::Tensor queries, keys;
};

constexpr size_t kMostRegular = 64;
constexpr int64_t kPaged = -1;  // in place of the length of keys that are pages

inline auto& regular_offsets = *new std::vector<RegularOffsets>;  // the newest last; under the interpreter's lock

inline const RegularOffsets* find_regular(int64_t batch, int64_t length_q, int64_t length_k, c10::Stream stream) {
  for (const RegularOffsets& each : regular_offsets) {
    if (each.batch == batch && each.length_q == length_q && each.length_k == length_k && each.stream == stream) {
      return &each;
    }
  }
  return nullptr;
}

// ---- New keys and values

// Whether rows of a tensor can be read or written by their address.
inline bool has_plain_rows(const at::Tensor& x) {
  return x.stride(3) == 1 && x.element_size() % 2 == 0 && is_in_memory(x);
}

// Whether rows of a cache can be written by their address: no two of them lie at the same place, and torch would write, too.
inline bool is_writable(const at::Tensor& cache) {
  for (int64_t i = 0; i < cache.dim(); i++) {
    if (cache.size(i) > 1 && cache.stride(i) <= 0) {
      return false;
    }
  }
  return has_plain_rows(cache) && (!cache.is_inference() || c10::InferenceMode::is_enabled());
}

// A number of a tensor of int32 on a CPU.
inline int64_t number_at(const at::Tensor& numbers, int64_t place) {
  return static_cast<const int32_t*>(numbers.const_data_ptr())[place * numbers.stride(0)];
}

// Where the tokens of sequences lie in a cache.
struct Places {
  at::Tensor table;  // int32 (B, pages of a sequence), contiguous; undefined where a sequence is a page, and pages are in order
  int64_t size;      // tokens of a page
  int64_t pages;     // how many there are

  // How many tokens a sequence may have.
  int64_t room() const {
    return table.defined() ? table.size(1) * size : size;
  }

  // The page of a token, on a CPU.
  int64_t page_of(int64_t sequence, int64_t token) const {
    return table.defined() ? static_cast<const int32_t*>(table.const_data_ptr())[sequence * table.size(1) + token / size] : sequence;
  }
};

// New rows (B, S_new, H, D) for a cache (pages, tokens of a page, H, D).
struct NewRows {
  at::Tensor rows, cache;

  bool fit() const {
    return has_plain_rows(rows) && is_writable(cache) && !rows.storage().is_alias_of(cache.storage());
  }

  // Write the row of a sequence at a place of a page, on a CPU.
  void write(int64_t sequence, int64_t number, int64_t page, int64_t place) const {
    const auto size = static_cast<int64_t>(rows.element_size()), heads = rows.size(2), bytes = rows.size(3) * size;
    const char* from = static_cast<const char*>(rows.const_data_ptr()) + (sequence * rows.stride(0) + number * rows.stride(1)) * size;
    char* to = static_cast<char*>(cache.mutable_data_ptr()) + (page * cache.stride(0) + place * cache.stride(1)) * size;
    for (int64_t head = 0; head < heads; head++) {
      std::memcpy(to + head * cache.stride(2) * size, from + head * rows.stride(2) * size, bytes);
    }
  }

  // What the kernel has to know of them.
  void append_words(c10::SmallVector<int64_t, 32>& words) const {
    const auto size = static_cast<int64_t>(rows.element_size());
    words.push_back(reinterpret_cast<int64_t>(cache.mutable_data_ptr()));
    words.push_back(word_of(rows));
    words.push_back(rows.size(3) * size);
    for (const at::Tensor* x : {&cache, &rows}) {
      for (int64_t i = 0; i < 3; i++) {
        words.push_back(x->stride(i) * size);
      }
    }
  }
};

// Write new keys and values behind the `used` ones of each sequence, int32 (B,), and into `counts` how many there are then.
// False where that can't be done here, or a number is out of range: then nothing was written.
inline bool append_rows(
    const NewRows& keys, const NewRows& values, const Places& places, const at::Tensor& used, const at::Tensor& counts) {
  const int64_t batch = used.size(0), count = keys.rows.size(1);
  if (!keys.fit() || !values.fit() || keys.cache.storage().is_alias_of(values.rows.storage()) ||
      values.cache.storage().is_alias_of(keys.rows.storage())) {
    return false;
  }
  if (const auto device = used.device(); device.is_cpu()) {
    for (int64_t i = 0; i < batch; i++) {
      // Read once more, and checked again: another thread may be writing to it.
      const int64_t first = number_at(used, i);
      TORCH_CHECK(first >= 0 && first + count <= places.room(), "cache_seqlens: got ", first, ", which was another number before");
      for (int64_t j = 0; j < count; j++) {
        const int64_t page = places.page_of(i, first + j), place = (first + j) % places.size;
        TORCH_CHECK(page >= 0 && page < places.pages, "block_table: got ", page, ", which was another number before");
        keys.write(i, j, page, place);
        values.write(i, j, page, place);
      }
      static_cast<int32_t*>(counts.mutable_data_ptr())[i] = static_cast<int32_t>(first + count);
    }
  } else {
    const DeviceCode* code = device_code_of(device);
    if (!code) {
      return false;
    }
    c10::SmallVector<int64_t, 32> words{
        word_of(counts), word_of(used), used.stride(0), places.table.defined() ? word_of(places.table) : 0,
        places.room() / places.size, places.size, places.pages, batch, count, keys.rows.size(2)};
    keys.append_words(words);
    values.append_words(words);
    const c10::OptionalDeviceGuard device_guard(device);
    const int64_t threads = 2 * batch * count * 32;  // a warp for each row
    launch_on(*code, code->append, (threads + kBlock128 - 1) / kBlock128, kBlock128, used, words);
  }
  for (const at::Tensor& cache : {keys.cache, values.cache}) {
    if (!cache.is_inference()) {
      cache.unsafeGetTensorImpl()->bump_version();
    }
  }
  return true;
}

// ---- The step

struct DecodingStep {
  at::Tensor q, k_cache, v_cache, k, v, used, table;

  Places places() const {
    return {table, k_cache.size(1), k_cache.size(0)};
  }

  // Read the tensors; false where Python has to look at them.
  bool read(PyObject* const* arguments) {
    at::Tensor* const all[] = {&q, &k_cache, &v_cache, &k, &v};
    for (size_t i = 0; i < 5; i++) {
      if (!read_optional(arguments[i], *all[i])) {
        return false;
      }
    }
    if (!read_optional(arguments[6], table) || !read_used(arguments[5])) {
      return false;
    }
    return q.defined() && k_cache.defined() && v_cache.defined() && used.defined() && k.defined() == v.defined() && fits();
  }

  // Whether the numbers of tokens are in range, as far as the host can read them.
  bool numbers_fit() const {
    const Places where = places();
    const int64_t count = k.defined() ? k.size(1) : 0, most = where.room() - count;
    if (!is_in_memory(used) || (table.defined() && !is_in_memory(table))) {
      return false;
    }
    for (int64_t i = 0; used.is_cpu() && i < used.size(0); i++) {
      const int64_t number = number_at(used, i);
      if (number < 0 || number > most) {
        return false;
      }
      // The place of a whole sequence is looked at even where no token lies there, as Python does.
      const int64_t tokens = table.defined() ? std::max<int64_t>(number + count, table.size(1) == 1) : 0;
      for (int64_t token = 0; token < tokens; token += where.size) {
        if (const int64_t page = where.page_of(i, token); page < 0 || page >= where.pages) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  // Read how many tokens each sequence has in the cache, a tensor or one number for all.
  bool read_used(PyObject* argument) {
    int64_t number = 0;
    if (!PyLong_CheckExact(argument)) {
      return read_optional(argument, used);
    }
    if (!q.defined() || q.dim() != 4 || !k_cache.defined() || k_cache.dim() != 4 || !read_int(argument, number) ||
        (table.defined() && table.dim() != 2) || number < 0 ||
        number > places().room() - (k.defined() && k.dim() == 4 ? k.size(1) : 0)) {
      PyErr_Clear();
      return false;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const WithoutGil without;
    used = at::full({q.size(0)}, number, q.options().dtype(at::kInt).requires_grad(false));
    return true;
  }

  bool fits() const {
    if (q.dim() != 4 || k_cache.dim() != 4 || v_cache.dim() != 4 || used.dim() != 1 || used.scalar_type() != at::kInt) {
      return false;
    }
    const int64_t batch = q.size(0);
    const auto device = q.device();
    bool fit = q.numel() > 0 && used.size(0) == batch && used.device() == device && k_cache.device() == device &&
        v_cache.device() == device && k_cache.size(1) > 0 && k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3);
    if (table.defined()) {
      fit = fit && table.dim() == 2 && table.size(0) == batch && table.size(1) > 0 && table.scalar_type() == at::kInt &&
          table.device() == device && table.is_contiguous();
    } else {
      fit = fit && k_cache.size(0) >= batch;
    }
    if (fit && k.defined()) {
      fit = is_new(k, k_cache) && is_new(v, v_cache) && k.size(1) == v.size(1) && k.size(1) > 0 && k.size(1) <= places().room();
    }
    return fit;
  }

  bool is_new(const at::Tensor& rows, const at::Tensor& cache) const {
    return rows.dim() == 4 && rows.size(0) == q.size(0) && rows.sizes().slice(2) == cache.sizes().slice(2) &&
        rows.device() == q.device() && rows.scalar_type() == cache.scalar_type();
  }
};

// Have Python run a step by its plan, once new keys and values are written.
inline Tensors planned_step(
    PyObject* const* arguments, const Tensors& tensors, const VarlenCall& call, const Further& further, const Key& key,
    const Lengths& lengths, uint64_t generation) {
  std::vector<Object> owners;
  for (size_t i = 0; i < tensors.size(); i++) {
    const bool is_missing = further.table.defined() && i + 1 == tensors.size();  // pages have no offsets
    owners.push_back(owned(THPVariable_Wrap(is_missing ? at::Tensor() : tensors[i])));
  }
  owners.push_back(owned(PyLong_FromLongLong(call.max_q)));
  owners.push_back(owned(PyLong_FromLongLong(call.max_k)));
  const Object used = owned(THPVariable_Wrap(further.used)), table = owned(THPVariable_Wrap(further.table));
  std::vector<PyObject*> plan_arguments;
  for (const Object& each : owners) {
    if (!each || !used || !table) {
      throw_error_of_python();
    }
    plan_arguments.push_back(each.get());
  }
  plan_arguments.insert(plan_arguments.end(), {arguments[7], arguments[8], arguments[9], Py_True, arguments[10]});
  return planned_forward(plan_arguments.data(), false, Py_None, used.get(), table.get(), key, lengths, generation);
}

// Return output, (B, S_q, H, D_v), and LSE, (B, H, S_q) or None, of a step; None where Python has to run it: then
// nothing was written. Arguments are q, both caches, new keys and values or None, how many tokens each sequence has in the
// cache, the pages of each sequence or None, the mask as `varlen_attn` has it, the scale, the choice, whether the program
// gets the LSE, and None, or regular offsets of queries and keys. Offsets say that Python has checked the call and found a
// plan. Without them only calls are run whose kind and class are kept.
inline PyObject* decode(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  DecodingStep step;
  if (count != 14 || !enabled || !plan_forward || is_observed() || !step.read(arguments)) {
    Py_RETURN_NONE;
  }
  const bool is_paged = step.table.defined();
  const int64_t batch = step.q.size(0), length_q = step.q.size(1), length_k = step.places().room();
  const at::Tensor query = packed_rows(step.q, batch), key_rows = is_paged ? step.k_cache : packed_rows(step.k_cache, batch),
                   value_rows = is_paged ? step.v_cache : packed_rows(step.v_cache, batch);
  if (!query.defined() || !key_rows.defined() || !value_rows.defined()) {
    Py_RETURN_NONE;
  }
  const c10::Stream stream = stream_of(step.q);
  const bool is_checked = arguments[12] != Py_None;
  const int64_t length_of_offsets = is_paged ? kPaged : length_k;
  const RegularOffsets* offsets = find_regular(batch, length_q, length_of_offsets, stream);
  if (!offsets) {
    if (!is_checked) {
      Py_RETURN_NONE;
    }
    if (regular_offsets.size() >= kMostRegular) {
      const RegularOffsets dropped = std::move(regular_offsets.front());
      regular_offsets.erase(regular_offsets.begin());
    }
    const at::Tensor queries = tensor_of(arguments[12]);
    regular_offsets.push_back({batch, length_q, length_of_offsets, stream, queries, is_paged ? queries : tensor_of(arguments[13])});
    offsets = &regular_offsets.back();
  }
  const at::Tensor offsets_q = offsets->queries, offsets_k = offsets->keys;

  const bool returns_lse = arguments[11] == Py_True;
  const Tensors tensors{query, key_rows, value_rows, offsets_q, is_paged ? offsets_q : offsets_k};
  Tensors results;
  VarlenCall call{length_q, length_k};
  call.gqa = true;
  if (!read_mask(arguments[7], arguments[8], arguments[9], arguments[10], call) || !suits_autocast(tensors) || !step.numbers_fit()) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  const at::AutoGradMode no_gradient(false);
  {
    RECORD_FUNCTION("attnreg::flash_attn_with_kvcache", std::vector<c10::IValue>({query, key_rows, value_rows}));
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor counts = step.k.defined() ? at::empty({batch}, step.used.options()) : step.used.contiguous();
    const Further further{at::Tensor(), counts, step.table, !returns_lse, true};
    Lengths lengths;
    const Key key = varlen_key(kVarlenForward, call, tensors, 0, further, lengths);
    const LookedUp looked_up = look_up(key, lengths);
    if (key.empty() || !(looked_up.entry || is_checked)) {
      Py_RETURN_NONE;
    }
    bool appended = true, done = false;
    {
      const WithoutGil without;  // a launch may wait for the device
      appended = !step.k.defined() || append_rows({step.k, step.k_cache}, {step.v, step.v_cache}, step.places(), step.used, counts);
      if (appended && looked_up.entry) {
        Facts known;
        done = run_varlen(key, lengths, looked_up, tensors, 0, known, further, results);
      }
    }
    if (!appended) {
      Py_RETURN_NONE;
    }
    if (!done) {
      results = planned_step(arguments, tensors, call, further, key, lengths, looked_up.generation);
    }
  }
  const Object out = owned(THPVariable_Wrap(unpacked_rows(results[0], batch, length_q)));
  at::Tensor of_sequences;
  if (returns_lse) {
    const WithoutGil without;
    of_sequences = unpacked_lse(results[1], batch, length_q);
  }
  const Object lse = owned(THPVariable_Wrap(of_sequences));
  return out && lse ? PyTuple_Pack(2, out.get(), lse.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

}  // namespace attnreg
