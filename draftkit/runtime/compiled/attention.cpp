// Attention of a few rows of each sequence over the entries that it really has: `attention.py` says what is computed.
//
// A task is a key/value head of a sequence, or a part of its entries where there are fewer of these than threads. It
// takes its entries tile by tile, so that every key and value is read once for all query heads and rows. Sequences that
// follow each other and lie in one slot are taken together, as the tokens of a prompt, each of which is one.

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
constexpr int64_t TILE = 64;       // entries
constexpr int64_t SHORTEST = 256;  // entries of a part
constexpr int64_t LONGEST = 32;    // rows of sequences that are taken together
constexpr int64_t TURNED = 16;     // rows from which on it pays to have a tile's keys side by side
constexpr int TOGETHER = WIDE >= 16 ? 6 : 2;  // rows for which a key or value is read into registers once
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

void narrow(const float* from, int64_t count, float* to) { std::copy(from, from + count, to); }

void narrow(const float* from, int64_t count, at::BFloat16* to) {
  int64_t at = 0;
  for (; at + 2 * WIDE <= count; at += 2 * WIDE)
    at::vec::convert_float_bfloat16(Vec::loadu(from + at), Vec::loadu(from + at + WIDE)).store(to + at);
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

// A tile's keys, `wide` floats each, side by side: to[i * TILE + entry]. What lies beyond `count` is not used.
void turn(const float* keys, int64_t count, int64_t depth, int64_t wide, float* to) {
  for (int64_t entry = 0; entry < count; ++entry)
    for (int64_t i = 0; i < depth; ++i) to[i * TILE + entry] = keys[entry * wide + i];
}

// scores[row][i] = queries[row] · keys[i] for a tile of turned keys and `R` rows.
template <int R>
void multiply_turned(const float* const* queries, const float* keys, int64_t depth, float (*scores)[TILE]) {
  constexpr int PARTS = TILE / WIDE;
  Vec sum[R][PARTS];
  for (int row = 0; row < R; ++row)
    for (int i = 0; i < PARTS; ++i) sum[row][i] = Vec(0);
  for (int64_t at = 0; at < depth; ++at, keys += TILE) {
    Vec key[PARTS];
    for (int i = 0; i < PARTS; ++i) key[i] = Vec::loadu(keys + i * WIDE);
    for (int row = 0; row < R; ++row) {
      const Vec number(queries[row][at]);
      for (int i = 0; i < PARTS; ++i) sum[row][i] = at::vec::fmadd(number, key[i], sum[row][i]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int i = 0; i < PARTS; ++i) sum[row][i].store(scores[row] + i * WIDE);
}

// sums = sums · scale + Σ weights[i] · values[i], for `R` rows, of `N` vectors that lie `wide` floats apart.
template <int R, int N>
void gather(
    const float (*weights)[TILE], const float* values, int64_t count, int64_t wide, const float* scale,
    float* const* sums, int64_t begin) {
  Vec sum[R][N];
  for (int row = 0; row < R; ++row)
    for (int i = 0; i < N; ++i) sum[row][i] = Vec::loadu(sums[row] + begin + i * WIDE) * Vec(scale[row]);
  values += begin;
  for (int64_t entry = 0; entry < count; ++entry, values += wide) {
    Vec value[N];
    for (int i = 0; i < N; ++i) value[i] = Vec::loadu(values + i * WIDE);
    for (int row = 0; row < R; ++row) {
      const Vec weight(weights[row][entry]);
      for (int i = 0; i < N; ++i) sum[row][i] = at::vec::fmadd(weight, value[i], sum[row][i]);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int i = 0; i < N; ++i) sum[row][i].store(sums[row] + begin + i * WIDE);
}

template <int R>
void gather(
    const float (*weights)[TILE], const float* values, int64_t count, int64_t wide, const float* scale,
    float* const* sums) {
  int64_t begin = 0;
  for (; begin + 4 * WIDE <= wide; begin += 4 * WIDE) gather<R, 4>(weights, values, count, wide, scale, sums, begin);
  for (; begin < wide; begin += WIDE) gather<R, 1>(weights, values, count, wide, scale, sums, begin);
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
    const Vec weight = (Vec::loadu(scores + i) - Vec(peak)).exp_u20();
    weight.store(scores + i);
    mass = mass + weight;
  }
  const float scale = row.peak == peak ? 1 : row.peak == LEAST ? 0 : std::exp(row.peak - peak);
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

  void prune(float* scores, int64_t at, int64_t count, int64_t sequence, int64_t row) const {
    const bool* seen = visible + row * size;
    for (int64_t i = std::max<int64_t>(first[sequence] - at, 0); i < count; ++i) {
      const int64_t node = at + i - first[sequence];
      if (node >= size || !seen[node]) scores[i] = LEAST;
    }
  }
};

// `count` sequences from `first` on, in one slot.
struct Neighbours {
  int64_t first, count;
};

// A query: its place among those of a task, and which row of all sequences it has.
struct Seeing {
  int64_t place, row;
};

// What tasks need of memory, one after the other: queries, a tile's keys and values, and the queries that see any of it.
struct Scratch {
  std::vector<float> queries, key, turned, value;
  std::vector<Seeing> seeing;

  Scratch(int64_t most, int64_t deep, int64_t wide)
      : queries(most * deep), key(TILE * deep), turned(TILE * deep), value(TILE * wide) {}
};

struct Call {
  const at::Tensor &query, &keys, &values;
  const int64_t *slots, *begin, *end;
  std::optional<Tree> tree;
  float scaling, softcap;
  int64_t sinks;  // first entries that every row sees
  int64_t heads, rows, depth, width;

  // The entries from `first` on, before `last`, for all rows of key/value head `group` of some sequences.
  template <typename Stored>
  void run(
      const Neighbours& some, int64_t group, int64_t first, int64_t last, Scratch& scratch, Row* found,
      float* sums) const {
    const int64_t deep = padded(depth), wide = padded(width), all = some.count * rows;
    for (int64_t i = 0; i < some.count; ++i)
      load_queries<Stored>(some.first + i, group, i * rows, all, scratch.queries.data());
    const auto* all_keys = of_slot<Stored>(keys, some.first, group);
    const auto* all_values = of_slot<Stored>(values, some.first, group);
    for (int64_t at = first; at < last; at += TILE) {
      const int64_t count = std::min(TILE, last - at);
      scratch.seeing.clear();
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t i = 0, row = some.first * rows; i < all; ++i, ++row)
          if (sees(row, at, count)) scratch.seeing.push_back({head * all + i, row});
      if (scratch.seeing.empty()) continue;
      load(all_keys + at * keys.stride(2), keys.stride(2), count, depth, deep, scratch.key.data());
      load(all_values + at * values.stride(2), values.stride(2), count, width, wide, scratch.value.data());
      const int64_t left = scratch.seeing.size();
      if (left >= TURNED) turn(scratch.key.data(), count, depth, deep, scratch.turned.data());
      for (int64_t i = 0; i < left; i += TOGETHER) {
        const Seeing* each = scratch.seeing.data() + i;
        switch (std::min<int64_t>(TOGETHER, left - i)) {
          case 6: take<6>(scratch, each, at, count, found, sums); break;
          case 5: take<5>(scratch, each, at, count, found, sums); break;
          case 4: take<4>(scratch, each, at, count, found, sums); break;
          case 3: take<3>(scratch, each, at, count, found, sums); break;
          case 2: take<2>(scratch, each, at, count, found, sums); break;
          case 1: take<1>(scratch, each, at, count, found, sums); break;
        }
      }
    }
  }

  // A tile of `count` entries from `at` on, for `R` queries, `each` of which sees some of it.
  template <int R>
  void take(const Scratch& scratch, const Seeing* each, int64_t at, int64_t count, Row* found, float* sums) const {
    const int64_t deep = padded(depth), wide = padded(width);
    const bool turned = static_cast<int64_t>(scratch.seeing.size()) >= TURNED;
    const float* queries[R];
    float* gathered[R];
    float scores[R][TILE], scale[R];
    for (int i = 0; i < R; ++i) {
      queries[i] = scratch.queries.data() + each[i].place * deep;
      gathered[i] = sums + each[i].place * wide;
      if (!turned) multiply(queries[i], scratch.key.data(), count, deep, scores[i]);
    }
    if (turned) multiply_turned<R>(queries, scratch.turned.data(), depth, scores);
    for (int i = 0; i < R; ++i) {
      limit(scores[i], each[i].row, at, count);
      scale[i] = weigh(found[each[i].place], scores[i], count);
    }
    gather<R>(scores, scratch.value.data(), count, wide, scale, gathered);
  }

  // The queries of a sequence, times `scaling`: head by head, `all` rows each, of which its own begin at `place`.
  template <typename Stored>
  void load_queries(int64_t sequence, int64_t group, int64_t place, int64_t all, float* to) const {
    const int64_t deep = padded(depth);
    for (int64_t head = 0; head < heads; ++head) {
      const auto* own = query.const_data_ptr<Stored>() + sequence * query.stride(0) +
          (group * heads + head) * query.stride(1);
      float* rows_of_head = to + (head * all + place) * deep;
      load(own, query.stride(2), rows, depth, deep, rows_of_head);
      for (int64_t i = 0; i < rows * deep; ++i) rows_of_head[i] *= scaling;
    }
  }

  template <typename Stored>
  const Stored* of_slot(const at::Tensor& pool, int64_t sequence, int64_t group) const {
    return pool.const_data_ptr<Stored>() + slots[sequence] * pool.stride(0) + group * pool.stride(1);
  }

  // Whether a row, of all sequences' ones, sees any of `count` entries from `at` on.
  bool sees(int64_t row, int64_t at, int64_t count) const {
    return at < end[row] && (at + count > begin[row] || at < sinks);
  }

  // Bound the scores of `count` entries from `at` on, and hide those that the row does not see.
  void limit(float* scores, int64_t row, int64_t at, int64_t count) const {
    if (softcap > 0)
      for (int64_t i = 0; i < count; ++i) scores[i] = std::tanh(scores[i] / softcap) * softcap;
    hide(scores, count, sinks - at, begin[row] - at);
    hide(scores, count, end[row] - at, count);
    if (tree) tree->prune(scores, at, count, row / rows, row);
  }
};

// What a row has found in all parts, which lie `apart` rows from each other: Σ weights · values / Σ weights.
void join(const Row* found, const float* sums, int64_t parts, int64_t apart, const float* sink, std::vector<float>& to) {
  const int64_t wide = to.size();
  float peak = sink ? *sink : LEAST;
  for (int64_t part = 0; part < parts; ++part) peak = std::max(peak, found[part * apart].peak);
  const auto scale = [&](const Row& one) { return one.mass != 0 ? std::exp(one.peak - peak) : 0; };  // NaN is kept
  float mass = sink ? std::exp(*sink - peak) : 0;
  for (int64_t part = 0; part < parts; ++part) mass += found[part * apart].mass * scale(found[part * apart]);
  std::fill(to.begin(), to.end(), 0.0f);
  for (int64_t part = 0; part < parts && mass != 0; ++part) {
    const Vec share(scale(found[part * apart]) / mass);
    for (int64_t i = 0; i < wide; i += WIDE)
      at::vec::fmadd(Vec::loadu(sums + part * apart * wide + i), share, Vec::loadu(to.data() + i)).store(to.data() + i);
  }
}

// Sequences that follow each other in one slot, with `LONGEST` rows at most.
std::vector<Neighbours> neighbours(const Call& call) {
  const int64_t* slots = call.slots;
  std::vector<Neighbours> found;
  for (int64_t sequence = 0; sequence < call.query.size(0); ++sequence) {
    const bool follows = sequence > 0 && slots[sequence] == slots[sequence - 1];
    if (follows && (found.back().count + 1) * call.rows <= LONGEST) ++found.back().count;
    else found.push_back({sequence, 1});
  }
  return found;
}

template <typename Stored>
void attend(const Call& call, const std::optional<at::Tensor>& sinks, at::Tensor& out) {
  const int64_t groups = call.keys.size(1), wide = padded(call.width), longest = call.keys.size(2);
  const int64_t threads = at::get_num_threads();
  const std::vector<Neighbours> all = neighbours(call);
  const int64_t blocks = all.size() * groups;
  if (blocks == 0) return;
  const auto more = [](const Neighbours& one, const Neighbours& other) { return one.count < other.count; };
  const int64_t most = std::max_element(all.begin(), all.end(), more)->count * call.heads * call.rows;
  const int64_t parts =
      std::max<int64_t>(1, std::min((longest + SHORTEST - 1) / SHORTEST, (threads + blocks - 1) / blocks));
  std::vector<Row> found(blocks * parts * most);
  std::vector<float> sums(blocks * parts * most * wide);
  at::parallel_for(0, blocks * parts, 1, [&](int64_t from, int64_t to) {
    Scratch scratch(most, padded(call.depth), wide);
    for (int64_t task = from; task < to; ++task) {
      const Neighbours& some = all[task / (groups * parts)];
      const int64_t group = task / parts % groups, part = task % parts;
      const int64_t* end = call.end + some.first * call.rows;
      const bool there = call.slots[some.first] >= 0;
      const int64_t length = there ? std::min(longest, *std::max_element(end, end + some.count * call.rows)) : 0;
      const int64_t share = (length + parts - 1) / parts;
      call.run<Stored>(
          some, group, part * share, std::min(length, (part + 1) * share), scratch, found.data() + task * most,
          sums.data() + task * most * wide);
    }
  });
  auto* to = out.mutable_data_ptr<Stored>();
  at::parallel_for(0, blocks, 1, [&](int64_t from, int64_t until) {
    std::vector<float> sum(wide);
    for (int64_t block = from; block < until; ++block) {
      const Neighbours& some = all[block / groups];
      const int64_t rows = some.count * call.rows, first = block * parts * most;
      for (int64_t each = 0; each < call.heads * rows; ++each) {
        const int64_t head = block % groups * call.heads + each / rows, row = some.first * call.rows + each % rows;
        const float* sink = sinks ? sinks->const_data_ptr<float>() + head : nullptr;
        join(found.data() + first + each, sums.data() + (first + each) * wide, parts, most, sink, sum);
        auto* own = to + (row * groups * call.heads + head) * call.width;
        narrow(sum.data(), call.width, own);
      }
    }
  });
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
      query, keys, values, slots.const_data_ptr<int64_t>(), begin.const_data_ptr<int64_t>(),
      end.const_data_ptr<int64_t>(), tree, static_cast<float>(scaling), static_cast<float>(softcap),
      sink_tokens, heads / keys.size(1), rows, query.size(3), width};
  if (query.scalar_type() == at::kFloat) attend<float>(call, sinks, out);
  else if (query.scalar_type() == at::kBFloat16) attend<at::BFloat16>(call, sinks, out);
  else TORCH_CHECK(false, "float32 or bfloat16");
  return out.transpose(1, 2);
}

}  // namespace

TORCH_LIBRARY_IMPL(draftkit, CPU, library) { library.impl("attend_ranges", TORCH_FN(attend_ranges)); }
