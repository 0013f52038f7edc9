// Attention of a few rows of each sequence over the entries that it really has: `attention.py` says what is computed.
//
// A task is a key/value head of a sequence, or a part of its entries where there are fewer of these than threads. It
// takes its entries tile by tile, so that every key and value is read once for all query heads and rows.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t WIDE = Vec::size();
constexpr int64_t TILE = 32;       // entries
constexpr int64_t SHORTEST = 256;  // entries of a part
constexpr float LEAST = std::numeric_limits<float>::lowest();

int64_t padded(int64_t width) { return (width + WIDE - 1) / WIDE * WIDE; }

void widen(const float* from, int64_t count, float* to) { std::copy(from, from + count, to); }

void widen(const at::BFloat16* from, int64_t count, float* to) {
  int64_t at = 0;
  for (; at + 2 * WIDE <= count; at += 2 * WIDE) {
    const auto [low, high] = at::vec::convert_bfloat16_float(at::vec::Vectorized<at::BFloat16>::loadu(from + at));
    low.store(to + at);
    high.store(to + at + WIDE);
  }
  for (; at < count; ++at) to[at] = from[at];
}

// `count` rows of `width` numbers, `stride` apart, as rows of `wide` floats, zeros behind them.
template <typename Stored>
void load(const Stored* from, int64_t stride, int64_t count, int64_t width, int64_t wide, float* to) {
  for (int64_t row = 0; row < count; ++row, from += stride, to += wide) {
    widen(from, width, to);
    std::fill(to + width, to + wide, 0.0f);
  }
}

// scores[i] = query · keys[i], of `N` vectors each.
template <int N>
void multiply(const float* query, const float* keys, int64_t count, float* scores) {
  Vec part[N];
  for (int i = 0; i < N; ++i) part[i] = Vec::loadu(query + i * WIDE);
  for (int64_t entry = 0; entry < count; ++entry, keys += N * WIDE) {
    Vec sum = part[0] * Vec::loadu(keys);
    for (int i = 1; i < N; ++i) sum = at::vec::fmadd(part[i], Vec::loadu(keys + i * WIDE), sum);
    scores[entry] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
  }
}

void multiply(const float* query, const float* keys, int64_t count, int64_t wide, float* scores) {
  switch (wide / WIDE) {
    case 1: return multiply<1>(query, keys, count, scores);
    case 2: return multiply<2>(query, keys, count, scores);
    case 4: return multiply<4>(query, keys, count, scores);
    case 8: return multiply<8>(query, keys, count, scores);
  }
  for (int64_t entry = 0; entry < count; ++entry, keys += wide) {
    Vec sum(0);
    for (int64_t i = 0; i < wide; i += WIDE) sum = at::vec::fmadd(Vec::loadu(query + i), Vec::loadu(keys + i), sum);
    scores[entry] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
  }
}

// sums = sums · scale + Σ weights[i] · values[i], of `N` vectors that lie `wide` floats apart.
template <int N>
void gather(const float* weights, const float* values, int64_t count, int64_t wide, float scale, float* sums) {
  Vec sum[N];
  for (int i = 0; i < N; ++i) sum[i] = Vec::loadu(sums + i * WIDE) * Vec(scale);
  for (int64_t entry = 0; entry < count; ++entry, values += wide) {
    const Vec weight(weights[entry]);
    for (int i = 0; i < N; ++i) sum[i] = at::vec::fmadd(weight, Vec::loadu(values + i * WIDE), sum[i]);
  }
  for (int i = 0; i < N; ++i) sum[i].store(sums + i * WIDE);
}

void gather(const float* weights, const float* values, int64_t count, int64_t wide, float scale, float* sums) {
  int64_t begin = 0;
  for (; begin + 4 * WIDE <= wide; begin += 4 * WIDE)
    gather<4>(weights, values + begin, count, wide, scale, sums + begin);
  for (; begin < wide; begin += WIDE) gather<1>(weights, values + begin, count, wide, scale, sums + begin);
}

// What a row has gathered: the greatest score, and weights relative to it.
struct Row {
  float peak = LEAST;
  float mass = 0;
};

// Take a tile's scores into account: they become weights, and what was gathered is to be multiplied by the result.
float weigh(Row& row, float* scores, int64_t count) {
  const int64_t wide = padded(count);
  std::fill(scores + count, scores + wide, LEAST);
  Vec peaks(row.peak);
  for (int64_t i = 0; i < wide; i += WIDE) peaks = at::vec::maximum(peaks, Vec::loadu(scores + i));
  const float peak = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, peaks);
  Vec mass(0);
  for (int64_t i = 0; i < wide; i += WIDE) {
    const Vec weight = (Vec::loadu(scores + i) - Vec(peak)).exp();
    weight.store(scores + i);
    mass = mass + weight;
  }
  const float scale = std::exp(row.peak - peak);
  row.mass = row.mass * scale + at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, mass);
  row.peak = peak;
  return scale;
}

// Leave no weight to the scores from `from` on, before `to`.
void hide(float* scores, int64_t count, int64_t from, int64_t to) {
  for (int64_t i = std::max<int64_t>(from, 0); i < std::min(to, count); ++i) scores[i] = LEAST;
}

// The newest entries of a sequence from `first` on, of which each row sees those that are `visible`.
struct Tree {
  const int64_t* first;
  const bool* visible;
  int64_t size;

  void prune(float* scores, int64_t at, int64_t count, int64_t sequence, int64_t row, int64_t rows) const {
    const bool* seen = visible + (sequence * rows + row) * size;
    for (int64_t i = std::max<int64_t>(first[sequence] - at, 0); i < count; ++i) {
      const int64_t node = at + i - first[sequence];
      if (node >= size || !seen[node]) scores[i] = LEAST;
    }
  }
};

// What a task needs of memory: the rows' queries, and a tile's keys, values and scores of a row.
struct Scratch {
  std::vector<float> queries, key, value, scores;

  Scratch(int64_t rows, int64_t deep, int64_t wide)
      : queries(rows * deep), key(TILE * deep), value(TILE * wide), scores(padded(TILE)) {}
};

struct Call {
  const at::Tensor &query, &keys, &values, &slots, &begin, &end;
  std::optional<Tree> tree;
  float scaling, softcap;
  int64_t sinks;  // first entries that every row sees
  int64_t heads, rows, depth, width;

  // The entries from `first` on, before `last`, for all rows of key/value head `group` of a sequence.
  template <typename Stored>
  void run(int64_t sequence, int64_t group, int64_t first, int64_t last, Row* found, float* sums) const {
    const int64_t deep = padded(depth), wide = padded(width);
    Scratch scratch(heads * rows, deep, wide);
    load_queries<Stored>(sequence, group, scratch.queries);
    const auto* all_keys = of_slot<Stored>(keys, sequence, group);
    const auto* all_values = of_slot<Stored>(values, sequence, group);
    for (int64_t at = first; at < last; at += TILE) {
      const int64_t count = std::min(TILE, last - at);
      if (!any_sees(sequence, at, count)) continue;
      load(all_keys + at * keys.stride(2), keys.stride(2), count, depth, deep, scratch.key.data());
      load(all_values + at * values.stride(2), values.stride(2), count, width, wide, scratch.value.data());
      for (int64_t each = 0; each < heads * rows; ++each) {
        if (!sees(sequence, each % rows, at, count)) continue;
        float* scores = scratch.scores.data();
        multiply(scratch.queries.data() + each * deep, scratch.key.data(), count, deep, scores);
        limit(scores, sequence, each % rows, at, count);
        const float scale = weigh(found[each], scores, count);
        gather(scores, scratch.value.data(), count, wide, scale, sums + each * wide);
      }
    }
  }

  // The queries of a head's rows, head by head, times `scaling`.
  template <typename Stored>
  void load_queries(int64_t sequence, int64_t group, std::vector<float>& to) const {
    const int64_t deep = padded(depth);
    for (int64_t head = 0; head < heads; ++head) {
      const auto* own = query.const_data_ptr<Stored>() + sequence * query.stride(0) +
          (group * heads + head) * query.stride(1);
      load(own, query.stride(2), rows, depth, deep, to.data() + head * rows * deep);
    }
    for (float& number : to) number *= scaling;
  }

  template <typename Stored>
  const Stored* of_slot(const at::Tensor& pool, int64_t sequence, int64_t group) const {
    const int64_t slot = slots.const_data_ptr<int64_t>()[sequence];
    return pool.const_data_ptr<Stored>() + slot * pool.stride(0) + group * pool.stride(1);
  }

  // Whether a row sees any of `count` entries from `at` on.
  bool sees(int64_t sequence, int64_t row, int64_t at, int64_t count) const {
    const int64_t own = sequence * rows + row;
    const int64_t from = begin.const_data_ptr<int64_t>()[own], to = end.const_data_ptr<int64_t>()[own];
    return at < to && (at + count > from || at < sinks);
  }

  bool any_sees(int64_t sequence, int64_t at, int64_t count) const {
    for (int64_t row = 0; row < rows; ++row)
      if (sees(sequence, row, at, count)) return true;
    return false;
  }

  // Bound the scores of `count` entries from `at` on, and hide those that the row does not see.
  void limit(float* scores, int64_t sequence, int64_t row, int64_t at, int64_t count) const {
    const int64_t own = sequence * rows + row;
    if (softcap > 0)
      for (int64_t i = 0; i < count; ++i) scores[i] = std::tanh(scores[i] / softcap) * softcap;
    hide(scores, count, sinks - at, begin.const_data_ptr<int64_t>()[own] - at);
    hide(scores, count, end.const_data_ptr<int64_t>()[own] - at, count);
    if (tree) tree->prune(scores, at, count, sequence, row, rows);
  }
};

// What a row has found in all parts, which lie `apart` rows from each other: Σ weights · values / Σ weights.
void join(const Row* found, const float* sums, int64_t parts, int64_t apart, const float* sink, std::vector<float>& to) {
  const int64_t wide = to.size();
  float peak = sink ? *sink : LEAST;
  for (int64_t part = 0; part < parts; ++part) peak = std::max(peak, found[part * apart].peak);
  float mass = sink ? std::exp(*sink - peak) : 0;
  std::fill(to.begin(), to.end(), 0.0f);
  for (int64_t part = 0; part < parts; ++part) {
    const Row& one = found[part * apart];
    const float scale = one.mass != 0 ? std::exp(one.peak - peak) : 0;  // NaN is kept
    mass += one.mass * scale;
    for (int64_t i = 0; i < wide; ++i) to[i] += sums[part * apart * wide + i] * scale;
  }
  for (float& number : to) number = mass != 0 ? number / mass : 0;
}

template <typename Stored>
void attend(const Call& call, const std::optional<at::Tensor>& sinks, at::Tensor& out) {
  const int64_t sequences = call.query.size(0), groups = call.keys.size(1), wide = padded(call.width);
  const int64_t each = call.heads * call.rows;
  const int64_t longest = call.keys.size(2);
  const int64_t threads = at::get_num_threads();
  const int64_t parts = std::max<int64_t>(
      1, std::min((longest + SHORTEST - 1) / SHORTEST, (threads + sequences * groups - 1) / (sequences * groups)));
  const int64_t tasks = sequences * groups * parts;
  std::vector<Row> found(tasks * each);
  std::vector<float> sums(tasks * each * wide);
  at::parallel_for(0, tasks, 1, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t sequence = task / (groups * parts), group = task / parts % groups, part = task % parts;
      const auto* end = call.end.const_data_ptr<int64_t>() + sequence * call.rows;
      const bool there = call.slots.const_data_ptr<int64_t>()[sequence] >= 0;
      const int64_t length = there ? std::min(longest, *std::max_element(end, end + call.rows)) : 0;
      const int64_t share = (length + parts - 1) / parts;
      call.run<Stored>(
          sequence, group, part * share, std::min(length, (part + 1) * share), found.data() + task * each,
          sums.data() + task * each * wide);
    }
  });
  auto* to = out.mutable_data_ptr<Stored>();
  std::vector<float> sum(wide);
  for (int64_t at = 0; at < sequences * groups * each; ++at) {
    const int64_t sequence = at / (groups * each), head = at / call.rows % (groups * call.heads), row = at % call.rows;
    const int64_t first = at / each * parts * each + at % each;
    const float* sink = sinks ? sinks->const_data_ptr<float>() + head : nullptr;
    join(found.data() + first, sums.data() + first * wide, parts, each, sink, sum);
    auto* own = to + ((sequence * call.rows + row) * groups * call.heads + head) * call.width;
    for (int64_t i = 0; i < call.width; ++i) own[i] = static_cast<Stored>(sum[i]);
  }
}

at::Tensor attend_ranges(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& slots,
    const at::Tensor& begin, const at::Tensor& end, const std::optional<at::Tensor>& first,
    const std::optional<at::Tensor>& visible, const std::optional<at::Tensor>& sinks, double scaling, double softcap,
    int64_t sink_tokens) {
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && (values.size(3) < 2 || values.stride(3) == 1));
  TORCH_CHECK(slots.is_contiguous() && begin.is_contiguous() && end.is_contiguous());
  TORCH_CHECK(begin.size(1) == query.size(2) && end.size(1) == query.size(2));
  std::optional<Tree> tree;
  if (first) {
    TORCH_CHECK(first->is_contiguous() && visible->is_contiguous());
    tree = {first->const_data_ptr<int64_t>(), visible->const_data_ptr<bool>(), visible->size(2)};
  }
  const int64_t sequences = query.size(0), heads = query.size(1), rows = query.size(2), width = values.size(3);
  at::Tensor out = at::empty({sequences, rows, heads, width}, query.options());
  const Call call{
      query, keys, values, slots, begin, end, tree, static_cast<float>(scaling), static_cast<float>(softcap),
      sink_tokens, heads / keys.size(1), rows, query.size(3), width};
  if (query.scalar_type() == at::kFloat) attend<float>(call, sinks, out);
  else if (query.scalar_type() == at::kBFloat16) attend<at::BFloat16>(call, sinks, out);
  else TORCH_CHECK(false, "float32 or bfloat16");
  return out.transpose(1, 2);
}

}  // namespace

TORCH_LIBRARY_IMPL(draftkit, CPU, library) { library.impl("attend_ranges", TORCH_FN(attend_ranges)); }
